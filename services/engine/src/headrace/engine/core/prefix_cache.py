"""Which blocks hold which prefixes: an index of block hashes over the block pool.

A block enters the index when all of its tokens have been computed, stays in it while it is held and after it is freed,
and leaves it when the pool reuses it. Two blocks may hold the same prefix (both were computed before either was
known): they are not merged, so block tables only ever grow at their end. Hashes are taken at their word: they are
keyed and 128 bits long.
"""

from __future__ import annotations

from collections.abc import Iterable

from headrace.engine.core.block_pool import BlockLeak, BlockPool
from headrace.engine.core.cache_event import CacheEvent, Cleared, Removed, Stored


class PrefixCache:
    """The index of one pool. It becomes the pool's `on_reuse`."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._hash_of: dict[int, bytes] = {}
        self._blocks_of: dict[bytes, list[int]] = {}
        self._events: list[CacheEvent] = []
        self._news: list[bytes] = []
        self._news_stored = True
        pool.on_reuse = self._forget

    def __len__(self) -> int:
        """Prefixes known."""
        return len(self._blocks_of)

    def find(self, hashes: Iterable[bytes]) -> list[int]:
        """The blocks of the longest cached beginning of the chain `hashes`. They are not held: do so, or lose them."""
        blocks: list[int] = []
        for block_hash in hashes:
            known = self._blocks_of.get(block_hash)
            if known is None:
                break
            blocks.append(known[0])
        return blocks

    def store(self, block: int, block_hash: bytes) -> None:
        """The held `block` now holds all tokens of the prefix `block_hash`; a block is stored once."""
        if block in self._hash_of:
            raise BlockLeak(f"block {block} was written again while its content was cached")
        self._pool.keep(block)
        self._hash_of[block] = block_hash
        known = self._blocks_of.setdefault(block_hash, [])
        known.append(block)
        if len(known) == 1:
            self._note(block_hash, stored=True)

    def clear(self) -> None:
        """Forget every prefix, when no sequence holds a block; BlockLeak otherwise."""
        if self._pool.free_blocks != self._pool.total_blocks:
            raise BlockLeak("the prefix cache is cleared only while nobody holds a block")
        self._pool.keep_nothing()
        self._hash_of.clear()
        self._blocks_of.clear()
        self._flush()
        self._events.append(Cleared())

    def take_events(self) -> tuple[CacheEvent, ...]:
        """What has changed since the last call, in order."""
        self._flush()
        events, self._events = tuple(self._events), []
        return events

    def check(self) -> None:
        """BlockLeak unless both directions of the index agree and every free kept block is in it."""
        pairs = {(block, block_hash) for block_hash, blocks in self._blocks_of.items() for block in blocks}
        if pairs != set(self._hash_of.items()):
            raise BlockLeak("the prefix cache's index contradicts itself")
        free = sum(self._pool.is_free(block) for block in self._hash_of)
        if free != self._pool.cached_blocks:
            raise BlockLeak(f"{self._pool.cached_blocks} free blocks are kept, {free} of them are known prefixes")

    def _forget(self, block: int) -> None:
        block_hash = self._hash_of.pop(block)
        known = self._blocks_of[block_hash]
        known.remove(block)
        if not known:
            del self._blocks_of[block_hash]
            self._note(block_hash, stored=False)

    def _note(self, block_hash: bytes, *, stored: bool) -> None:
        if stored is not self._news_stored:
            self._flush()
            self._news_stored = stored
        self._news.append(block_hash)

    def _flush(self) -> None:
        if self._news:
            self._events.append((Stored if self._news_stored else Removed)(tuple(self._news)))
            self._news.clear()
