"""Several answers to one prompt: computed once, shared, copied before a write, and each with an end of its own."""

from __future__ import annotations

import pytest

from headrace.engine.core.finish import ErrorReason, FinishReason
from headrace.engine.core.request import State
from headrace.engine.core.sampling_plan import SamplingPlan
from headrace.engine.core.step import Hold
from headrace.testkit.engine_bench import Bench, oracle, shape

SAMPLED = {"temperature": 1.0, "seed": 40}


def expected(prompt: list[int], count: int, n: int) -> list[list[int]]:
    return [
        oracle(prompt, count, SamplingPlan(max_tokens=count, temperature=1.0, seed=40 + index)) for index in range(n)
    ]


def prompt_of(length: int) -> list[int]:
    return list(range(300, 300 + length))


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9, 13])
@pytest.mark.parametrize("caching", [True, False])
def test_each_answer_is_that_of_its_own_seed_and_the_prompt_is_computed_once(length: int, caching: bool) -> None:
    """(vllm#16863)"""
    bench = Bench(caching=caching)
    bench.submit(1, prompt_of(length), 6, n=4, **SAMPLED)
    first, second = bench.step(), bench.step()
    assert shape(first) == {1: length}
    assert shape(second) == {1: 1, 2: 1, 3: 1, 4: 1}
    bench.run()
    answers = expected(prompt_of(length), 6, 4)
    assert [bench.tokens[id] for id in (1, 2, 3, 4)] == answers
    assert len({tuple(answer) for answer in answers}) == 4
    assert {bench.finishes[id].reason for id in (1, 2, 3, 4)} == {FinishReason.LENGTH}
    assert {bench.finishes[id].prefill_chunks for id in (1, 2, 3, 4)} == {1}
    assert bench.pool.free_blocks == 64


def test_full_blocks_are_shared_and_only_the_half_filled_one_is_copied() -> None:
    bench = Bench()
    bench.submit(1, prompt_of(10), 6, n=3, **SAMPLED)
    bench.step()
    plan = bench.step()
    tables = [sequence.block_table for sequence in bench.scheduler.running]
    assert len({tuple(table[:2]) for table in tables}) == 1
    assert len({table[2] for table in tables}) == 3
    assert bench.pool.free_blocks == 64 - 2 - 3
    assert [source for source, _ in plan.copies] == [plan.copies[0][0]] * 2  # the last holder keeps the original


def test_nothing_is_copied_when_no_block_is_half_filled() -> None:
    bench = Bench()
    bench.submit(1, prompt_of(9), 6, n=3, **SAMPLED)
    bench.step()
    assert bench.step().copies == ()


def test_the_whole_family_is_counted_at_admission() -> None:
    bench = Bench(seqs=4)
    bench.submit(1, 5, max_tokens=9)
    bench.step()
    bench.submit(10, prompt_of(5), 6, n=4)
    assert bench.step().hold is Hold.SEQUENCES
    bench = Bench(seqs=4)
    bench.submit(1, 5, max_tokens=9)
    bench.submit(10, prompt_of(5), 6, n=3)
    assert bench.step().admitted == (1, 10)
    bench.submit(20, 1)
    assert bench.step().hold is Hold.SEQUENCES  # the places of 11 and 12 were taken with 10's


def test_blocks_for_every_answer_are_counted_at_admission() -> None:
    bench = Bench(blocks=8)
    bench.submit(1, 12, max_tokens=4)
    bench.step()
    bench.submit(10, prompt_of(5), 3, n=4)
    assert bench.step().hold is Hold.BLOCKS  # 2 and 3 more and one to spare; four are left


def test_a_family_counts_whole_in_the_queue() -> None:
    bench = Bench(waiting=4)
    bench.submit(1, 5, n=3)
    assert bench.scheduler.num_waiting == 3
    bench.submit(10, 5, n=2)
    problems = [bench.finishes[id].problem for id in (10, 11)]
    assert all(problem is not None and problem.reason is ErrorReason.QUEUE_FULL for problem in problems)
    bench.submit(20, 5, n=5)
    problem = bench.finishes[24].problem
    assert problem is not None
    assert problem.field == "sampling.n"


