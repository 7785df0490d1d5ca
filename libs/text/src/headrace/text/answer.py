"""The text of one answer, from its token ids: whole characters, cut at the first stop text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.text.detokenizer import Detokenizer
from headrace.text.stop import StopChecker, Stopped
from headrace.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Piece:
    """New text to show, and whether the answer ends with it."""

    text: str
    stopped: bool


class AnswerText:
    """One per answer; `push` until it says stopped or the tokens end, then `finish` once.

    A stop text that is itself a special token stops at that token's id, because special tokens have no text. The text
    of the first `min_tokens` tokens is shown as it is: a stop text counts only if all of it comes after them.
    """

    def __init__(
        self, tokenizer: Tokenizer, stops: Sequence[str] = (), *, min_tokens: int = 0, field: str = "sampling.stop"
    ) -> None:
        """InvalidRequest with the path `field` when `stops` are too many, too long or empty."""
        self._detokenizer = Detokenizer(tokenizer)
        self._checker = StopChecker(stops, field=field)
        self._stop_ids = frozenset(i for i in map(tokenizer.special_id, stops) if i is not None)
        self._stops = bool(stops)
        self._unchecked = min_tokens
        self._stopped = False

    def push(self, token_id: int) -> Piece:
        """The text that `token_id` adds, often none; nothing after a stop."""
        if self._stopped:
            return Piece("", True)
        if self._unchecked > 0:
            self._unchecked -= 1
            return Piece(self._detokenizer.push(token_id), False)
        if token_id in self._stop_ids:
            text = self.finish()
            self._stopped = True
            return Piece(text, True)
        return self._check(self._detokenizer.push(token_id))

    def push_all(self, token_ids: Sequence[int]) -> tuple[int, Piece]:
        """How many of them belong to the answer (all, or those up to a stop), and the text that they add."""
        if not self._stops:
            return len(token_ids), Piece(self._detokenizer.push_all(token_ids), False)
        text = ""
        for count, token_id in enumerate(token_ids, start=1):
            piece = self.push(token_id)
            text += piece.text
            if piece.stopped:
                return count, Piece(text, True)
        return len(token_ids), Piece(text, False)

    def finish(self) -> str:
        """The rest: an unfinished character as U+FFFD, and text held back for a stop that did not come."""
        if self._stopped:
            return ""
        last = self._check(self._detokenizer.finish())
        return last.text if last.stopped else last.text + self._checker.finish()

    def _check(self, text: str) -> Piece:
        found = self._checker.push(text) if text else None
        self._stopped = isinstance(found, Stopped)
        return Piece(found.text if found else "", self._stopped)
