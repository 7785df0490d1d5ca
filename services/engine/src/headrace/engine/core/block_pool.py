"""The paged KV cache's accounts: which block is free, and how many sequences hold each of the others."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence


class BlockLeak(Exception):
    """The accounts do not add up: blocks were lost or freed twice, and cached keys can no longer be trusted."""


class NotEnoughBlocks(Exception):
    """More blocks were asked for than are free; callers look at `free_blocks` first."""


def _ignore(block: int) -> None:
    pass


class BlockPool:
    """`total_blocks` blocks of `block_size` tokens, each free or held by one or more sequences.

    A free block may be worth keeping: it was marked by `keep`. Such blocks are reused after all others, the longest
    free first, and only then do they lose the mark and is `on_reuse` told. A sequence's blocks are freed tail first,
    so the end of a prefix is reused before its beginning.
    """

    def __init__(self, total_blocks: int, block_size: int) -> None:
        self.total_blocks = total_blocks
        self.block_size = block_size
        self.on_reuse: Callable[[int], None] = _ignore
        self._holders = [0] * total_blocks
        self._kept = bytearray(total_blocks)
        # Ordered, and O(1) to take a block out of the middle: what holding a free block again needs.
        self._plain: OrderedDict[int, None] = OrderedDict.fromkeys(range(total_blocks))
        self._worth: OrderedDict[int, None] = OrderedDict()

    @property
    def free_blocks(self) -> int:
        """Blocks nobody holds, kept ones among them."""
        return len(self._plain) + len(self._worth)

    @property
    def cached_blocks(self) -> int:
        """Free blocks that are kept."""
        return len(self._worth)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that `tokens` tokens fill, the last one perhaps in part."""
        return -(-tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks, the longest free first; NotEnoughBlocks, and nothing taken, if fewer are free."""
        if count > self.free_blocks:
            raise NotEnoughBlocks(f"{count} blocks wanted, {self.free_blocks} free")
        return [self._take() for _ in range(count)]

    def hold(self, blocks: Iterable[int]) -> None:
        """Add one holder to each block; a free one leaves the free list and stays kept if it was."""
        for block in blocks:
            if self._holders[block] == 0:
                del self._list_of(block)[block]
            self._holders[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """Take one holder from each block, tail first; a block without holders joins the end of its free list."""
        for block in reversed(blocks):
            if self._holders[block] == 0:
                raise BlockLeak(f"block {block} was freed twice")
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self._list_of(block)[block] = None

    def keep(self, block: int) -> None:
        """Mark a held block as worth keeping when it is free."""
        if self._holders[block] == 0:
            raise BlockLeak(f"block {block} is free: nobody vouches for its content")
        self._kept[block] = 1

    def keep_nothing(self) -> None:
        """Take the mark from every block; nobody is told."""
        self._kept = bytearray(self.total_blocks)
        self._plain.update(self._worth)
        self._worth.clear()

    def is_writable(self, block: int) -> bool:
        """Whether its one holder may change it: nobody else holds it and nobody expects to find its content again."""
        return self._holders[block] == 1 and not self._kept[block]

    def is_free(self, block: int) -> bool:
        """Whether nobody holds it."""
        return self._holders[block] == 0

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """BlockLeak unless every block's holders are exactly those in `tables` and free + kept free + held == total."""
        holders = [0] * self.total_blocks
        for table in tables:
            for block in table:
                holders[block] += 1
        if holders != self._holders:
            wrong = [b for b in range(self.total_blocks) if holders[b] != self._holders[b]]
            raise BlockLeak(f"{len(wrong)} blocks have other holders than the sequences, the first is block {wrong[0]}")
        held = self.total_blocks - holders.count(0)
        astray = any(holders[b] or self._kept[b] for b in self._plain) or any(
            holders[b] or not self._kept[b] for b in self._worth
        )
        if held + self.free_blocks != self.total_blocks or astray:
            raise BlockLeak(
                f"{held} blocks held + {len(self._plain)} free + {len(self._worth)} cached is not {self.total_blocks}"
            )

    def _take(self) -> int:
        if self._plain:
            block, _ = self._plain.popitem(last=False)
        else:
            block, _ = self._worth.popitem(last=False)
            self._kept[block] = 0
            self.on_reuse(block)
        self._holders[block] = 1
        return block

    def _list_of(self, block: int) -> OrderedDict[int, None]:
        return self._worth if self._kept[block] else self._plain
