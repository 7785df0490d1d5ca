"""The block pool's accounts: order of reuse, holders, and conservation under any operations."""

from __future__ import annotations

from itertools import pairwise
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from headrace.engine.core.block_pool import BlockLeak, BlockPool, NotEnoughBlocks


def test_blocks_come_out_in_the_order_they_were_freed() -> None:
    pool = BlockPool(4, 16)
    first, second = pool.allocate(2), pool.allocate(2)
    pool.free(second)
    pool.free(first)
    assert pool.allocate(4) == [3, 2, 1, 0]  # each table tail first, the longest free table first


def test_asking_for_too_many_takes_nothing() -> None:
    pool = BlockPool(3, 16)
    pool.allocate(1)
    with pytest.raises(NotEnoughBlocks, match="3 blocks wanted, 2 free"):
        pool.allocate(3)
    assert pool.free_blocks == 2


def test_a_shared_prefix_stays_while_one_of_its_two_holders_does() -> None:
    pool = BlockPool(7, 16)
    prefix = pool.allocate(2)
    pool.hold(prefix)
    table_a = prefix + pool.allocate(3)
    table_b = prefix + pool.allocate(2)
    pool.check([table_a, table_b])
    assert pool.free_blocks == 0

    pool.free(table_a)
    assert pool.free_blocks == 3  # A's private blocks; the prefix is still B's
    pool.check([table_b])

    pool.free(table_b)
    assert pool.free_blocks == 7
    pool.check([])


def test_a_free_block_can_be_held_again_from_the_middle_of_the_free_list() -> None:
    pool = BlockPool(3, 16)
    pool.hold([1])
    assert pool.allocate(2) == [0, 2]
    pool.check([[1], [0, 2]])


def test_freeing_twice_raises() -> None:
    pool = BlockPool(2, 16)
    table = pool.allocate(1)
    pool.free(table)
    with pytest.raises(BlockLeak, match="block 0 was freed twice"):
        pool.free(table)


def test_a_block_that_no_sequence_holds_but_nobody_freed_is_a_leak() -> None:
    pool = BlockPool(2, 16)
    pool.allocate(1)
    with pytest.raises(BlockLeak, match="1 blocks have other holders"):
        pool.check([])


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 1), (15, 1), (16, 1), (17, 2), (32, 2)])
def test_a_partly_filled_block_counts_whole(tokens: int, blocks: int) -> None:
    assert BlockPool(4, 16).blocks_for(tokens) == blocks


def test_blocks_worth_keeping_are_reused_last_and_lose_their_mark_then() -> None:
    pool = BlockPool(4, 16)
    reused: list[int] = []
    pool.on_reuse = reused.append
    table = pool.allocate(3)
    for block in table[:2]:
        pool.keep(block)
    pool.free(table)
    assert (pool.free_blocks, pool.cached_blocks) == (4, 2)
    assert pool.allocate(3) == [3, 2, 1]
    assert reused == [1]
    pool.free([1])
    assert pool.cached_blocks == 1
    pool.check([[3, 2]])


def test_a_kept_block_that_is_held_again_is_still_worth_keeping() -> None:
    pool = BlockPool(2, 16)
    table = pool.allocate(1)
    pool.keep(table[0])
    assert not pool.is_writable(table[0])
    pool.free(table)
    pool.hold(table)
    assert not pool.is_writable(table[0])
    pool.free(table)
    assert pool.cached_blocks == 1


def test_a_block_with_two_holders_is_nobodys_to_write() -> None:
    pool = BlockPool(2, 16)
    table = pool.allocate(1)
    assert pool.is_writable(table[0])
    pool.hold(table)
    assert not pool.is_writable(table[0])
    pool.free(table)
    assert pool.is_writable(table[0])


class AnyOperations(RuleBasedStateMachine):
    """Tables are allocated, kept, share prefixes with others and are freed, in any order, beside two plain lists."""

    operations: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12, 4)
        self.pool.on_reuse = self.reuse
        self.tables: list[list[int]] = []
        self.plain, self.kept = list(range(12)), list[int]()
        self.worth: set[int] = set()

    def reuse(self, block: int) -> None:
        self.worth.remove(block)

    @rule(count=st.integers(0, 14))
    def allocate(self, count: int) -> None:
        order = self.plain + self.kept
        if count > len(order):
            with pytest.raises(NotEnoughBlocks):
                self.pool.allocate(count)
        else:
            self.tables.append(self.pool.allocate(count))
            assert self.tables[-1] == order[:count]
            self.plain, self.kept = self.plain[count:], self.kept[max(0, count - len(self.plain)) :]

    @rule(which=st.integers(0, 100), length=st.integers(0, 12))
    def share_a_prefix(self, which: int, length: int) -> None:
        if self.tables:
            prefix = self.tables[which % len(self.tables)][:length]
            self.pool.hold(prefix)
            self.tables.append(prefix)

    @rule(block=st.integers(0, 11))
    def keep(self, block: int) -> None:
        if any(block in table for table in self.tables):
            self.pool.keep(block)
            self.worth.add(block)
        else:
            with pytest.raises(BlockLeak):
                self.pool.keep(block)

    @rule(block=st.integers(0, 11))
    def hold_a_free_kept_block(self, block: int) -> None:
        if block in self.kept:
            self.kept.remove(block)
            self.pool.hold([block])
            self.tables.append([block])

    @rule(which=st.integers(0, 100))
    def free(self, which: int) -> None:
        if self.tables:
            table = self.tables.pop(which % len(self.tables))
            self.pool.free(table)
            for block in reversed(table):
                if not any(block in other for other in self.tables):
                    (self.kept if block in self.worth else self.plain).append(block)

    @rule(program=st.binary(min_size=100, max_size=200))
    def many_operations(self, program: bytes) -> None:
        for code, a in pairwise(program):
            type(self).operations += 1
            match code % 5:
                case 0:
                    self.allocate(a % 5)
                case 1:
                    self.share_a_prefix(a >> 4, a & 15)
                case 2:
                    self.keep(a % 12)
                case 3:
                    self.hold_a_free_kept_block(a % 12)
                case 4:
                    self.free(a)
            self.the_accounts_add_up()

    @invariant()
    def the_accounts_add_up(self) -> None:
        self.pool.check(self.tables)
        assert self.pool.cached_blocks == len(self.kept)
        assert self.pool.free_blocks == 12 - len({block for table in self.tables for block in table})


def test_any_operations_keep_the_accounts() -> None:
    AnyOperations.operations = 0
    # How many a run draws is chance: again, until they are enough.
    while AnyOperations.operations <= 40_000:
        run_state_machine_as_test(
            AnyOperations, settings=settings(max_examples=100, stateful_step_count=30, deadline=None)
        )
