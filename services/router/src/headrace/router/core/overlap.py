"""How much of a prompt each engine has: one walk along its chain of block hashes, for all engines at once.

An engine can reuse an unbroken beginning only. So the walk keeps the set of engines that have had every block so far,
as one mask, and stops when it is empty. Its cost is the length of the longest match. It takes no short cut over "who
has a block has those before it": engines evict in any order, and so does the index.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from headrace.router.core.block_table import slots_in
from headrace.router.core.prediction import Predictions
from headrace.router.core.replica import EngineId

STRIDE = 32
"""Blocks looked up together."""


class Overlap(NamedTuple):
    """What one life of an engine could reuse of a prompt.

    Its first `blocks` blocks are cached there. The next `predicted_blocks` continue them without a gap, but rest on
    requests just placed there, which have not been computed yet. A tuple: a decision makes one per replica.
    """

    epoch: int
    blocks: int
    predicted_blocks: int


NOTHING = Overlap(epoch=0, blocks=0, predicted_blocks=0)


@dataclass(slots=True)
class Survivors:
    """Who was left after how many blocks: at `depths[i]` (ascending) the set shrank from `masks[i]`.

    Each mask is a part of the one before it.
    """

    depths: list[int]
    masks: list[int]

    def depth_of(self, bit: int) -> int:
        """Blocks that the slot with this bit has without a gap."""
        masks = self.masks
        if not masks or not masks[0] & bit:
            return 0  # most slots, for most prompts
        # Nested sets: whether the bit is in them changes once, so a bisection finds where.
        low, high = 1, len(masks)
        while low < high:
            middle = (low + high) // 2
            if masks[middle] & bit:
                low = middle + 1
            else:
                high = middle
        return self.depths[low - 1]


@dataclass(frozen=True, slots=True)
class Holder:
    """Who a slot stands for."""

    engine_id: EngineId
    epoch: int
    bit: int


class Overlaps(Mapping[EngineId, Overlap]):
    """Overlaps by engine, the longest first; engines without any are not in it.

    Nothing is computed per engine until it is asked for, so a prompt that every engine knows the beginning of costs no
    more than another. Valid until the index changes: take `dict(overlaps)` to keep it.
    """

    __slots__ = ("_by_slot", "_cached", "_expected", "_holders")

    def __init__(
        self,
        cached: Survivors,
        expected: Survivors,
        holders: Mapping[EngineId, Holder],
        by_slot: Mapping[int, Holder],
    ) -> None:
        self._cached = cached
        self._expected = expected
        self._holders = holders
        self._by_slot = by_slot

    def of(self, engine_id: EngineId) -> Overlap:
        """The engine's overlap, or `NOTHING`: what `get` would say, in a third of the time."""
        holder = self._holders.get(engine_id)
        masks = self._expected.masks
        if holder is None or not masks or not masks[0] & holder.bit:
            return NOTHING  # most engines, for most prompts
        expected = self._expected.depth_of(holder.bit)
        cached = self._cached.depth_of(holder.bit)
        return Overlap(epoch=holder.epoch, blocks=cached, predicted_blocks=expected - cached)

    def __getitem__(self, engine_id: EngineId) -> Overlap:
        overlap = self.of(engine_id)
        if overlap is NOTHING:
            raise KeyError(engine_id)
        return overlap

    def __iter__(self) -> Iterator[EngineId]:
        for mask, longer in pairwise([0, *reversed(self._expected.masks)]):
            for slot in slots_in(longer ^ mask):
                yield self._by_slot[slot].engine_id

    def __len__(self) -> int:
        return self._expected.masks[0].bit_count() if self._expected.masks else 0


def walk(
    hashes: Sequence[bytes],
    trusted: int,
    part_of_byte: Sequence[Mapping[bytes, int]],
    predictions: Predictions,
) -> tuple[Survivors, Survivors]:
    """Who of the slots `trusted` has how much of the chain: cached, and cached or predicted."""
    cached, expected = Survivors([], []), Survivors([], [])
    in_cache = in_both = trusted
    if not trusted:
        return cached, expected
    promised = _Promised(predictions, hashes)
    for start in range(0, len(hashes), STRIDE):
        # One list at a time: most blocks of a prefix have the holders of the one before, and are passed over together.
        stride = hashes[start : start + STRIDE]
        holders = [part_of_byte[block_hash[0]].get(block_hash, 0) for block_hash in stride]
        held = holders[0]
        if holders.count(held) == len(holders) and (
            in_both & held == in_both or (in_cache & held == in_cache and promised.fill(start, stride, in_both & ~held))
        ):
            continue
        for depth, held in enumerate(holders, start):
            if in_both & held == in_both:
                continue  # all who are left have it
            still = in_both & (held | promised.at(depth, in_both & ~held))
            if still != in_both:
                _note(expected, depth, in_both)
                in_both = still
            still_cached = in_cache & held
            if still_cached != in_cache:
                _note(cached, depth, in_cache)
                in_cache = still_cached
            if not in_both:
                return cached, expected
    _note(cached, len(hashes), in_cache)
    _note(expected, len(hashes), in_both)
    return cached, expected


class _Promised:
    """What is predicted of a chain, as the walk along it comes upon it."""

    __slots__ = ("_chain", "_mask", "_masks", "_open", "_until", "_whole")

    def __init__(self, predictions: Predictions, chain: Sequence[bytes]) -> None:
        self._masks = predictions.masks
        self._whole = predictions.whole
        self._chain = chain
        self._open: list[tuple[int, int]] = []  # of placements along with which the chain goes: up to where, and bits
        self._mask = 0  # their bits together,
        self._until = 0  # which are right up to here

    def at(self, depth: int, wanted: int) -> int:
        """The slots for which the block at `depth` is predicted, those of `wanted` at least."""
        block_hash = self._chain[depth]
        begun = self._whole.get(block_hash)
        if begun is not None:
            self._open += [(depth + promise.shared(self._chain, depth), 1 << promise.slot) for promise in begun]
        if self._open and (begun is not None or depth >= self._until):
            self._settle(depth)
        if wanted & ~self._mask:
            return self._mask | self._masks.get(block_hash, 0)
        return self._mask

    def fill(self, start: int, blocks: Sequence[bytes], slots: int) -> bool:
        """Whether what was found before `start` goes on for all of `slots` to the end of `blocks`; nothing begins."""
        return not slots & ~self._mask and start + len(blocks) <= self._until and self._whole.keys().isdisjoint(blocks)

    def _settle(self, depth: int) -> None:
        self._open = [(end, bit) for end, bit in self._open if end > depth]
        self._mask, self._until = 0, len(self._chain)
        for end, bit in self._open:
            self._mask |= bit
            self._until = min(self._until, end)


def _note(survivors: Survivors, depth: int, mask: int) -> None:
    if depth and mask:
        survivors.depths.append(depth)
        survivors.masks.append(mask)
