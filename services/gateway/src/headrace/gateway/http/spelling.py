"""Log-probabilities as OpenAI spells them: tokens as text and as bytes."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator
from typing import Any

from headrace.api.common.v1.answer_pb2 import TokenLogprob, TokenLogprobs
from headrace.text.tokenizer import Tokenizer

Json = dict[str, Any]


class Spelling:
    """What each token of one model is called.

    A token that ends an answer, or is special in another way, adds nothing to the text: it gets no entry of its own,
    but is named, as the model spells it, where it was among the likeliest.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def chat(self, entries: Iterable[TokenLogprobs]) -> list[Json]:
        """Entries of a chat answer's `logprobs.content`."""
        return [
            self._entry(one.token) | {"top_logprobs": [self._entry(top) for top in one.top]}
            for one in self._shown(entries)
        ]

    def name(self, token_id: int) -> str:
        """A token's text; bytes that are no whole characters as OpenAI's completions write them."""
        content = self._tokenizer.token_bytes[token_id]
        if not content:
            return self._tokenizer.special_text(token_id) or ""
        try:
            return content.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)

    def _shown(self, entries: Iterable[TokenLogprobs]) -> Iterator[TokenLogprobs]:
        return (one for one in entries if self._tokenizer.token_bytes[one.token.token_id])

    def _entry(self, token: TokenLogprob) -> Json:
        content = self._tokenizer.token_bytes[token.token_id]
        special = "" if content else self._tokenizer.special_text(token.token_id) or ""
        return {
            "token": special or content.decode(errors="replace"),
            "logprob": token.logprob,
            "bytes": list(content or special.encode()),
        }


class CompletionLogprobs:
    """One completion's `logprobs`: parallel lists, with each token's offset in the text so far."""

    def __init__(self, spelling: Spelling) -> None:
        self._spelling = spelling
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def take(self, entries: Iterable[TokenLogprobs]) -> Json:
        """The lists for the next entries."""
        shown = list(self._spelling._shown(entries))
        return {
            "tokens": [self._spelling.name(one.token.token_id) for one in shown],
            "token_logprobs": [one.token.logprob for one in shown],
            "top_logprobs": [self._top(one) for one in shown],
            "text_offset": [self._advance(one.token.token_id) for one in shown],
        }

    def _top(self, one: TokenLogprobs) -> dict[str, float]:
        """By name, the token itself included; of several tokens that look alike, the likeliest."""
        found: dict[str, float] = {}
        for token in (*one.top, one.token):
            found.setdefault(self._spelling.name(token.token_id), token.logprob)
        return found

    def _advance(self, token_id: int) -> int:
        before = self._offset
        self._offset += len(self._decoder.decode(self._spelling._tokenizer.token_bytes[token_id]))
        return before
