"""The block pool's accounts: order of reuse, holders, and conservation under any operations."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

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


class AnyOperations(RuleBasedStateMachine):
    """Tables are allocated, share prefixes with others and are freed, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12, 4)
        self.tables: list[list[int]] = []

    @rule(count=st.integers(0, 14))
    def allocate(self, count: int) -> None:
        if count > self.pool.free_blocks:
            with pytest.raises(NotEnoughBlocks):
                self.pool.allocate(count)
        else:
            self.tables.append(self.pool.allocate(count))

    @rule(which=st.integers(0, 100), length=st.integers(0, 12))
    def share_a_prefix(self, which: int, length: int) -> None:
        if self.tables:
            prefix = self.tables[which % len(self.tables)][:length]
            self.pool.hold(prefix)
            self.tables.append(prefix)

    @rule(which=st.integers(0, 100))
    def free(self, which: int) -> None:
        if self.tables:
            self.pool.free(self.tables.pop(which % len(self.tables)))

    @invariant()
    def the_accounts_add_up(self) -> None:
        self.pool.check(self.tables)
        assert self.pool.free_blocks == 12 - len({block for table in self.tables for block in table})


TestAnyOperations = AnyOperations.TestCase