@pytest.mark.parametrize("seqs", [1, 2, 3])
def test_more_answers_than_places_begin_one_after_the_other(seqs: int) -> None:
    bench = Bench(seqs=seqs)
    bench.submit(1, prompt_of(10), 6, n=4, **SAMPLED)
    bench.run()
    assert [bench.tokens[id] for id in (1, 2, 3, 4)] == expected(prompt_of(10), 6, 4)


@pytest.mark.parametrize("blocks", [5, 6, 7, 9])
@pytest.mark.parametrize("caching", [True, False])
def test_answers_are_preempted_one_by_one_and_stay_what_they_were(blocks: int, caching: bool) -> None:
    bench = Bench(blocks=blocks, caching=caching)
    bench.submit(1, prompt_of(9), 10, n=3, **SAMPLED)
    bench.run()
    assert sum(bench.finishes[id].preemptions for id in (1, 2, 3)) > 0
    assert [bench.tokens[id] for id in (1, 2, 3)] == expected(prompt_of(9), 10, 3)
    assert bench.pool.free_blocks == blocks


def test_an_answer_resubmitted_elsewhere_goes_on_alone() -> None:
    bench = Bench()
    whole = expected(prompt_of(9), 10, 3)[2]
    bench.submit(1, prompt_of(9) + whole[:4], 6, temperature=1.0, seed=42, emitted_tokens=4)
    plan = bench.step()
    assert plan.slices[0].prompt_length == 9
    bench.run()
    assert bench.tokens[1] == whole[4:]


@pytest.mark.parametrize("steps", [0, 1, 2, 3], ids=["waiting", "prefilling", "prefilled", "decoding"])
@pytest.mark.parametrize("victim", [1, 2, 3])
def test_cancelling_one_answer_leaves_the_others(steps: int, victim: int) -> None:
    bench = Bench(budget=8)
    bench.submit(1, prompt_of(13), 6, n=3, **SAMPLED)
    for _ in range(steps):
        bench.step()
    bench.collect(bench.scheduler.abort(victim, bench.now))
    bench.scheduler.check()
    bench.run()
    answers = dict(zip((1, 2, 3), expected(prompt_of(13), 6, 3), strict=True))
    assert bench.finishes[victim].reason is FinishReason.CANCELLED
    for id in {1, 2, 3} - {victim}:
        assert bench.tokens[id] == answers[id]
    assert bench.pool.free_blocks == 64


def test_a_family_past_its_deadline_ends_whole() -> None:
    bench = Bench(seqs=2)
    bench.submit(9, 4, max_tokens=20, n=2)
    bench.submit(1, prompt_of(5), 6, n=2, deadline_at=2.0)
    for _ in range(3):
        bench.step()
    assert [bench.finishes[id].reason for id in (1, 2)] == [FinishReason.CANCELLED] * 2


def test_one_token_answers_end_one_by_one() -> None:
    bench = Bench()
    bench.submit(1, prompt_of(8), 1, n=3, **SAMPLED)
    bench.run()
    assert [bench.tokens[id] for id in (1, 2, 3)] == expected(prompt_of(8), 1, 3)


def test_who_waits_for_its_grammar_holds_up_nobody_and_runs_when_it_has_come() -> None:
    bench = Bench()
    waits = bench.submit(1, 5, grammar_pending=True)
    bench.submit(2, 5)
    plan = bench.step()
    assert (shape(plan), plan.hold, waits.state) == ({2: 5}, Hold.GRAMMAR, State.WAITING_FOR_GRAMMAR)
    bench.scheduler.grammar_ready(1)
    assert shape(bench.step()) == {2: 1, 1: 5}


def test_an_answer_without_its_grammar_is_not_forked_and_comes_later() -> None:
    bench = Bench()
    bench.submit(1, prompt_of(9), 6, n=2, grammar_pending=True, **SAMPLED)
    bench.scheduler.grammar_ready(1)
    bench.step()
    assert shape(bench.step()) == {1: 1}
    bench.scheduler.grammar_ready(2)
    bench.run()
    assert [bench.tokens[id] for id in (1, 2)] == expected(prompt_of(9), 6, 2)
