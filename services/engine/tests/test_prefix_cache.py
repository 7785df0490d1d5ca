"""The prefix cache: what hits, what must not, what is evicted first, and what it tells about itself."""

from __future__ import annotations

from itertools import pairwise
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from headrace.base.prefix import PrefixKey
from headrace.engine.core.block_pool import BlockLeak, BlockPool
from headrace.engine.core.cache_event import Cleared, Removed, Stored
from headrace.engine.core.kv_memory import KvMemory
from headrace.engine.core.placement import Placement
from headrace.engine.core.prefix_cache import PrefixCache
from headrace.engine.core.request import Sequence
from headrace.engine.core.sampling_plan import SamplingPlan
from headrace.engine.core.step import Hold
from headrace.testkit.engine_bench import Bench, oracle, shape, tenant

PROMPT = list(range(500, 520))  # five blocks of four
HASHES = [bytes([n]) * 16 for n in range(8)]


def cached_tokens(bench: Bench, id: int, prompt: list[int], **fields: object) -> int:
    bench.submit(id, prompt, 2, **fields)
    bench.run()
    return bench.finishes[id].cached_tokens


def test_the_block_trace() -> None:
    """A and B share two immutable blocks; A has three of its own, B one full and one half-filled."""
    bench = Bench(blocks=16)
    shared = list(range(500, 508))
    a = bench.submit(1, shared + [10 + i for i in range(10)], max_tokens=3)
    bench.step()
    b = bench.submit(2, shared + [30 + i for i in range(5)], max_tokens=3)
    bench.step()
    assert a.block_table[:2] == b.block_table[:2]
    private_a, private_b = a.block_table[2:], b.block_table[2:]
    assert (len(private_a), len(private_b), len(b.token_ids) - 1 - 12) == (3, 2, 1)
    assert not set(private_a) & set(private_b)
    assert not any(bench.pool.is_writable(block) for block in b.block_table[:3])  # shared, or full
    assert bench.pool.free_blocks == 16 - 2 - 3 - 2

    bench.step()
    assert bench.finishes[1].reason.value == "LENGTH"
    assert all(bench.pool.is_free(block) for block in private_a)
    assert bench.pool.cached_blocks == 3  # the full ones of A's: evictable, and still good for a hit
    assert not any(bench.pool.is_free(block) for block in b.block_table[:2])
    assert bench.pool.free_blocks == 16 - 4


@pytest.mark.parametrize("blocks", [1, 2, 3, 4])
def test_a_hit_of_exactly_k_blocks_changes_no_token(blocks: int) -> None:
    """(tenstorrent/vllm#415, vllm#7845)"""
    bench = Bench()
    bench.submit(1, PROMPT[: 4 * blocks + 1], 5)
    bench.run()
    again = [*PROMPT[: 4 * blocks], 7, 8, 9]
    bench.submit(2, again, 5)
    bench.run()
    assert bench.finishes[2].cached_tokens == 4 * blocks
    assert bench.tokens[2] == oracle(again, 5, SamplingPlan(max_tokens=5))


