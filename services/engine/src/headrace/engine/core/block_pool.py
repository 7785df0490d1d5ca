"""The paged KV cache's accounts: which block is free, and how many sequences hold each of the others."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice


class BlockLeak(Exception):
    """The accounts do not add up: blocks were lost or freed twice, and cached keys can no longer be trusted."""


class NotEnoughBlocks(Exception):
    """More blocks were asked for than are free; callers look at `free_blocks` first."""


class BlockPool:
    """`total_blocks` blocks of `block_size` tokens, each free or held by one or more sequences.

    The free list is in the order of reuse. A sequence's blocks are freed tail first, so the end of a prefix is reused
    before its beginning.
    """

    def __init__(self, total_blocks: int, block_size: int) -> None:
        self.total_blocks = total_blocks
        self.block_size = block_size
        self._holders = [0] * total_blocks
        # Ordered, and O(1) to take a block out of the middle: what holding a free block again needs.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(total_blocks))

    @property
    def free_blocks(self) -> int:
        """Blocks nobody holds."""
        return len(self._free)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that `tokens` tokens fill, the last one perhaps in part."""
        return -(-tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks, the longest free first; NotEnoughBlocks, and nothing taken, if fewer are free."""
        if count > len(self._free):
            raise NotEnoughBlocks(f"{count} blocks wanted, {len(self._free)} free")
        blocks = list(islice(self._free, count))
        self.hold(blocks)
        return blocks

    def hold(self, blocks: Iterable[int]) -> None:
        """Add one holder to each block; a free one leaves the free list."""
        for block in blocks:
            if self._holders[block] == 0:
                del self._free[block]
            self._holders[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """Take one holder from each block, tail first; a block without holders joins the end of the free list."""
        for block in reversed(blocks):
            if self._holders[block] == 0:
                raise BlockLeak(f"block {block} was freed twice")
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self._free[block] = None

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """BlockLeak unless every block's holders are exactly those in `tables` and free + held == total."""
        holders = [0] * self.total_blocks
        for table in tables:
            for block in table:
                holders[block] += 1
        if holders != self._holders:
            wrong = [b for b in range(self.total_blocks) if holders[b] != self._holders[b]]
            raise BlockLeak(f"{len(wrong)} blocks have other holders than the sequences, the first is block {wrong[0]}")
        held = sum(1 for count in holders if count)
        if held + len(self._free) != self.total_blocks or any(holders[block] for block in self._free):
            raise BlockLeak(f"{held} blocks held + {len(self._free)} free is not {self.total_blocks}")
