"""Which slots hold which block: one bit per slot in one mask per block hash, and never more than so many blocks.

A slot stands for what one engine has cached, from one snapshot or flush to the next. Retiring a slot is one step,
however much it held: its bit counts for nothing from then on, and `tidy` takes it out of the masks part by part.

The blocks lie in 256 small dictionaries by the first byte of their hash. One large one would be rehashed as a whole
when it grows, which at 10^6 blocks stops the event loop for tens of milliseconds; and the least recently used entry is
the first of a small dictionary, which is found quickly though others before it were deleted.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

_PARTS = 256  # of 4,000 blocks at 10^6: rehashing one takes 0.1 ms
_WHOLE = 4096  # up to here one dictionary does, and "least recent" is exact over all of it
_INTERNED = 1 << 16


class BlockTable:
    """Masks by block hash, at most `max_blocks` (0: none at all); the least recently added or touched leave first."""

    def __init__(self, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self.evicted = 0
        """Blocks that have left for want of room."""
        self._parts: list[dict[bytes, int]] = [{} for _ in range(1 if max_blocks <= _WHOLE else _PARTS)]
        self.part_of_byte = self._parts * (_PARTS // len(self._parts))
        """Where to look for a hash, by its first byte; for reading only."""
        self._size = 0
        self._evict_next = 0
        self._bits: list[int] = []
        self._counts: list[int] = []
        self._free: list[int] = []
        self._retired = 0
        self._sweeping = 0
        self._sweep_next = 0
        # Blocks of one chain have mostly the same holders: they share one mask object.
        self._interned: dict[int, int] = {}

    def __len__(self) -> int:
        """Blocks in the table, those that only retired slots hold included until they are swept out."""
        return self._size

    @property
    def slots(self) -> int:
        """Slots ever needed at once: the width of the masks."""
        return len(self._bits)

    def open(self) -> int:
        """A slot that holds nothing."""
        if self._free:
            return self._free.pop()
        self._bits.append(1 << len(self._bits))
        self._counts.append(0)
        return len(self._bits) - 1

    def bit(self, slot: int) -> int:
        """The slot's bit in the masks."""
        return self._bits[slot]

    def count(self, slot: int) -> int:
        """Blocks that the slot holds here."""
        return self._counts[slot]

    def add(self, slot: int, hashes: Iterable[bytes]) -> None:
        """The slot holds these, the last of them most recently."""
        bit, parts, new = self._bits[slot], self.part_of_byte, 0
        for block_hash in hashes:
            part = parts[block_hash[0]]
            mask = part.pop(block_hash, None)
            if mask is None:
                part[block_hash] = bit
                new += 1
                self._size += 1
                if self._size > self.max_blocks:
                    self._evict()
            elif mask & bit:
                part[block_hash] = mask
            else:
                part[block_hash] = self._intern(mask | bit)
                new += 1
        self._counts[slot] += new

    def discard(self, slot: int, hashes: Iterable[bytes]) -> None:
        """The slot no longer holds these; those it does not hold here are no error."""
        bit = self._bits[slot]
        for block_hash in hashes:
            part = self.part_of_byte[block_hash[0]]
            mask = part.get(block_hash, 0)
            if mask & bit:
                self._counts[slot] -= 1
                self._put(part, block_hash, mask ^ bit)

    def prefix(self, slot: int, hashes: Iterable[bytes]) -> int:
        """How many of the chain `hashes` the slot holds without a gap."""
        bit, parts, held = self._bits[slot], self.part_of_byte, 0
        for block_hash in hashes:
            if not parts[block_hash[0]].get(block_hash, 0) & bit:
                break
            held += 1
        return held

    def touch(self, hashes: Iterable[bytes]) -> None:
        """These were of use, the last of them most recently; all must be in the table.

        While it is less than half full nothing is written down: before anything has to leave, as many blocks again will
        come, and what is in use will have been touched.
        """
        if 2 * self._size < self.max_blocks:
            return
        parts = self.part_of_byte
        for block_hash in hashes:
            part = parts[block_hash[0]]
            part[block_hash] = part.pop(block_hash)

    def retire(self, slot: int) -> None:
        """Nobody asks for this slot any more: it holds nothing, and comes back from `open` once it is swept out."""
        if self._counts[slot] == 0:
            self._free.append(slot)
            return
        self._counts[slot] = 0
        self._retired |= self._bits[slot]

    def tidy(self) -> bool:
        """Sweep retired slots out of one part of the table; whether any remain."""
        if not self._retired:
            return False
        if self._sweep_next == 0:
            self._sweeping = self._retired
        part, sweeping = self._parts[self._sweep_next], self._sweeping
        for block_hash, mask in [(h, m) for h, m in part.items() if m & sweeping]:
            self._put(part, block_hash, mask & ~sweeping)
        self._sweep_next = (self._sweep_next + 1) % len(self._parts)
        if self._sweep_next == 0:
            self._free.extend(slots_in(sweeping))
            self._retired &= ~sweeping
        return self._retired != 0

    def _put(self, part: dict[bytes, int], block_hash: bytes, mask: int) -> None:
        if mask:
            part[block_hash] = self._intern(mask)
        else:
            del part[block_hash]
            self._size -= 1

    def _evict(self) -> None:
        """Drop the oldest of the next part that has any: parts are equally full, hashes being random.

        A 256th of the part at a time, so that walking over the deleted ones before them is paid once for all.
        """
        while not self._parts[self._evict_next]:
            self._evict_next = (self._evict_next + 1) % len(self._parts)
        part = self._parts[self._evict_next]
        self._evict_next = (self._evict_next + 1) % len(self._parts)
        oldest = list(islice(part, 1 + len(part) // 256))
        for block_hash in oldest:
            for slot in slots_in(part.pop(block_hash) & ~self._retired):
                self._counts[slot] -= 1
        self._size -= len(oldest)
        self.evicted += len(oldest)

    def _intern(self, mask: int) -> int:
        if len(self._interned) >= _INTERNED:
            self._interned.clear()
        return self._interned.setdefault(mask, mask)


def slots_in(mask: int) -> list[int]:
    """The slots of a mask, in order."""
    slots = []
    while mask:
        low = mask & -mask
        slots.append(low.bit_length() - 1)
        mask ^= low
    return slots
