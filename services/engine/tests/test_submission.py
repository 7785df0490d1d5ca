"""Anything a client can send is served or refused with the field at fault."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from headrace.api.common.v1.sampling_pb2 import Choices, Constraint, LogitBias, SamplingParams
from headrace.base.errors import InvalidRequest
from headrace.engine.core.finish import ErrorReason, Problem
from headrace.engine.core.sampling_plan import ConstraintKind, ConstraintSpec, SamplingPlan
from headrace.engine.core.submission import ModelLimits, examine
from headrace.engine.sampling import answers_wanted, plan_of

LIMITS = ModelLimits(vocab_size=100, max_model_len=50)
INVALID, BEYOND = ErrorReason.INVALID_FIELD, ErrorReason.TOKEN_OUT_OF_RANGE
NAN, INF = math.nan, math.inf
REGEX, JSON, CHOICE = ConstraintKind.REGEX, ConstraintKind.JSON_SCHEMA, ConstraintKind.CHOICE


def found(prompt: Any = (1, 2, 3), *, limits: ModelLimits = LIMITS, emitted: int = 0, **changes: Any) -> Any:
    plan = replace(SamplingPlan(max_tokens=10), **changes)
    return examine(prompt, plan, limits, emitted_tokens=emitted)


def constraint(kind: ConstraintKind, *texts: str) -> ConstraintSpec:
    return ConstraintSpec(kind=kind, texts=texts)


@pytest.mark.parametrize(
    ("changes", "field", "reason"),
    [
        ({"prompt": ()}, "token_ids", ErrorReason.EMPTY_PROMPT),
        ({"prompt": (1,) * 50}, "token_ids", ErrorReason.CONTEXT_EXCEEDED),
        ({"prompt": (1, 100)}, "token_ids[1]", BEYOND),
        ({"prompt": (1, -1)}, "token_ids[1]", BEYOND),
        ({"emitted": 3}, "emitted_tokens", INVALID),
        ({"emitted": -1}, "emitted_tokens", INVALID),
        ({"max_tokens": 0}, "sampling.max_tokens", INVALID),
        *[({"temperature": bad}, "sampling.temperature", INVALID) for bad in (-0.1, 2.1, NAN, INF)],
        ({"top_k": -1}, "sampling.top_k", INVALID),
        *[({"top_p": bad}, "sampling.top_p", INVALID) for bad in (0.0, 1.1, NAN)],
        *[({"min_p": bad}, "sampling.min_p", INVALID) for bad in (-0.1, 1.1, NAN)],
        *[({"repetition_penalty": bad}, "sampling.repetition_penalty", INVALID) for bad in (0.0, -1.0, 10.1, NAN, INF)],
        *[({"frequency_penalty": bad}, "sampling.frequency_penalty", INVALID) for bad in (-2.1, 2.1, NAN)],
        *[({"presence_penalty": bad}, "sampling.presence_penalty", INVALID) for bad in (-2.1, 2.1, NAN)],
        ({"logit_bias": {1: 0.0, 2: 0.0, 100: 1.0}}, "sampling.logit_bias[2].token_id", BEYOND),
        *[({"logit_bias": {1: 0.0, 2: bad}}, "sampling.logit_bias[1].bias", INVALID) for bad in (100.1, -101, NAN)],
        ({"stop_token_ids": (1, 99, 100)}, "sampling.stop_token_ids[2]", BEYOND),
        ({"stop_token_ids": (1,) * 65}, "sampling.stop_token_ids", INVALID),
        ({"allowed_token_ids": (1, 2, 3, 4, 5, 100)}, "sampling.allowed_token_ids[5]", BEYOND),
        ({"allowed_token_ids": (1,) * 65_537}, "sampling.allowed_token_ids", INVALID),
        ({"allowed_token_ids": (4, 5), "banned_token_ids": (5, 4)}, "sampling.allowed_token_ids", INVALID),
        ({"banned_token_ids": (4_000_000_000,)}, "sampling.banned_token_ids[0]", BEYOND),
        ({"banned_token_ids": (1,) * 65_537}, "sampling.banned_token_ids", INVALID),
        ({"min_tokens": 11}, "sampling.min_tokens", INVALID),
        ({"min_tokens": 13, "emitted": 2}, "sampling.min_tokens", INVALID),
        ({"logprobs": 21}, "sampling.logprobs", INVALID),
        ({"prompt_logprobs": 21}, "sampling.prompt_logprobs", INVALID),
        ({"constraint": constraint(REGEX, "")}, "sampling.constraint.regex", INVALID),
        ({"constraint": constraint(REGEX, "a" * 8193)}, "sampling.constraint.regex", INVALID),
        ({"constraint": constraint(JSON, "ä" * 32769)}, "sampling.constraint.json_schema", INVALID),
        ({"constraint": constraint(CHOICE)}, "sampling.constraint.choice.texts", INVALID),
        ({"constraint": constraint(CHOICE, *["a"] * 257)}, "sampling.constraint.choice.texts", INVALID),
        ({"constraint": constraint(CHOICE, "a", "")}, "sampling.constraint.choice.texts[1]", INVALID),
        ({"constraint": constraint(CHOICE, "a" * 65_536, "b")}, "sampling.constraint.choice.texts", INVALID),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused_with_the_path_of_its_field(changes: Any, field: str, reason: Any) -> None:
    problem = found(**changes)

    assert isinstance(problem, Problem)
    assert (problem.field, problem.reason) == (field, reason)


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 1e-6, "top_k": 4_000_000_000, "top_p": 1.0, "min_p": 1.0},
        {"temperature": 2.0, "top_p": 1e-30, "min_p": 0.0, "repetition_penalty": 1e-30},
        {"repetition_penalty": 10.0, "frequency_penalty": -2.0, "presence_penalty": 2.0},
        {"logit_bias": {n: 100.0 for n in range(100)}},
        {"allowed_token_ids": (99,) * 65_536, "banned_token_ids": (0,) * 65_536, "stop_token_ids": (99,) * 64},
        {"min_tokens": 10, "logprobs": 20, "prompt_logprobs": 20},
        {"min_tokens": 12, "emitted": 2},
        {"constraint": constraint(REGEX, "a" * 8192)},
        {"constraint": constraint(JSON, "a" * 65_536)},
        {"constraint": constraint(CHOICE, *["a" * 256] * 256)},
    ],
)
def test_the_edges_of_every_range_are_served(changes: Any) -> None:
    assert isinstance(found(**changes), SamplingPlan)


def test_max_tokens_is_cut_to_what_the_context_leaves() -> None:
    assert found((1,) * 45, max_tokens=10).max_tokens == 5
    assert found((1,) * 40, max_tokens=10).max_tokens == 10


def test_a_prompt_s_log_probabilities_fit_one_message() -> None:
    wide = ModelLimits(vocab_size=100, max_model_len=1 << 20)
    assert isinstance(found((1,) * 8192, limits=wide, prompt_logprobs=20), SamplingPlan)
    problem = found((1,) * 16_384, limits=wide, prompt_logprobs=20)
    assert (problem.field, problem.message) == (
        "sampling.prompt_logprobs",
        "sampling.prompt_logprobs must be at most 15 for 16384 tokens",
    )
    assert isinstance(found((1,) * 16_384, limits=wide, prompt_logprobs=15), SamplingPlan)


def test_defaults_change_no_logit_and_every_field_reaches_the_plan() -> None:
    assert plan_of(SamplingParams(seed=5), default_max_tokens=7) == SamplingPlan(max_tokens=7, seed=5)
    params = SamplingParams(
        max_tokens=9, temperature=0.5, top_k=3, top_p=0.25, seed=4, stop_token_ids=[8, 7], ignore_eos=True, min_p=0.5,
        repetition_penalty=2.0, frequency_penalty=-1.0, presence_penalty=1.5, banned_token_ids=[3, 1],
        logit_bias=[LogitBias(token_id=6, bias=-2.0), LogitBias(token_id=5, bias=2.0)], allowed_token_ids=[9, 5],
        min_tokens=2, logprobs=0, prompt_logprobs=4, constraint=Constraint(choice=Choices(texts=["a", "b"])),
    )  # fmt: skip
    assert plan_of(params, default_max_tokens=7) == SamplingPlan(
        max_tokens=9, temperature=0.5, top_k=3, top_p=0.25, seed=4, stop_token_ids=(8, 7), ignore_eos=True, min_p=0.5,
        repetition_penalty=2.0, frequency_penalty=-1.0, presence_penalty=1.5, banned_token_ids=(3, 1),
        logit_bias={6: -2.0, 5: 2.0}, allowed_token_ids=(9, 5), min_tokens=2, logprobs=0, prompt_logprobs=4,
        constraint=constraint(CHOICE, "a", "b"),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("params", "field"),
    [
        (SamplingParams(logit_bias=[LogitBias(token_id=6), LogitBias(token_id=6)]), "sampling.logit_bias[1].token_id"),
        (SamplingParams(constraint=Constraint()), "sampling.constraint"),
        (SamplingParams(n=0), "sampling.n"),
        (SamplingParams(n=17), "sampling.n"),
    ],
)
def test_what_no_plan_can_express_is_refused_on_the_way_to_one(params: SamplingParams, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        answers_wanted(params)
        plan_of(params, default_max_tokens=1)

    assert refused.value.field == field


def test_n_is_one_unless_asked_for_more() -> None:
    assert [answers_wanted(SamplingParams(n=n)) for n in (1, 16)] == [1, 16]
    assert answers_wanted(SamplingParams()) == 1
