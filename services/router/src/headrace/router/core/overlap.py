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
from headrace.router.core.replica import EngineId


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
        expected = self._expected.depth_of(holder.bit) if holder else 0
        if holder is None or not expected:
            return NOTHING
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
    predicted: Mapping[bytes, int],
) -> tuple[Survivors, Survivors]:
    """Who of the slots `trusted` has how much of the chain: cached, and cached or predicted."""
    cached, expected = Survivors([], []), Survivors([], [])
    in_cache = in_both = trusted
    if not trusted:
        return cached, expected
    for depth, block_hash in enumerate(hashes):
        held = part_of_byte[block_hash[0]].get(block_hash, 0)
        if in_both & held == in_both:
            continue  # most blocks: all who are left have it
        still_cached = in_cache & held
        still = in_both & (held | predicted.get(block_hash, 0))
        if still_cached != in_cache:
            _note(cached, depth, in_cache)
        if still != in_both:
            _note(expected, depth, in_both)
        in_cache, in_both = still_cached, still
        if not still:
            break
    _note(cached, len(hashes), in_cache)
    _note(expected, len(hashes), in_both)
    return cached, expected


def _note(survivors: Survivors, depth: int, mask: int) -> None:
    if depth and mask:
        survivors.depths.append(depth)
        survivors.masks.append(mask)
