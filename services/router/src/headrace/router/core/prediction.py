"""Blocks that engines do not have yet but are about to: those of requests that were just placed there.

A prediction lives for a fixed time, until the engine says that it has stored the block, or until it is withdrawn
because the attempt failed. Siblings may predict the same block: it is predicted while one of them does.

A placement is filed as a whole, under the first block that was news: a chain without it has none of the others, for a
hash names all before it, and how many of them it has is found by bisection. It is spread out block by block once the
engine has stored a part of it, or when more than `MOST_WHOLE` begin with the same block.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

MOST_WHOLE = 4
"""Placements filed under one block. A chain that has the block is compared with each of them; more are spread out, and
then their number does not matter."""


@dataclass(slots=True, kw_only=True, eq=False)
class Promise:
    """One placement: the blocks of its chain that were news; empty once it has ended."""

    slot: int
    name: bytes
    hashes: Sequence[bytes]
    expires_at: float
    spread: bool = False

    def shared(self, hashes: Sequence[bytes], depth: int) -> int:
        """How many of its blocks the chain `hashes` has from `depth` on, where it has the first."""
        own = self.hashes
        high = min(len(own), len(hashes) - depth)
        if own[high - 1] == hashes[depth + high - 1]:
            return high
        low = 1
        while low < high:
            middle = (low + high) // 2
            if own[middle] == hashes[depth + middle]:
                low = middle + 1
            else:
                high = middle
        return low

    def own(self, siblings: Sequence[Promise]) -> int:
        """How many of its blocks none of `siblings`, which begin with the same, has."""
        return len(self.hashes) - max((sibling.shared(self.hashes, 0) for sibling in siblings), default=0)


class Predictions:
    """Predicted blocks by slot. At most `max_blocks`, counted per placement: over it the oldest end early."""

    def __init__(self, *, longest_s: float, max_blocks: int) -> None:
        self._longest_s = longest_s
        self._max_blocks = max_blocks
        self._blocks = 0
        self._records: deque[Promise] = deque()
        self.whole: dict[bytes, list[Promise]] = {}
        """Placements not spread out, by the first of their blocks; for reading only."""
        self._whole_blocks = 0  # theirs, each once
        # By slot and last hash, which names the whole chain; the oldest first.
        self._open: dict[int, dict[bytes, deque[Promise]]] = {}
        # How many more than one predict a block for a slot. One that the engine stored and evicted again before the
        # first of them has expired may lose its prediction early: the safe side, and not worth a number per block.
        self._more: dict[tuple[int, bytes], int] = {}
        self.masks: dict[bytes, int] = {}
        """For each hash the bits of the slots for which one that is spread out predicts it; for reading only."""

    def __len__(self) -> int:
        """Blocks predicted, those of siblings once."""
        return len(self.masks) + self._whole_blocks

    def add(self, slot: int, name: bytes, hashes: Sequence[bytes], now: float) -> None:
        """A placement on `slot` whose chain ends with `name` will bring it `hashes`."""
        promise = Promise(slot=slot, name=name, hashes=hashes, expires_at=now + self._longest_s)
        self._records.append(promise)
        self._open.setdefault(slot, {}).setdefault(name, deque()).append(promise)
        self._blocks += len(hashes)
        first = hashes[0]
        if first in self.masks:
            self._spread(promise)
        else:
            filed = self.whole.setdefault(first, [])
            self._whole_blocks += promise.own(filed)
            filed.append(promise)
            if len(filed) > MOST_WHOLE:
                for one in list(filed):
                    self._unfile(one, first)
                    self._spread(one)
        while self._blocks > self._max_blocks:
            self._end(self._records.popleft())

    def _spread(self, promise: Promise) -> None:
        promise.spread = True
        masks, more, slot = self.masks, self._more, promise.slot
        bit = 1 << slot
        for block_hash in promise.hashes:
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
            for block_hash in hashes:
                for promise in [p for p in self.whole.get(block_hash, ()) if p.slot == slot]:
                    self._unfile(promise, block_hash)
                    self._spread(promise)
            for block_hash in hashes:
                if self._clear(block_hash, 1 << slot):
                    self._more.pop((slot, block_hash), None)

    def drop(self, slot: int) -> None:
        """Nothing is predicted for the slot any more."""
        for siblings in list(self._open.get(slot, {}).values()):
            for promise in list(siblings):
                self._end(promise)

    def expire(self, now: float) -> None:
        """End what has had its time."""
        while self._records and (self._records[0].expires_at <= now or not self._records[0].hashes):
            self._end(self._records.popleft())

    def _end(self, promise: Promise) -> None:
        if not promise.hashes:
            return  # withdrawn before
        self._blocks -= len(promise.hashes)
        chains = self._open[promise.slot]
        siblings = chains[promise.name]
        siblings.popleft()  # itself: they are filed, expire and are withdrawn in the order of their placements
        if not siblings:
            del chains[promise.name]
            if not chains:
                del self._open[promise.slot]
        if not promise.spread:
            self._unfile(promise, promise.hashes[0])
            promise.hashes = ()
            return
        hashes, promise.hashes = promise.hashes, ()
        bit = 1 << promise.slot
        for block_hash in hashes:
            if not (self._more and self._one_less(promise.slot, block_hash)):
                self._clear(block_hash, bit)

    def _unfile(self, promise: Promise, first: bytes) -> None:
        filed = self.whole[first]
        filed.remove(promise)
        self._whole_blocks -= promise.own(filed)
        if not filed:
            del self.whole[first]

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
