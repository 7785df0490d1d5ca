"""Guessed tokens in the scheduler: what they may take, where they are cut, and that nothing is left of untrue ones."""

from __future__ import annotations

import pytest

from headrace.engine.core.finish import ErrorReason, FinishReason, Problem
from headrace.engine.core.sampling_plan import ConstraintKind, ConstraintSpec, SamplingPlan
from headrace.engine.core.step import Computed, StepPlan
from headrace.testkit.engine_bench import Bench, oracle

ECHO = 4
REPEATED = [11, 12, 13, 14] * 4


def guesses(plan: StepPlan) -> dict[int, list[int]]:
    """The guesses of a step, by sequence."""
    return {p.sequence_id: list(p.token_ids[len(p.token_ids) - p.drafted :]) for p in plan.slices if p.drafted}


def answer(prompt: list[int], count: int, **fields: object) -> list[int]:
    return oracle(prompt, count, SamplingPlan(max_tokens=count, **fields), echo=ECHO)  # type: ignore[arg-type]


def test_text_that_repeats_itself_takes_fewer_steps_for_the_same_tokens() -> None:
    steps = {}
    for count in (0, 4):
        bench = Bench(guesses=count, echo=ECHO)
        bench.submit(1, REPEATED, max_tokens=40)
        bench.run()
        assert bench.tokens[1] == answer(REPEATED, 40)
        steps[count] = bench.now
    assert steps[4] < 0.7 * steps[0]
    assert len(bench.finishes[1].later_ms) == 39


def test_the_last_guess_could_still_be_emitted_and_none_is_made_for_the_last_token() -> None:
    bench = Bench(guesses=4, echo=ECHO)
    bench.submit(1, REPEATED, max_tokens=4, trusted_guesses=4)
    bench.step()
    assert [len(bench.tokens[1]), {k: len(v) for k, v in guesses(bench.step()).items()}] == [1, {1: 2}]
    bench.run()
    assert bench.tokens[1] == answer(REPEATED, 4)
    assert bench.finishes[1].reason is FinishReason.LENGTH


def test_an_answer_that_fills_the_whole_pool_is_guessed_at_to_its_end() -> None:
    bench = Bench(blocks=8, guesses=5, echo=ECHO)  # 32 tokens, and the context is no longer
    bench.submit(1, REPEATED, max_tokens=16)
    bench.run()
    assert bench.tokens[1] == answer(REPEATED, 16)
    assert bench.accepted > 0


@pytest.mark.parametrize("at", range(1, 12))
def test_a_stop_token_among_true_guesses_ends_the_answer_there(at: int) -> None:
    whole = answer(REPEATED, 24)
    stop = whole[at]
    bench = Bench(guesses=5, echo=ECHO)
    bench.submit(1, REPEATED, max_tokens=24, stop_token_ids=(stop,))
    bench.run()
    assert bench.tokens[1] == whole[: whole.index(stop) + 1]
    assert bench.finishes[1].reason is FinishReason.STOP
    assert bench.pool.free_blocks == bench.pool.total_blocks


def test_what_the_cache_keeps_of_a_guessed_answer_is_what_was_said() -> None:
    bench = Bench(guesses=5, echo=ECHO)
    bench.submit(1, REPEATED, max_tokens=30)
    bench.run()
    assert 0 < bench.accepted < bench.drafted
    said = REPEATED + bench.tokens[1]
    bench.submit(2, said, max_tokens=10)
    bench.run()
    assert bench.finishes[2].cached_tokens >= len(said) - 8
    assert bench.tokens[2] == answer(said, 10)


def test_an_abort_while_guesses_are_computed_frees_everything() -> None:
    bench = Bench(guesses=5, echo=ECHO)
    bench.submit(1, REPEATED, max_tokens=30)
    bench.step()
    plan = bench.scheduler.schedule(bench.now)
    assert guesses(plan)
    results = bench.backend.execute(plan.slices, {})
    assert bench.scheduler.abort(1, bench.now) is not None
    outcome = bench.scheduler.update(plan, results, bench.now)
    assert (outcome.token_ids, outcome.drafted) == ([], 0)
    bench.scheduler.check()
    assert bench.pool.free_blocks == bench.pool.total_blocks


