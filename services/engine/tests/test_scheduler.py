"""What the scheduler decides, step by step, with the real block pool and a clock of its own."""

from __future__ import annotations

import math
import random

import pytest

from headrace.engine.core.finish import ErrorReason, FinishReason, Problem
from headrace.engine.core.load import Rates, load
from headrace.engine.core.placement import Placement, Priority
from headrace.engine.core.request import State
from headrace.engine.core.sampling_plan import SamplingPlan
from headrace.engine.core.scheduler import BatchLimits
from headrace.engine.core.step import Computed, Hold
from headrace.testkit.engine_bench import Bench, alone, oracle, shape


def test_the_batch_trace() -> None:
    """A and B prefill together, C waits for A's place, and its chunk takes what B's decode leaves of the budget."""
    a, b, c = 1, 2, 3
    bench = Bench(seqs=2, budget=8)
    bench.submit(a, 4, max_tokens=2)
    bench.submit(b, 4, max_tokens=10)
    bench.submit(c, 12)

    first = bench.step()
    assert (shape(first), first.hold) == ({a: 4, b: 4}, Hold.SEQUENCES)
    second = bench.step()
    assert (shape(second), second.decodes, second.hold) == ({a: 1, b: 1}, 2, Hold.SEQUENCES)
    assert bench.finishes[a].reason is FinishReason.LENGTH
    third = bench.step()
    assert (shape(third), third.admitted, third.hold) == ({b: 1, c: 7}, (c,), None)
    assert bench.tokens[c] == []
    assert shape(bench.step()) == {b: 1, c: 5}
    assert len(bench.tokens[c]) == 1


def test_a_chunk_ends_at_the_budget_and_only_the_last_one_samples() -> None:
    bench = Bench(budget=8)
    bench.submit(1, 20, max_tokens=1)
    plans = [bench.step() for _ in range(3)]
    assert [(p.slices[0].start, len(p.slices[0].token_ids), p.slices[0].samples) for p in plans] == [
        (0, 8, False),
        (8, 8, False),
        (16, 4, True),
    ]
    assert bench.finishes[1].prefill_chunks == 3


def test_decodes_go_on_every_step_while_a_long_prompt_is_prefilled() -> None:
    bench = Bench(blocks=256, budget=8)
    bench.submit(1, 2, max_tokens=100)
    bench.submit(2, 3, max_tokens=100)
    bench.step()
    bench.submit(3, 120)
    for step in range(1, 20):
        assert shape(bench.step()) == {1: 1, 2: 1, 3: 6}
        assert (len(bench.tokens[1]), len(bench.tokens[2])) == (step + 1, step + 1)


def test_without_chunks_a_prompt_waits_for_a_step_that_holds_all_of_it() -> None:
    bench = Bench(budget=8, chunked=False)
    bench.submit(1, 5, max_tokens=2)
    bench.submit(2, 6)
    first = bench.step()
    assert (shape(first), first.hold) == ({1: 5}, Hold.TOKENS)
    assert shape(bench.step()) == {1: 1, 2: 6}


def test_nobody_overtakes_the_head_of_the_queue() -> None:
    bench = Bench(blocks=8)
    bench.submit(1, 16, max_tokens=8)
    bench.step()
    bench.submit(2, 16, max_tokens=8)
    bench.submit(3, 1, max_tokens=1)
    plan = bench.step()
    assert (plan.admitted, plan.hold) == ((), Hold.BLOCKS)


def test_a_sequence_that_the_cache_can_never_hold_is_refused() -> None:
    bench = Bench(blocks=4)
    bench.submit(1, 10, max_tokens=7)
    problem = bench.finishes[1].problem
    assert problem is not None
    assert (problem.reason, problem.field) == (ErrorReason.CACHE_EXCEEDED, "sampling.max_tokens")
    assert bench.submit(2, 10, max_tokens=6).state is State.WAITING


def test_one_too_many_in_the_queue_is_refused_as_queue_full() -> None:
    bench = Bench(waiting=2)
    for id in (1, 2, 3):
        bench.submit(id, 4)
    problem = bench.finishes[3].problem
    assert problem is not None
    assert problem.reason is ErrorReason.QUEUE_FULL
    bench.run()
    assert [bench.finishes[id].reason for id in (1, 2)] == [FinishReason.LENGTH] * 2


