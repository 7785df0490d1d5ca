"""Stop texts: an answer ends before the first of them, and no part of one is ever shown by mistake."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.base.errors import InvalidRequest

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256


@dataclass(frozen=True, slots=True)
class Text:
    """Text that no stop text can begin in any more."""

    text: str


@dataclass(frozen=True, slots=True)
class Stopped:
    """The answer's last text, up to `stop`."""

    text: str
    stop: str


def validate_stops(stops: Sequence[str], *, field: str = "sampling.stop") -> None:
    """InvalidRequest with the field's path unless `stops` are at most 16 texts of 1 to 256 characters."""
    if len(stops) > MAX_STOPS:
        raise InvalidRequest(field, f"at most {MAX_STOPS} texts are allowed, not {len(stops)}")
    for n, stop in enumerate(stops):
        if not 1 <= len(stop) <= MAX_STOP_CHARACTERS:
            raise InvalidRequest(f"{field}[{n}]", f"must have 1 to {MAX_STOP_CHARACTERS} characters, not {len(stop)}")


class StopChecker:
    """Finds the stop text that completes earliest, the longest of those completing together.

    What it holds back is exactly the longest end of the text that some stop text begins with: a fixed hold-back of
    the longest stop's length would delay every token.
    """

    def __init__(self, stops: Sequence[str], *, field: str = "sampling.stop") -> None:
        validate_stops(stops, field=field)
        self._needles = [_Needle(stop) for stop in sorted(set(stops), key=len, reverse=True)]
        self._held = ""
        self._stopped: Stopped | None = None

    def push(self, text: str) -> Text | Stopped:
        """What may be shown now that `text` has arrived; after a stop, nothing more."""
        if self._stopped is not None:
            return Stopped("", self._stopped.stop)
        window = self._held + text
        for n, character in enumerate(text, start=len(self._held) + 1):
            for needle in self._needles:
                if needle.completes_with(character):
                    self._held = ""
                    self._stopped = Stopped(window[: n - len(needle.stop)], needle.stop)
                    return self._stopped
        shown = len(window) - max((needle.matched for needle in self._needles), default=0)
        self._held = window[shown:]
        return Text(window[:shown])

    def finish(self) -> str:
        """The text held back, now that no more will come."""
        held, self._held = self._held, ""
        for needle in self._needles:
            needle.matched = 0
        return held


class _Needle:
    """Knuth, Morris, Pratt (1977) for one stop text: constant time per character, however it is split."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0  # characters of `stop` that the text ends with: always the most, and fewer than all
        self._shorter = [0]  # [i]: the next shorter start of `stop` that stop[:i+1] ends with
        for character in stop[1:]:
            self._shorter.append(self._longer(self._shorter[-1], character))

    def completes_with(self, character: str) -> bool:
        self.matched = self._longer(self.matched, character)
        return self.matched == len(self.stop)

    def _longer(self, matched: int, character: str) -> int:
        while matched and self.stop[matched] != character:
            matched = self._shorter[matched - 1]
        return matched + 1 if self.stop[matched] == character else 0
