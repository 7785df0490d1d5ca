"""Blocks for sequences: found in the prefix cache, allocated, shared, copied before a write, and given back.

A block is written by one sequence only: one that another sequence also holds, or that is in the prefix cache, is
replaced by a copy first.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from itertools import islice

from headrace.base.prefix import PrefixKey
from headrace.engine.core.block_pool import BlockPool
from headrace.engine.core.cache_event import CacheEvent
from headrace.engine.core.prefix_cache import PrefixCache
from headrace.engine.core.request import Sequence

# A sequence waits for a prefix that another one is just computing if it is at least this long: shorter ones cost less
# to compute twice than a step of waiting.
_WORTH_WAITING = 2


class KvMemory:
    """The block tables of all sequences of one engine. `key` None turns the prefix cache off."""

    def __init__(self, pool: BlockPool, key: PrefixKey | None = None, bundle_digest: str = "") -> None:
        self.pool = pool
        self._key = key
        self._bundle_digest = bundle_digest
        self._cache = PrefixCache(pool)
        # Hash of each block that a running sequence will have computed when its prompt is: whose it is.
        self._announced: dict[bytes, int] = {}

    def enter(self, sequence: Sequence) -> None:
        """Give a new sequence its prefix identity."""
        if self._key is not None:
            place = sequence.placement
            root = self._key.root(
                bundle_digest=self._bundle_digest,
                adapter_digest=place.adapter_digest,
                isolation_domain=place.isolation_domain,
            )
            sequence.prefix = [root]

    def find(self, sequence: Sequence) -> list[int]:
        """Cached blocks that a waiting sequence can start with: never all of its tokens, the last one gives logits."""
        if self._key is None or sequence.wants_prompt_logprobs:
            return []
        most = (len(sequence.token_ids) - 1) // self.pool.block_size
        self._extend_chain(sequence, most)
        return self._cache.find(islice(sequence.prefix, 1, most + 1))

    def is_being_computed(self, sequence: Sequence, found: int) -> bool:
        """Whether a running sequence is about to compute what follows the `found` cached blocks of this waiting one."""
        end = found + _WORTH_WAITING
        if self._key is None or sequence.wants_prompt_logprobs or end >= self.pool.blocks_for(len(sequence.token_ids)):
            return False
        following = sequence.prefix[found + 1 : end + 1]
        if not all(block_hash in self._announced for block_hash in following):
            return False
        sequence.awaited_hash = following[0]
        return True

    def still_awaits(self, sequence: Sequence) -> bool:
        """Whether what `is_being_computed` saw is still under way: costs nothing, however many wait."""
        return sequence.awaited_hash in self._announced

    def wanted(self, sequence: Sequence, found: Seq[int]) -> int:
        """Free blocks it takes to start a sequence on its cached blocks, those of them that are free included."""
        free = sum(self.pool.is_free(block) for block in found)
        return self.pool.blocks_for(len(sequence.token_ids)) - len(found) + free

    def start(self, sequence: Sequence, found: list[int]) -> None:
        """Give a sequence blocks for all of its known tokens; the `found` ones count as computed."""
        size = self.pool.block_size
        self.pool.hold(found)
        sequence.block_table = array("i", found)
        sequence.block_table.extend(self.pool.allocate(self.pool.blocks_for(len(sequence.token_ids)) - len(found)))
        sequence.num_computed_tokens = len(found) * size
        sequence.stored_blocks = len(found)
        if self._key is not None:
            sequence.announced_blocks = len(sequence.token_ids) // size
            self._extend_chain(sequence, sequence.announced_blocks)
            for block_hash in islice(sequence.prefix, len(found) + 1, sequence.announced_blocks + 1):
                self._announced.setdefault(block_hash, sequence.id)

    def needs_block(self, sequence: Sequence) -> bool:
        """Whether the next token of a decoding sequence has no block that may be written."""
        pool, table = self.pool, sequence.block_table
        at = sequence.num_computed_tokens // pool.block_size
        return at == len(table) or not pool.is_writable(table[at])

    def grow(self, sequence: Sequence) -> tuple[int, int] | None:
        """Take the block that `needs_block` asked for; the (from, to) to copy before the step if it holds tokens."""
        at, used = divmod(sequence.num_computed_tokens, self.pool.block_size)
        (block,) = self.pool.allocate(1)
        if at == len(sequence.block_table):
            sequence.block_table.append(block)
            return None
        shared, sequence.block_table[at] = sequence.block_table[at], block
        self.pool.free([shared])
        return (shared, block) if used else None

    def extend(self, sequence: Sequence, tokens: int) -> None:
        """Take blocks for the first `tokens` positions; NotEnoughBlocks when they are not free."""
        sequence.block_table.extend(self.pool.allocate(self.pool.blocks_for(tokens) - len(sequence.block_table)))

    def trim(self, sequence: Sequence) -> None:
        """Give back the blocks behind the computed tokens: they hold guesses that did not come true."""
        kept = self.pool.blocks_for(sequence.num_computed_tokens)
        if kept < len(sequence.block_table):
            self.pool.free(sequence.block_table[kept:])
            del sequence.block_table[kept:]

    def share(self, sequence: Sequence, other: Sequence) -> None:
        """Let `other` hold the blocks of `sequence`, which has just computed the prompt that both have.

        The prompt's last token counts as not computed: its logits are what `other` samples its first token from.
        """
        other.num_computed_tokens = sequence.num_computed_tokens - 1
        other.block_table = sequence.block_table[: self.pool.blocks_for(other.num_computed_tokens)]
        self.pool.hold(other.block_table)
        other.stored_blocks = other.num_computed_tokens // self.pool.block_size
        other.prefix = sequence.prefix[: other.stored_blocks + 1]
        other.forked = True

    def store(self, sequence: Sequence) -> None:
        """Put the blocks whose tokens have all been computed into the prefix cache."""
        full = sequence.num_computed_tokens // self.pool.block_size
        if full == sequence.stored_blocks or self._key is None:
            return
        self._extend_chain(sequence, full)
        for at in range(sequence.stored_blocks, full):
            self._cache.store(sequence.block_table[at], sequence.prefix[at + 1])
        self._withdraw(sequence, full)
        sequence.stored_blocks = full

    def release(self, sequence: Sequence) -> None:
        """Give all blocks back; what they hold stays cached."""
        self._withdraw(sequence, sequence.announced_blocks)
        self.pool.free(sequence.block_table)
        sequence.block_table = array("i")
        sequence.num_computed_tokens = sequence.stored_blocks = sequence.announced_blocks = 0
        sequence.forked = False

    def clear_cache(self) -> None:
        """Forget all prefixes, while no sequence holds a block; BlockLeak otherwise."""
        self._cache.clear()

    def take_events(self) -> tuple[CacheEvent, ...]:
        """Changes of the prefix cache since the last call."""
        return self._cache.take_events()

    def check(self, tables: Seq[Seq[int]]) -> None:
        """BlockLeak unless `tables` hold exactly what is not free, and the prefix cache's index agrees."""
        self.pool.check(tables)
        self._cache.check()

    def _extend_chain(self, sequence: Sequence, blocks: int) -> None:
        assert self._key is not None
        size = self.pool.block_size
        for at in range(len(sequence.prefix) - 1, blocks):
            tokens = sequence.token_ids[at * size : (at + 1) * size]
            sequence.prefix.append(self._key.extend(sequence.prefix[-1], tokens))

    def _withdraw(self, sequence: Sequence, until: int) -> None:
        """Take back what it announced, up to block `until`: it is computed, or will not be."""
        for block_hash in islice(sequence.prefix, sequence.stored_blocks + 1, until + 1):
            if self._announced.get(block_hash) == sequence.id:
                del self._announced[block_hash]