def test_admission_beside_others_leaves_a_block_for_them_and_alone_takes_all() -> None:
    bench = Bench(blocks=4)
    bench.submit(1, 4, max_tokens=8)
    bench.step()
    bench.submit(2, 12, max_tokens=1)
    assert bench.step().hold is Hold.BLOCKS  # 1 holds two blocks now, three would be needed
    bench.scheduler.abort(1, bench.now)
    bench.submit(3, 1, max_tokens=1)
    plan = bench.step()
    assert (plan.admitted, plan.hold) == ((2,), Hold.BLOCKS)  # 3 would take the last block


def test_when_blocks_run_out_the_newest_gives_way_and_comes_back_first() -> None:
    bench = Bench(blocks=7)
    for id in (1, 2, 3):
        bench.submit(id, 8, max_tokens=8)
    bench.step()  # three times two blocks and one to spare
    bench.submit(4, 1, max_tokens=1)
    plan = bench.step()
    assert (plan.preempted, plan.hold, plan.admitted) == ((3,), Hold.PREEMPTED, ())
    assert shape(plan) == {1: 1, 2: 1}
    assert [s.id for s in bench.scheduler.waiting] == [3, 4]


def test_the_newest_itself_gives_way_when_it_is_the_one_that_needs_a_block() -> None:
    bench = Bench(blocks=5, block_size=4)
    bench.submit(1, 8, max_tokens=4)
    bench.submit(2, 7, max_tokens=8)
    bench.step()
    plan = bench.step()  # 1 takes the last free block, 2 fills its second
    assert (shape(plan), plan.preempted) == ({1: 1, 2: 1}, ())
    plan = bench.step()
    assert (shape(plan), plan.preempted) == ({1: 1}, (2,))


@pytest.mark.parametrize("blocks", [6, 7, 9, 13])
def test_preemption_changes_no_token_and_no_count(blocks: int) -> None:
    bench = Bench(blocks=blocks, budget=8)
    for id in range(1, 7):
        bench.submit(id, 3 + id, max_tokens=12)
    bench.run()
    assert sum(f.preemptions for f in bench.finishes.values()) > 0
    for id in range(1, 7):
        assert bench.tokens[id] == alone(3 + id, 12, id)
    assert bench.pool.free_blocks == blocks


@pytest.mark.parametrize("steps", [0, 1, 3, 5], ids=["waiting", "prefilling", "first token", "decoding"])
def test_an_abort_frees_everything_at_once_in_any_state(steps: int) -> None:
    bench = Bench(budget=8)
    bench.submit(1, 20, max_tokens=30)
    for _ in range(steps):
        bench.step()
    finish = bench.scheduler.abort(1, bench.now)
    assert finish is not None
    assert finish.reason is FinishReason.CANCELLED
    assert finish.problem is not None
    assert finish.problem.reason is ErrorReason.CANCELLED
    assert bench.pool.free_blocks == 64
    assert bench.step().slices == ()


def test_an_abort_while_preempted_leaves_nothing_behind() -> None:
    bench = Bench(blocks=7)
    for id in (1, 2, 3):
        bench.submit(id, 8, max_tokens=8)
    bench.step()
    assert bench.step().preempted == (3,)
    assert bench.scheduler.abort(3, bench.now) is not None
    bench.run()
    assert set(bench.finishes) == {1, 2}
    assert bench.pool.free_blocks == 7


def test_an_abort_during_a_step_drops_the_steps_token() -> None:
    bench = Bench()
    bench.submit(1, 4)
    bench.submit(2, 4)
    plan = bench.scheduler.schedule(0.0)
    assert bench.scheduler.abort(1, 0.0) is not None
    outcome = bench.scheduler.update(plan, bench.backend.execute(plan.slices, {}), 0.0)
    assert list(outcome.sequence_ids) == [2]
    assert list(outcome.token_ids) == alone(4, 1, 2)
    bench.scheduler.check()


def test_aborting_what_is_not_there_is_nothing() -> None:
    bench = Bench()
    bench.submit(1, 4, max_tokens=1)
    bench.run()
    assert bench.scheduler.abort(1, 9.0) is None
    assert bench.scheduler.abort(77, 9.0) is None