@pytest.mark.parametrize("length", [1, 4, 5, 8, 20])
def test_a_prompt_that_is_cached_in_full_still_computes_what_gives_logits(length: int) -> None:
    """(mattn/tensai#221)"""
    bench = Bench()
    first = cached_tokens(bench, 1, PROMPT[:length])
    second = cached_tokens(bench, 2, PROMPT[:length])
    assert (first, second) == (0, (length - 1) // 4 * 4)
    assert bench.tokens[1] == bench.tokens[2]


def test_an_answers_tokens_are_cached_too_for_the_next_turn() -> None:
    bench = Bench()
    bench.submit(1, PROMPT, 9)
    bench.run()
    assert cached_tokens(bench, 2, PROMPT + bench.tokens[1] + [5]) == 28  # 20 + 9, the last one never computed


def test_tenants_never_hit_each_others_prefixes() -> None:
    """(vllm#16016)"""
    bench = Bench()
    assert cached_tokens(bench, 1, PROMPT, placement=tenant("alice")) == 0
    assert cached_tokens(bench, 2, PROMPT, placement=tenant("bob")) == 0
    assert cached_tokens(bench, 3, PROMPT, placement=tenant("alice")) == 16


def test_adapters_of_other_content_never_share_whatever_their_name() -> None:
    """(vllm#30931, vllm#42125)"""
    bench = Bench()
    for id, digest, cached in ((1, "v1", 0), (2, "v2", 0), (3, "", 0), (4, "v2", 16)):
        assert cached_tokens(bench, id, PROMPT, placement=tenant("t", adapter_digest=digest)) == cached


def test_a_prefix_of_two_blocks_hits_and_the_cache_can_be_off() -> None:
    """(vllm#47430, vllm#17954: caching that is on but never hits)"""
    for caching, cached in ((True, 8), (False, 0)):
        bench = Bench(caching=caching)
        cached_tokens(bench, 1, PROMPT[:9])
        assert cached_tokens(bench, 2, PROMPT[:9]) == cached
        assert bench.scheduler.take_cache_events() == () or caching


def test_what_is_only_scheduled_cannot_be_hit() -> None:
    bench = Bench()
    bench.submit(1, PROMPT)
    plan = bench.scheduler.schedule(0.0)
    assert bench.scheduler.take_cache_events() == ()
    bench.scheduler.abort(1, 0.0)  # while the step is computed: nobody knows what came of it
    bench.scheduler.update(plan, bench.backend.execute(plan.slices, {}), 0.0)
    assert bench.scheduler.take_cache_events() == ()
    assert cached_tokens(bench, 2, PROMPT) == 0


def test_an_aborted_prefill_leaves_the_chunks_it_finished() -> None:
    bench = Bench(budget=8)
    bench.submit(1, PROMPT)
    bench.step()
    bench.scheduler.abort(1, bench.now)
    assert cached_tokens(bench, 2, PROMPT) == 8


def test_a_preempted_victim_finds_its_own_blocks_again() -> None:
    bench = Bench(blocks=7)
    bench.submit(1, 8, max_tokens=9)
    bench.submit(2, 16, max_tokens=3)
    bench.step()  # 2 and 4 blocks, one to spare: then both need one
    assert bench.step().preempted == (2,)
    bench.scheduler.abort(1, bench.now)
    assert shape(bench.step()) == {2: 1}  # of 17 tokens 16 are still cached
    assert bench.finishes.keys() == set()
    bench.run()
    assert (bench.finishes[2].preemptions, bench.finishes[2].cached_tokens) == (1, 0)  # the client's prompt was not


def test_the_prompts_own_log_probabilities_are_computed_though_cached() -> None:
    """(vllm#8268: 33 tokens, twice)"""
    prompt = list(range(600, 633))
    bench = Bench()
    for id in (1, 2):
        assert cached_tokens(bench, id, prompt, prompt_logprobs=2) == 0
        assert [entry.token.token_id for entry in bench.finishes[id].prompt_logprobs] == prompt[1:]
    assert bench.finishes[1].prompt_logprobs == bench.finishes[2].prompt_logprobs
    assert cached_tokens(bench, 3, prompt) == 32


@pytest.mark.parametrize("budget", [4, 5, 64])
def test_prompt_log_probabilities_are_complete_whatever_the_chunks_and_a_preemption(budget: int) -> None:
    """(vllm#14239, #4055)"""
    bench = Bench(blocks=9, budget=budget, seqs=3)
    prompts = {id: [100 * id + i for i in range(10)] for id in (1, 2)}
    for id, prompt in prompts.items():
        bench.submit(id, prompt, max_tokens=14, prompt_logprobs=0)
    bench.run()
    assert sum(finish.preemptions for finish in bench.finishes.values()) > 0
    for id, prompt in prompts.items():
        assert [entry.token.token_id for entry in bench.finishes[id].prompt_logprobs] == prompt[1:]


def test_a_prefix_that_another_is_just_computing_is_waited_for_and_nobody_else_is_held_up() -> None:
    bench = Bench(budget=12)
    bench.submit(1, PROMPT)
    bench.submit(2, [*PROMPT, 7])
    bench.submit(3, 3)
    plan = bench.step()
    assert (shape(plan), plan.hold) == ({1: 12}, Hold.TOKENS)
    plan = bench.step()
    assert (shape(plan), plan.hold) == ({1: 8, 3: 3}, Hold.PREFIX)
    bench.run()
    assert bench.finishes[2].cached_tokens == 20
    assert bench.tokens[2] == oracle([*PROMPT, 7], 4, SamplingPlan(max_tokens=4))


def test_who_waited_for_a_prefix_computes_it_when_the_other_is_cancelled() -> None:
    bench = Bench(budget=4, seqs=4)
    bench.submit(1, PROMPT)
    bench.submit(2, PROMPT)
    bench.step()
    bench.scheduler.abort(1, bench.now)
    bench.run()
    assert (bench.finishes[2].cached_tokens, len(bench.tokens[2])) == (4, 4)


def test_a_short_common_beginning_is_not_waited_for() -> None:
    bench = Bench()
    bench.submit(1, [*PROMPT[:4], 1, 2])
    bench.submit(2, [*PROMPT[:4], 3, 4])
    assert shape(bench.step()) == {1: 6, 2: 6}


def test_the_least_recently_used_prefix_goes_first_and_its_end_before_its_beginning() -> None:
    bench = Bench(blocks=8)
    x, y = list(range(700, 713)), list(range(800, 813))  # three full blocks each
    cached_tokens(bench, 1, x)
    cached_tokens(bench, 2, y)
    cached_tokens(bench, 3, x)  # x is the younger one now
    cached_tokens(bench, 4, list(range(900, 913)))  # takes four blocks: the two plain ones, then two of y's
    assert cached_tokens(bench, 5, y) == 4


def pooled() -> tuple[BlockPool, PrefixCache]:
    pool = BlockPool(4, 4)
    return pool, PrefixCache(pool)


def test_events_tell_what_was_stored_and_what_was_reused_in_order() -> None:
    pool, cache = pooled()
    table = pool.allocate(2)
    for block, block_hash in zip(table, HASHES, strict=False):
        cache.store(block, block_hash)
    pool.free(table)
    pool.allocate(3)
    assert cache.take_events() == (Stored(tuple(HASHES[:2])), Removed((HASHES[1],)))
    assert cache.take_events() == ()
    assert cache.find(HASHES) == [table[0]]


def test_a_copy_of_a_prefix_is_news_only_when_it_is_the_first_or_the_last() -> None:
    pool, cache = pooled()
    one, two = pool.allocate(2)
    cache.store(one, HASHES[0])
    cache.store(two, HASHES[0])
    assert cache.take_events() == (Stored((HASHES[0],)),)
    pool.free([one])
    pool.allocate(3)  # the two plain ones, then `one`
    assert cache.take_events() == ()
    assert cache.find([HASHES[0]]) == [two]
    cache.check()


def test_the_cache_is_cleared_only_while_nobody_holds_a_block() -> None:
    pool, cache = pooled()
    table = pool.allocate(1)
    cache.store(table[0], HASHES[0])
    with pytest.raises(BlockLeak, match="only while nobody holds a block"):
        cache.clear()
    pool.free(table)
    cache.clear()
    assert (cache.find(HASHES), pool.cached_blocks, pool.free_blocks) == ([], 0, 4)
    assert cache.take_events()[-1] == Cleared()
    pool.check([])
    cache.check()


def test_a_block_that_is_written_while_cached_is_a_breach() -> None:
    pool, cache = pooled()
    table = pool.allocate(1)
    cache.store(table[0], HASHES[0])
    with pytest.raises(BlockLeak, match="written again while its content was cached"):
        cache.store(table[0], HASHES[1])


def test_two_engines_without_a_common_key_have_different_hashes() -> None:
    """(GHSA-rm76-4mrf-v9r8)"""
    prefixes = []
    for _ in range(2):
        memory = KvMemory(BlockPool(8, 4), PrefixKey.random(), "bundle")
        sequence = Sequence(id=1, token_ids=PROMPT, prompt_length=20, plan=SamplingPlan(max_tokens=1), arrived_at=0.0)
        sequence.placement = Placement(isolation_domain="alice")
        memory.enter(sequence)
        memory.find(sequence)
        prefixes.append(sequence.prefix)
    assert not set(prefixes[0]) & set(prefixes[1])
    assert len(prefixes[0]) == 5


class AnyPrefixes(RuleBasedStateMachine):
    """Chains are computed, found, dropped and evicted in any order, beside a plain record of what each block holds."""

    operations: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(10, 4)
        self.cache = PrefixCache(self.pool)
        self.tables: list[list[int]] = []
        self.holds: dict[int, bytes] = {}
        self.told: set[bytes] = set()

    def begin(self, stem: int, length: int) -> None:
        """A sequence starts on what is cached of its chain, and computes the rest."""
        chain = [bytes([stem, n]) * 8 for n in range(length)]
        found = self.cache.find(chain)
        present = set(self.holds.values())
        assert len(found) == next((n for n, h in enumerate(chain) if h not in present), length)
        assert [self.holds[block] for block in found] == chain[: len(found)]
        if length - len(found) + sum(map(self.pool.is_free, found)) > self.pool.free_blocks:
            return
        self.pool.hold(found)
        fresh = self.pool.allocate(length - len(found))
        for block in fresh:
            self.holds.pop(block, None)
        for block, block_hash in zip(fresh, chain[len(found) :], strict=True):
            self.cache.store(block, block_hash)
            self.holds[block] = block_hash
        self.tables.append(found + fresh)

    def begin_without_looking(self, stem: int, length: int) -> None:
        """Two sequences computed the same at the same time."""
        if length <= self.pool.free_blocks:
            fresh = self.pool.allocate(length)
            for n, block in enumerate(fresh):
                self.holds[block] = bytes([stem, n]) * 8
                self.cache.store(block, self.holds[block])
            self.tables.append(fresh)

    def end(self, which: int) -> None:
        if self.tables:
            self.pool.free(self.tables.pop(which % len(self.tables)))

    def clear(self) -> None:
        if not self.tables:
            self.cache.clear()
            self.holds.clear()

    @rule(program=st.binary(min_size=150, max_size=300))
    def many_operations(self, program: bytes) -> None:
        for code, a in pairwise(program):
            type(self).operations += 1
            if code < 90:
                self.begin(a % 3, a % 7)
            elif code < 120:
                self.begin_without_looking(a % 3, a % 5)
            elif code < 250:
                self.end(a)
            else:
                self.clear()
            self.the_index_is_what_the_blocks_hold()

    @invariant()
    def the_index_is_what_the_blocks_hold(self) -> None:
        self.pool.check(self.tables)
        self.cache.check()
        for event in self.cache.take_events():
            match event:
                case Stored(hashes):
                    assert not self.told & set(hashes)
                    self.told |= set(hashes)
                case Removed(hashes):
                    assert self.told >= set(hashes)
                    self.told -= set(hashes)
                case Cleared():
                    self.told.clear()
        assert self.told == set(self.holds.values())
        held = {block for table in self.tables for block in table}
        assert self.pool.cached_blocks == len(self.holds.keys() - held)


def test_any_prefixes_keep_the_index() -> None:
    AnyPrefixes.operations = 0
    # How many a run draws is chance: again, until they are enough.
    while AnyPrefixes.operations <= 40_000:
        run_state_machine_as_test(
            AnyPrefixes, settings=settings(max_examples=80, stateful_step_count=10, deadline=None)
        )
