"""Which of many are told of in full."""

from __future__ import annotations


class Sampling:
    """The first `most_per_s` of each second."""

    def __init__(self, *, most_per_s: int) -> None:
        self._most = most_per_s
        self._second = 0
        self._told = 0

    def allows(self, now: float) -> bool:
        """Whether this one is among them; `now` are seconds of a clock that never goes back."""
        if int(now) != self._second:
            self._second, self._told = int(now), 0
        self._told += 1
        return self._told <= self._most