def test_a_waiting_sequence_past_its_deadline_is_dropped_before_prefill() -> None:
    bench = Bench(seqs=1)
    bench.submit(1, 4, max_tokens=5)
    bench.submit(2, 4, deadline_at=3.0)
    for _ in range(4):
        plan = bench.step()
    assert [f.sequence_id for f in plan.expired] == [2]
    finish = bench.finishes[2]
    assert finish.problem is not None
    assert (finish.reason, finish.problem.reason) == (FinishReason.CANCELLED, ErrorReason.DEADLINE_EXCEEDED)
    assert (finish.queue_ms, finish.prefill_chunks, bench.tokens[2]) == (3000.0, 0, [])


def test_a_running_sequence_past_its_deadline_stops_and_frees_its_blocks() -> None:
    bench = Bench()
    bench.submit(1, 4, max_tokens=50, deadline_at=2.0)
    bench.step()
    bench.step()
    assert bench.scheduler.next_deadline() == 2.0
    assert bench.step().slices == ()
    assert bench.pool.free_blocks == 64
    assert bench.scheduler.next_deadline() == math.inf


def test_times_in_the_finish_record_are_those_of_the_steps() -> None:
    bench = Bench(seqs=1, budget=8)
    bench.submit(1, 4, max_tokens=2)
    bench.submit(2, 20, max_tokens=1)
    bench.run()
    finish = bench.finishes[2]  # waits through steps 0 and 1, prefills in 2, 3 and 4
    assert (finish.queue_ms, finish.prefill_ms, finish.prefill_chunks) == (2000.0, 2000.0, 3)


def test_the_load_counts_waiting_prompts_and_chunks_still_to_come() -> None:
    bench = Bench(seqs=2, budget=8)
    bench.submit(1, 2, max_tokens=9)
    bench.submit(2, 20)
    bench.submit(3, 11)
    bench.step()  # 2 tokens of 1, 6 of 2
    now = load(bench.scheduler, Rates())
    assert (now.waiting, now.running, now.waiting_prefill_tokens) == (1, 2, 14 + 11)
    assert (now.free_blocks, now.total_blocks) == (64 - 1 - 5, 64)
    assert (now.prefill_tokens_per_s, now.itl_ms) == (None, None)


def test_a_step_too_small_for_all_running_decodes_cannot_be_configured() -> None:
    with pytest.raises(ValueError, match="max_num_seqs=9 must be from 1 to max_num_batched_tokens=8"):
        BatchLimits(max_num_seqs=9, max_num_batched_tokens=8, enable_chunked_prefill=True, max_waiting=1)


def test_higher_classes_are_served_first_and_within_a_class_the_older() -> None:
    bench = Bench(seqs=1)
    for id, priority in enumerate((Priority.BATCH, Priority.STANDARD, Priority.INTERACTIVE, Priority.INTERACTIVE), 1):
        bench.submit(id, 4, max_tokens=1, placement=Placement(priority=priority))
    bench.run()
    assert list(bench.finishes) == [3, 4, 2, 1]


def test_the_victim_is_of_the_lowest_class_then_the_newest_and_waits_in_its_old_place() -> None:
    bench = Bench(blocks=9)
    classes = {1: Priority.BATCH, 2: Priority.BATCH, 3: Priority.STANDARD, 4: Priority.INTERACTIVE}
    for id in (4, 1, 2, 3):
        bench.submit(id, 8, max_tokens=8, placement=Placement(priority=classes[id]))
    bench.step()  # four times two blocks and one to spare
    bench.submit(5, 1, max_tokens=1)
    plan = bench.step()
    assert (plan.preempted, shape(plan)) == ((2,), {4: 1, 1: 1, 3: 1})  # not 3, the newest of all
    assert [s.id for s in bench.scheduler.waiting] == [5, 2]


def test_overcommitted_memory_delays_the_victims_and_ends_nobody() -> None:
    """(llama.cpp#23652)"""
    bench = Bench(blocks=12, waiting=32)
    for id in range(1, 17):
        bench.submit(id, 5, max_tokens=20)
    bench.run()
    assert {finish.reason for finish in bench.finishes.values()} == {FinishReason.LENGTH}
    assert all(bench.tokens[id] == alone(5, 20, id) for id in range(1, 17))