def test_prompts_come_before_guesses() -> None:
    bench = Bench(budget=8, guesses=4, echo=ECHO)
    bench.submit(1, REPEATED, max_tokens=30, trusted_guesses=4)
    bench.step(), bench.step()
    bench.submit(2, 12)
    first, second = bench.step(), bench.step()
    assert [sum(len(p.token_ids) for p in plan.slices) for plan in (first, second)] == [8, 8]
    assert not guesses(first)
    assert {k: len(v) for k, v in guesses(second).items()} == {1: 2}  # what 5 prompt tokens and 1 decode leave of 8


def test_blocks_that_others_may_need_are_not_taken_for_guesses() -> None:
    bench = Bench(blocks=6, guesses=4, echo=ECHO)
    bench.submit(1, REPEATED, max_tokens=8, trusted_guesses=4)
    bench.step()  # 16 tokens in 4 blocks
    plan = bench.step()  # the 17th takes the fifth block, the sixth is the watermark's
    assert {k: len(v) for k, v in guesses(plan).items()} == {1: 3}
    assert bench.pool.free_blocks >= 1
    bench.run()
    assert bench.tokens[1] == answer(REPEATED, 8)


def test_more_sequences_than_set_are_not_guessed_for() -> None:
    bench = Bench(seqs=2, guesses=4, echo=ECHO)
    for id in (1, 2):
        bench.submit(id, [10 * id + at for at in (1, 2, 3, 4)] * 4, max_tokens=20)
    bench.step()
    assert len(guesses(bench.step())) == 2
    few = Bench(seqs=2, guesses=4, echo=ECHO, guessed_sequences=1)
    for id in (1, 2):
        few.submit(id, [10 * id + at for at in (1, 2, 3, 4)] * 4, max_tokens=20)
    few.step()
    assert not guesses(few.step())
    few.scheduler.abort(2, few.now)
    assert len(guesses(few.step())) == 1


def test_guesses_double_while_they_come_true_and_shrink_to_one_more_than_did() -> None:
    bench = Bench(guesses=8, echo=ECHO)
    sequence = bench.submit(1, REPEATED, max_tokens=60)
    bench.step()
    trusted = 1
    while 1 not in bench.finishes:
        accepted = bench.accepted
        drafted = len(guesses(bench.step()).get(1, ()))
        came_true = bench.accepted - accepted
        if drafted:
            assert drafted <= min(8, trusted)
            trusted = 2 * drafted if came_true == drafted else came_true + 1
            assert sequence.trusted_guesses == trusted


def test_a_constrained_sequence_is_not_guessed_for() -> None:
    bench = Bench(guesses=4, echo=ECHO)
    bench.submit(1, REPEATED, constraint=ConstraintSpec(kind=ConstraintKind.REGEX, texts=("a*",)), max_tokens=9)
    bench.run()
    assert bench.drafted == 0
    assert len(bench.tokens[1]) == 9


def test_the_answers_of_one_prompt_are_each_guessed_for() -> None:
    bench = Bench(guesses=4, echo=ECHO)
    bench.submit(1, REPEATED, max_tokens=20, n=3, temperature=1.0)
    bench.run()
    for index in range(3):
        assert bench.tokens[1 + index] == answer(REPEATED, 20, temperature=1.0, seed=index)
    assert len({tuple(bench.tokens[id]) for id in (1, 2, 3)}) == 3


def test_a_problem_after_true_guesses_ends_the_answer_after_their_tokens() -> None:
    bench = Bench(guesses=2, echo=ECHO)
    bench.submit(1, REPEATED, max_tokens=20)
    bench.step()
    plan = bench.scheduler.schedule(bench.now)
    (piece,) = plan.slices
    first = piece.token_ids[1]
    problem = Problem(reason=ErrorReason.NUMERICAL, message="not numbers")
    outcome = bench.scheduler.update(plan, [Computed(token_id=first, more=(Computed(problem=problem),))], bench.now)
    assert (outcome.sequence_ids, outcome.token_ids) == ([1], [first])
    assert [(f.reason, f.problem) for f in outcome.finishes] == [(FinishReason.ERROR, problem)]
    bench.scheduler.check()


def test_a_migrated_answer_goes_on_with_guesses_from_what_was_emitted() -> None:
    whole = answer(REPEATED, 24)
    bench = Bench(guesses=4, echo=ECHO)
    bench.submit(1, REPEATED + whole[:10], max_tokens=14, emitted_tokens=10)
    bench.run()
    assert bench.tokens[1] == whole[10:]
    assert bench.accepted > 0
