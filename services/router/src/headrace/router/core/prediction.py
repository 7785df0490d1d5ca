"""Blocks that engines do not have yet but are about to: those of requests that were just placed there.

A prediction lives for a fixed time, until the engine says that it has stored the block, or until it is withdrawn
because the attempt failed. Siblings may predict the same block: it is predicted while one of them does.

Most placements never meet a sibling. So one is filed as a whole, under the first block that was news, and spread out
block by block when that block is asked for: a chain without it has none of the others, for a hash names all before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class _Record:
    """One placement: the blocks of its chain that were news; empty once it has ended."""

    slot: int
    name: bytes
    hashes: Sequence[bytes]
    expires_at: float
    spread: bool = False


class Predictions:
    """Predicted blocks by slot. At most `max_blocks`, counted per placement: over it the oldest end early."""

    def __init__(self, *, longest_s: float, max_blocks: int) -> None:
        self._longest_s = longest_s
        self._max_blocks = max_blocks
        self._blocks = 0
        self._records: deque[_Record] = deque()
        self._whole: dict[bytes, _Record] = {}  # those not spread out, by their first block
        # By slot and last hash, which names the whole chain; the oldest first.
        self._open: dict[int, dict[bytes, deque[_Record]]] = {}
        # How many more than one predict a block for a slot. One that the engine stored and evicted again before the
        # first of them has expired may lose its prediction early: the safe side, and not worth a number per block.
        self._more: dict[tuple[int, bytes], int] = {}
        self.masks: dict[bytes, int] = {}
        """For each predicted hash the bits of the slots it is predicted for; for reading only, after `spread`."""

    def __len__(self) -> int:
        """Blocks predicted, those of siblings once."""
        return len(self.masks) + sum(len(record.hashes) for record in self._whole.values())

    def spread(self, hashes: Sequence[bytes]) -> None:
        """Make `masks` complete for the chain `hashes`."""
        if not self._whole.keys().isdisjoint(hashes):
            for block_hash in hashes:
                record = self._whole.pop(block_hash, None)
                if record is not None:
                    self._spread(record)

    def add(self, slot: int, name: bytes, hashes: Sequence[bytes], now: float) -> None:
        """A placement on `slot` whose chain ends with `name` will bring it `hashes`."""
        record = _Record(slot=slot, name=name, hashes=hashes, expires_at=now + self._longest_s)
        self._records.append(record)
        self._open.setdefault(slot, {}).setdefault(name, deque()).append(record)
        self._blocks += len(hashes)
        sibling = self._whole.pop(hashes[0], None)
        if sibling is not None:
            self._spread(sibling)
        if hashes[0] in self.masks:
            self._spread(record)
        else:
            self._whole[hashes[0]] = record
        while self._blocks > self._max_blocks:
            self._end(self._records.popleft())

    def _spread(self, record: _Record) -> None:
        record.spread = True
        masks, more, slot = self.masks, self._more, record.slot
        bit = 1 << slot
        for block_hash in record.hashes:
            mask = masks.get(block_hash, 0)
            if mask & bit:
                more[slot, block_hash] = more.get((slot, block_hash), 0) + 1
            else:
                masks[block_hash] = mask | bit

    def withdraw(self, slot: int, name: bytes) -> None:
        """One placement of that chain on `slot` came to nothing; an unknown one is no error."""
        siblings = self._open.get(slot, {}).get(name)
        if siblings:
            self._end(siblings[0])

    def confirm(self, slot: int, hashes: Sequence[bytes]) -> None:
        """The slot has these now."""
        if slot in self._open:
            self.spread(hashes)
            for block_hash in hashes:
                if self._clear(block_hash, 1 << slot):
                    self._more.pop((slot, block_hash), None)

    def drop(self, slot: int) -> None:
        """Nothing is predicted for the slot any more."""
        for siblings in list(self._open.get(slot, {}).values()):
            for record in list(siblings):
                self._end(record)

    def expire(self, now: float) -> None:
        """End what has had its time."""
        while self._records and (self._records[0].expires_at <= now or not self._records[0].hashes):
            self._end(self._records.popleft())

    def _end(self, record: _Record) -> None:
        if not record.hashes:
            return  # withdrawn before
        self._blocks -= len(record.hashes)
        chains = self._open[record.slot]
        siblings = chains[record.name]
        siblings.popleft()  # itself: they are filed, expire and are withdrawn in the order of their placements
        if not siblings:
            del chains[record.name]
            if not chains:
                del self._open[record.slot]
        hashes, record.hashes = record.hashes, ()
        if not record.spread:
            del self._whole[hashes[0]]
            return
        bit = 1 << record.slot
        for block_hash in hashes:
            if not (self._more and self._one_less(record.slot, block_hash)):
                self._clear(block_hash, bit)

    def _one_less(self, slot: int, block_hash: bytes) -> bool:
        """Whether somebody else predicts the block for the slot, too; one fewer does from now on."""
        more = self._more.pop((slot, block_hash), 0)
        if more > 1:
            self._more[slot, block_hash] = more - 1
        return more > 0

    def _clear(self, block_hash: bytes, bit: int) -> bool:
        mask = self.masks.get(block_hash, 0)
        if not mask & bit:
            return False
        if mask == bit:
            del self.masks[block_hash]
        else:
            self.masks[block_hash] = mask ^ bit
        return True
