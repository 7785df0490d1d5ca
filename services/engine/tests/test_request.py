"""A sequence's life: when it ends, what its finish record says, and what may enter at all."""

from __future__ import annotations

import math

import pytest

from headrace.engine.core.finish import ErrorReason, FinishReason, Problem
from headrace.engine.core.request import Sequence
from headrace.engine.core.sampling_plan import SamplingPlan
from headrace.engine.core.submission import ModelLimits, examine

EOS = frozenset({2})
LIMITS = ModelLimits(vocab_size=100, max_model_len=16)


def sequence(plan: SamplingPlan) -> Sequence:
    return Sequence(id=1, token_ids=[5, 6], prompt_length=2, plan=plan, arrived_at=10.0)


def test_the_last_allowed_token_ends_the_answer_with_length() -> None:
    s = sequence(SamplingPlan(max_tokens=2))
    assert s.append(7, EOS, 11.0) is None
    assert s.append(7, EOS, 11.0) is FinishReason.LENGTH


def test_an_end_of_sequence_token_stops_and_belongs_to_the_answer() -> None:
    s = sequence(SamplingPlan(max_tokens=9))
    assert s.append(2, EOS, 11.0) is FinishReason.STOP
    assert s.token_ids == [5, 6, 2]


def test_an_ignored_end_of_sequence_token_does_not_stop() -> None:
    assert sequence(SamplingPlan(max_tokens=9, ignore_eos=True)).append(2, EOS, 11.0) is None


def test_a_stop_token_stops_even_when_end_of_sequence_is_ignored() -> None:
    plan = SamplingPlan(max_tokens=9, ignore_eos=True, stop_token_ids=frozenset({7}))
    assert sequence(plan).append(7, EOS, 11.0) is FinishReason.STOP


def test_a_stop_token_in_the_last_allowed_place_counts_as_stop() -> None:
    plan = SamplingPlan(max_tokens=1, stop_token_ids=frozenset({7}))
    assert sequence(plan).append(7, EOS, 11.0) is FinishReason.STOP


def test_the_finish_record_splits_the_time_at_prefill_start_and_first_token() -> None:
    s = sequence(SamplingPlan(max_tokens=9))
    s.prefill_started_at = 10.25
    s.append(7, EOS, 10.75)
    s.append(7, EOS, 12.0)
    finish = s.finish(FinishReason.STOP, 12.0)
    assert (finish.queue_ms, finish.prefill_ms) == (250.0, 500.0)


def test_a_sequence_that_never_began_spent_all_its_time_in_the_queue() -> None:
    finish = sequence(SamplingPlan(max_tokens=9)).finish(FinishReason.CANCELLED, 11.5)
    assert (finish.queue_ms, finish.prefill_ms) == (1500.0, 0.0)


@pytest.mark.parametrize(
    ("token_ids", "reason", "field"),
    [
        ([], ErrorReason.EMPTY_PROMPT, "token_ids"),
        ([1, 2, 99, 100, 7], ErrorReason.TOKEN_OUT_OF_RANGE, "token_ids[3]"),
        ([1, -1], ErrorReason.TOKEN_OUT_OF_RANGE, "token_ids[1]"),
        ([1] * 16, ErrorReason.CONTEXT_EXCEEDED, "token_ids"),
        ([100] * 17, ErrorReason.CONTEXT_EXCEEDED, "token_ids"),
    ],
)
def test_a_prompt_that_cannot_be_served_is_refused_by_field(
    token_ids: list[int], reason: ErrorReason, field: str
) -> None:
    problem = examine(token_ids, SamplingPlan(max_tokens=4), LIMITS)
    assert isinstance(problem, Problem)
    assert (problem.reason, problem.field) == (reason, field)


@pytest.mark.parametrize(
    ("plan", "field"),
    [
        (SamplingPlan(max_tokens=0), "sampling.max_tokens"),
        (SamplingPlan(max_tokens=1, temperature=-0.1), "sampling.temperature"),
        (SamplingPlan(max_tokens=1, temperature=math.nan), "sampling.temperature"),
        (SamplingPlan(max_tokens=1, temperature=2.5), "sampling.temperature"),
        (SamplingPlan(max_tokens=1, top_p=0.0), "sampling.top_p"),
        (SamplingPlan(max_tokens=1, top_p=math.nan), "sampling.top_p"),
        (SamplingPlan(max_tokens=1, top_k=-1), "sampling.top_k"),
    ],
)
def test_impossible_sampling_values_are_refused_by_field(plan: SamplingPlan, field: str) -> None:
    problem = examine([1], plan, LIMITS)
    assert isinstance(problem, Problem)
    assert (problem.reason, problem.field) == (ErrorReason.INVALID_FIELD, field)


def test_odd_but_possible_values_are_served() -> None:
    plan = SamplingPlan(max_tokens=1, temperature=1e-6, top_k=10**9, stop_token_ids=frozenset(range(64)))
    assert examine([99], plan, LIMITS) == plan


def test_max_tokens_is_capped_to_what_the_context_leaves() -> None:
    plan = examine([1] * 15, SamplingPlan(max_tokens=1000, seed=3), LIMITS)
    assert plan == SamplingPlan(max_tokens=1, seed=3)


def test_the_finish_record_tells_when_each_later_token_came() -> None:
    sequence = Sequence(
        id=1, token_ids=[5, 6], prompt_length=2, plan=SamplingPlan(max_tokens=9, ignore_eos=True), arrived_at=1.0
    )
    sequence.prefill_started_at = 1.5
    for now in (2.0, 2.25, 3.25):
        sequence.append(7, frozenset(), now)
    finish = sequence.finish(FinishReason.CANCELLED, 4.0)
    assert (finish.queue_ms, finish.prefill_ms, finish.later_ms) == (500.0, 500.0, (250.0, 1000.0))
