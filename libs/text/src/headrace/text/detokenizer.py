"""Token ids to text, one at a time."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from headrace.text.tokenizer import Tokenizer

_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """The text of one answer as it grows: what all calls return, joined, equals `tokenizer.decode` of all ids.

    Constant time per token. A character is returned whole, with the token that completes it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._decoder = _utf8_decoder(errors="replace")
        self._drop_space = tokenizer.token_bytes.drops_first_space

    def push(self, token_id: int) -> str:
        """The characters that `token_id` completes, often none; any id is allowed."""
        return self._trimmed(self._decoder.decode(self._token_bytes[token_id]))

    def push_all(self, token_ids: Iterable[int]) -> str:
        """The characters that these complete, one after the other."""
        spelled = self._token_bytes
        return self._trimmed(self._decoder.decode(b"".join([spelled[token_id] for token_id in token_ids])))

    def finish(self) -> str:
        """What is left of an unfinished character, as U+FFFD; the next answer may then begin."""
        text = self._trimmed(self._decoder.decode(b"", final=True))
        self._drop_space = self._token_bytes.drops_first_space
        return text

    def _trimmed(self, text: str) -> str:
        if self._drop_space and text:
            self._drop_space = False
            return text.removeprefix(" ")
        return text
