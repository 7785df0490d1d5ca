"""The numbers that name the sequences of one stream."""

from __future__ import annotations

from bisect import insort


class Slots:
    """Slots from 1, the lowest first; those of one request's answers are a range without gaps."""

    def __init__(self) -> None:
        self._free: list[int] = []  # ascending, all below `_next`
        self._next = 1

    def take(self, count: int) -> range:
        """Reserve `count` slots in a row."""
        first = self._first_of_run(count)
        taken = range(first, first + count)
        self._free = [slot for slot in self._free if slot not in taken]
        self._next = max(self._next, taken.stop)
        return taken

    def give(self, slot: int) -> None:
        """Return one slot that was taken."""
        insort(self._free, slot)

    def _first_of_run(self, count: int) -> int:
        """Where the first run begins that is long enough, or can be made so with numbers never used."""
        begins = length = 0
        for slot in self._free:
            begins, length = (begins, length + 1) if length and slot == begins + length else (slot, 1)
            if length == count:
                return begins
        return begins if length and begins + length == self._next else self._next
