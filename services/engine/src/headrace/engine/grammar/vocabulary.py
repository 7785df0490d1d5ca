"""A model's tokens as a trie, for walking grammars through it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from llguidance import LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from headrace.text.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The trie of the tokens below `size`; `eos` is the mask that allows the end of an answer and nothing else.

    Special tokens and ids that the tokenizer does not know carry no text: no grammar allows them, but for the ends.
    """

    trie: LLTokenizer
    size: int
    eos_ids: frozenset[int]
    eos: NDArray[np.int32]


def load_vocabulary(path: Path, size: int, eos_ids: frozenset[int]) -> Vocabulary:
    """Of the model at `path`, whose logits have `size` columns; StartError when it has no tokenizer.

    Takes 0.3 s for 49,152 tokens, of which 0.1 s hold the interpreter's lock: once in a worker's life.
    """
    spelling = _Spelling(load_tokenizer(path), size, eos_ids)
    # The slices are sets of tokens known to fit inside a JSON string: with them a mask there takes 0.002 ms.
    trie = LLTokenizer(spelling, n_vocab=size, eos_token=sorted(eos_ids), slices=LLTokenizer.json_slices())
    return Vocabulary(trie=trie, size=size, eos_ids=eos_ids, eos=_bits(eos_ids, size))


class _Spelling(TokenizerWrapper):
    """What llguidance asks of a tokenizer: each token's bytes, and how it would write a text."""

    def __init__(self, tokenizer: Tokenizer, size: int, eos_ids: frozenset[int]) -> None:
        # Not the base class's __init__: it wraps other libraries' tokenizers.
        self.is_tokenizer_wrapper = True
        self.eos_token_id = min(eos_ids)
        self.bos_token_id = tokenizer.bos_id
        spelt = [tokenizer.token_bytes[i] for i in range(size)]
        self.special_token_ids = [i for i, token in enumerate(spelt) if not token]
        # Specials need names of their own: two tokens of the same spelling would stand for each other.
        self.tokens = [token or f"<special {i}>".encode() for i, token in enumerate(spelt)]
        self._tokenizer = tokenizer
        self._ids = {token: i for i, token in reversed(list(enumerate(spelt))) if token}
        self._longest = max(map(len, self._ids))

    def __call__(self, text: str) -> list[int]:
        """The tokens the model was taught for `text`: where a grammar leaves one text, its mask allows the first.

        A tokenizer that cannot write a text without changing it (a space in front) is replaced by longest matches.
        """
        ids = self._tokenizer.encode_inside(text)
        data = text.encode()
        spelt = b"".join(map(self._tokenizer.token_bytes.__getitem__, ids))
        return ids if spelt == data and max(ids, default=0) < len(self.tokens) else list(self._longest_matches(data))

    def _longest_matches(self, data: bytes) -> Iterable[int]:
        start = 0
        while start < len(data):
            end = min(len(data), start + self._longest)
            while end > start and data[start:end] not in self._ids:
                end -= 1
            if end == start:
                return  # no token begins like this; llguidance goes on byte by byte
            yield self._ids[data[start:end]]
            start = end


def _bits(token_ids: Iterable[int], size: int) -> NDArray[np.int32]:
    flags = np.zeros(-(-size // 32) * 32, dtype=np.bool_)
    flags[list(token_ids)] = True
    return np.packbits(flags, bitorder="little").view(np.int32)