@pytest.mark.parametrize("caching", [True, False])
def test_sixty_four_requests_with_common_beginnings_arriving_anyhow_answer_as_if_alone(caching: bool) -> None:
    """(vllm#15730, llama.cpp#6681, vllm#15307: seeded, in chunks, with hits and preemptions)"""
    order = random.Random(7)
    bench = Bench(blocks=16, waiting=64, caching=caching, budget=16)
    prompts = {id: [1000 * (id % 3) + i for i in range(12)] + [id] * order.randrange(6) for id in range(64)}
    waiting = order.sample(sorted(prompts), 64)
    while waiting or bench.scheduler.running or bench.scheduler.waiting:
        for _ in range(order.randrange(4)):
            if waiting:
                id = waiting.pop()
                bench.submit(id, prompts[id], max_tokens=6, temperature=1.0, seed=id)
        bench.step()
    for id, prompt in prompts.items():
        assert bench.tokens[id] == oracle(prompt, 6, SamplingPlan(max_tokens=6, temperature=1.0, seed=id))
    assert sum(finish.preemptions for finish in bench.finishes.values()) > 0
    assert (sum(finish.cached_tokens for finish in bench.finishes.values()) > 300) is caching


def test_a_resumed_answer_has_as_many_tokens_as_were_asked_for() -> None:
    """(vllm-gaudi#541, vllm#16832)"""
    bench = Bench(blocks=6)
    for id in (1, 2, 3):
        bench.submit(id, 4, max_tokens=17)
    bench.run()
    assert sum(finish.preemptions for finish in bench.finishes.values()) > 0
    assert [len(bench.tokens[id]) for id in (1, 2, 3)] == [17] * 3


def test_pressure_is_one_when_nothing_more_is_admitted_and_cached_blocks_are_none() -> None:
    bench = Bench(blocks=9)
    bench.submit(1, 16, max_tokens=12)
    bench.step()
    now = load(bench.scheduler, Rates())
    assert (now.pressure, now.cached_blocks) == (0.5, 0)  # 4 of the 8 that an admission may use
    bench.submit(2, 12, max_tokens=3)
    bench.step()
    assert load(bench.scheduler, Rates()).pressure == 1.0
    bench.submit(3, 1)
    assert bench.step().hold is Hold.BLOCKS
    bench.run()
    now = load(bench.scheduler, Rates())
    assert (now.pressure, now.free_blocks) == (0.0, 9)
    assert now.cached_blocks > 0


def test_a_result_that_is_a_problem_ends_that_sequence_alone() -> None:
    bench = Bench()
    bench.submit(1, 4)
    bench.submit(2, 4)
    plan = bench.scheduler.schedule(0.0)
    problem = Problem(reason=ErrorReason.NUMERICAL, message="not numbers")
    results = bench.backend.execute(plan.slices, {})
    outcome = bench.scheduler.update(plan, [Computed(problem=problem), results[1]], 0.0)
    assert [(f.sequence_id, f.reason, f.problem) for f in outcome.finishes] == [(1, FinishReason.ERROR, problem)]
    assert list(outcome.sequence_ids) == [2]
    bench.run()
    assert bench.pool.free_blocks == 64


def test_a_token_that_completes_its_grammar_stops_the_answer() -> None:
    bench = Bench()
    bench.submit(1, 4, ignore_eos=True)
    plan = bench.scheduler.schedule(0.0)
    outcome = bench.scheduler.update(plan, [Computed(token_id=7, complete=True)], 0.0)
    assert [f.reason for f in outcome.finishes] == [FinishReason.STOP]
    assert list(outcome.token_ids) == [7]


def test_a_step_in_which_nobody_came_or_went_is_the_one_that_would_be_decided_anew() -> None:
    quick, slow = Bench(blocks=40, seqs=6), Bench(blocks=40, seqs=6)
    rng = random.Random(7)
    steady = 0
    for id in range(1, 400):
        at = rng.random()
        for bench in (quick, slow):
            if at < 0.12:
                patience = math.inf if at < 0.08 else 9.0
                bench.submit(10 * id, 3 + id % 9, 4 + id % 17, n=1 + id % 3, deadline_at=bench.now + patience)
            elif at < 0.15 and bench.scheduler.running:
                bench.collect(bench.scheduler.abort(bench.scheduler.running.last.id, bench.now))
        steady += quick.scheduler._steady > 0
        slow.scheduler._steady = 0
        assert quick.step() == slow.step()
    assert steady > 60
    assert (quick.tokens, quick.finishes) == (slow.tokens, slow.finishes)
