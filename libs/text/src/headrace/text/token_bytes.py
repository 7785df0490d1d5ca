"""From token ids to bytes: the exact ground under every decoded text.

Both families of decoders that language models use turn each token into bytes on its own, so a text is the
concatenation of its tokens' bytes read as UTF-8. That makes decoding incremental for any sequence of ids.
"""

from __future__ import annotations

import json
import re
from enum import Enum
from typing import Any

from tokenizers import Tokenizer as Backend

from headrace.base.errors import StartError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_FALLBACK_STEPS = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}


class Alphabet(Enum):
    """How a token's text stands for bytes."""

    BYTE_LEVEL = "byte_level"  # GPT-2: each byte is one printable character
    BYTE_FALLBACK = "byte_fallback"  # SentencePiece: plain text, "▁" for a space, "<0xE4>" for a lone byte


class TokenBytes:
    """The bytes of each token; special tokens and ids outside the vocabulary have none.

    `drops_first_space`: the tokenizer puts a space before a text, so decoding takes one away.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._alphabet, self.drops_first_space = _read_decoder(backend)
        self._known: dict[int, bytes] = {i: b"" for i, t in backend.get_added_tokens_decoder().items() if t.special}

    def __getitem__(self, token_id: int) -> bytes:
        known = self._known.get(token_id)
        if known is None:
            # Filled on demand: the whole table takes 30 ms of the start, an answer uses a few hundred entries.
            known = self._bytes_of(token_id)
            if known:
                self._known[token_id] = known
        return known

    def _bytes_of(self, token_id: int) -> bytes:
        if not 0 <= token_id < 1 << 32:  # what the tokenizer's id type can hold
            return b""
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._alphabet is Alphabet.BYTE_FALLBACK:
            byte = _BYTE_TOKEN.fullmatch(token)
            return bytes.fromhex(byte[1]) if byte else token.replace("▁", " ").encode()
        try:
            return bytes(map(_BYTE_OF.__getitem__, token))
        except KeyError:  # an added token, spelled in plain text
            return token.encode()


def _read_decoder(backend: Backend) -> tuple[Alphabet, bool]:
    """The alphabet and whether the first space goes, from the tokenizer's own decoder."""
    decoder = layout_of(backend.decoder) or {"type": "none"}
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = {step["type"] for step in steps}
    if kinds == {"ByteLevel"}:
        return Alphabet.BYTE_LEVEL, False
    if kinds <= _FALLBACK_STEPS:
        strips = any(step["type"] == "Strip" and step["start"] > 0 for step in steps)
        spaced = any(step["type"] == "Metaspace" and step.get("prepend_scheme") != "never" for step in steps)
        return Alphabet.BYTE_FALLBACK, strips or spaced
    raise StartError(f"the tokenizer's decoder ({', '.join(sorted(kinds))}) is not one of a language model")


def layout_of(component: Any) -> dict[str, Any] | None:
    """A tokenizer's component (decoder, pre-tokenizer) as tokenizer.json spells it.

    Through its pickling protocol: `Tokenizer.to_str` would write and parse the whole vocabulary, 0.05 s.
    """
    layout: dict[str, Any] | None = json.loads(component.__getstate__()) if component is not None else None
    return layout


def _byte_characters() -> dict[str, int]:
    """GPT-2's map: printable Latin-1 stands for itself, the other 68 bytes for U+0100 onwards, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + n): b for n, b in enumerate(others)}


_BYTE_OF = _byte_characters()
