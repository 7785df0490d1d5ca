"""The shape of requests, without a wire: each refusal names its field."""

from __future__ import annotations

import math
from typing import Any

import pytest

from headrace.base.errors import InvalidRequest
from headrace.gateway.core.ask import (
    Ask,
    ChatPrompt,
    Constraint,
    ConstraintKind,
    Message,
    Prompt,
    Sampling,
    TextPrompt,
    TokenPrompt,
)
from headrace.gateway.core.sampling_check import Limits
from headrace.gateway.core.validation import (
    check_ask,
    check_length,
    check_model,
    granted_max_tokens,
    prompt_field,
)

LIMITS = Limits(vocab_size=100, max_model_len=50)


def ask(prompt: Prompt | None = None, **sampling: Any) -> Ask:
    return Ask(model="m", prompt=prompt or TextPrompt(text="x"), sampling=Sampling(**sampling))


def chat(*roles: str, field: str = "messages") -> ChatPrompt:
    return ChatPrompt(messages=tuple(Message(role=role, content="x") for role in roles), field=field)


def shape(kind: str, *texts: str) -> Constraint:
    return Constraint(kind=ConstraintKind(kind), texts=texts)


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (ask(TextPrompt(text="")), "prompt"),
        (ask(TokenPrompt(ids=())), "prompt"),
        (ask(TokenPrompt(ids=(0, 99, 100))), "token_ids.ids[2]"),
        (ask(TokenPrompt(ids=(0,) * 50)), "prompt"),
        (ask(chat()), "messages"),
        (ask(chat("user", "tool")), "messages[1].role"),
        (ask(chat("", field="conversation.messages")), "conversation.messages[0].role"),
        (ask(max_tokens=0), "sampling.max_tokens"),
        (ask(temperature=-0.1), "sampling.temperature"),
        (ask(temperature=2.1), "sampling.temperature"),
        (ask(temperature=math.nan), "sampling.temperature"),
        (ask(temperature=math.inf), "sampling.temperature"),
        (ask(top_p=0.0), "sampling.top_p"),
        (ask(top_p=1.01), "sampling.top_p"),
        (ask(top_p=math.nan), "sampling.top_p"),
        (ask(stop=("a", "b", "c", "")), "sampling.stop[3]"),
        (ask(stop=("a", "x" * 257)), "sampling.stop[1]"),
        (ask(stop=("a",) * 17), "sampling.stop"),
        (ask(stop_token_ids=(1, 100)), "sampling.stop_token_ids[1]"),
        (ask(stop_token_ids=(1,) * 65), "sampling.stop_token_ids"),
        *[(ask(min_p=bad), "sampling.min_p") for bad in (-0.1, 1.1, math.nan)],
        *[(ask(repetition_penalty=bad), "sampling.repetition_penalty") for bad in (0.0, 10.1, math.nan, math.inf)],
        *[(ask(frequency_penalty=bad), "sampling.frequency_penalty") for bad in (-2.1, 2.1, math.nan)],
        *[(ask(presence_penalty=bad), "sampling.presence_penalty") for bad in (-2.1, 2.1, math.nan)],
        (ask(logit_bias=((1, 0.0), (2, 0.0), (100, 0.0))), "sampling.logit_bias[2].token_id"),
        (ask(logit_bias=((1, 0.0), (1, 0.0))), "sampling.logit_bias[1].token_id"),
        *[(ask(logit_bias=((1, 0.0), (2, bad))), "sampling.logit_bias[1].bias") for bad in (100.1, -101.0, math.nan)],
        (ask(logit_bias=tuple((n % 99, 0.0) for n in range(1025))), "sampling.logit_bias"),
        (ask(allowed_token_ids=(1, 2, 3, 4, 5, 100)), "sampling.allowed_token_ids[5]"),
        (ask(allowed_token_ids=(1,) * 65_537), "sampling.allowed_token_ids"),
        (ask(allowed_token_ids=(1, 2), banned_token_ids=(2, 1)), "sampling.allowed_token_ids"),
        (ask(banned_token_ids=(1, 4_000_000_000)), "sampling.banned_token_ids[1]"),
        (ask(banned_token_ids=(1,) * 65_537), "sampling.banned_token_ids"),
        (ask(max_tokens=5, min_tokens=6), "sampling.min_tokens"),
        (ask(n=0), "sampling.n"),
        (ask(n=17), "sampling.n"),
        (ask(logprobs=21), "sampling.logprobs"),
        (ask(prompt_logprobs=21), "sampling.prompt_logprobs"),
        (ask(constraint=Constraint(kind=None)), "sampling.constraint"),
        (ask(constraint=shape("regex", "")), "sampling.constraint.regex"),
        (ask(constraint=shape("regex", "a" * 8193)), "sampling.constraint.regex"),
        (ask(constraint=shape("json_schema", "ä" * 32_769)), "sampling.constraint.json_schema"),
        (ask(constraint=shape("choice")), "sampling.constraint.choice.texts"),
        (ask(constraint=shape("choice", *["a"] * 257)), "sampling.constraint.choice.texts"),
        (ask(constraint=shape("choice", "a", "")), "sampling.constraint.choice.texts[1]"),
        (ask(constraint=shape("choice", "a" * 65_536, "b")), "sampling.constraint.choice.texts"),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_path_of_its_field(request_: Ask, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_ask(request_, LIMITS)

    assert refused.value.field == field


@pytest.mark.parametrize(
    "request_",
    [
        ask(TokenPrompt(ids=(0, 99))),
        ask(chat("system", "user", "assistant", "user")),
        ask(max_tokens=1, temperature=0.0, top_k=0, top_p=1.0, seed=0),
        ask(min_p=1.0, repetition_penalty=10.0, frequency_penalty=-2.0, presence_penalty=2.0, logprobs=20, n=16),
        ask(min_p=0.0, repetition_penalty=1e-30, logit_bias=((99, 100.0), (0, -100.0)), prompt_logprobs=20, n=1),
        ask(allowed_token_ids=(99,) * 65_536, banned_token_ids=(0,) * 65_536, max_tokens=6, min_tokens=6),
        ask(constraint=shape("json_schema", "a" * 65_536)),
        ask(constraint=shape("choice", *["a" * 256] * 256)),
        ask(temperature=2.0, top_p=0.001, stop=("x" * 256,) * 16, stop_token_ids=(99,) * 64, ignore_eos=True),
    ],
)
def test_the_edges_of_every_range_are_allowed(request_: Ask) -> None:
    check_ask(request_, LIMITS)


def test_a_request_must_name_a_model() -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_model("")

    assert refused.value.field == "model"


def test_a_prompt_that_fills_the_context_is_refused_with_the_numbers() -> None:
    check_length("prompt", 49, LIMITS)
    with pytest.raises(InvalidRequest, match=r"50 tokens.*50 tokens.*at most 49") as refused:
        check_length("prompt", 50, LIMITS)

    assert refused.value.reason == "CONTEXT_EXCEEDED"


def test_a_prompt_that_renders_to_nothing_is_refused() -> None:
    with pytest.raises(InvalidRequest):
        check_length("messages", 0, LIMITS)


@pytest.mark.parametrize(
    ("asked", "prompt_tokens", "granted"), [(None, 10, 1024), (None, 7900, 292), (5, 10, 5), (5000, 8000, 192)]
)
def test_max_tokens_is_what_was_asked_or_1024_within_the_context(
    asked: int | None, prompt_tokens: int, granted: int
) -> None:
    limits = Limits(vocab_size=100, max_model_len=8192)

    assert granted_max_tokens(asked, prompt_tokens, limits) == granted


def test_min_tokens_alone_lengthens_the_answer_within_the_context() -> None:
    limits = Limits(vocab_size=100, max_model_len=8192)

    assert granted_max_tokens(None, 10, limits, min_tokens=2000) == 2000
    assert granted_max_tokens(None, 8000, limits, min_tokens=2000) == 192
    assert granted_max_tokens(50, 10, limits, min_tokens=20) == 50


def test_faults_of_the_whole_prompt_are_named_after_where_it_stood() -> None:
    assert prompt_field(TextPrompt(text="x")) == prompt_field(TokenPrompt(ids=(1,))) == "prompt"
    assert prompt_field(chat("user", field="conversation.messages")) == "conversation.messages"


def test_given_sampling_wins_over_defaults_even_when_it_is_zero() -> None:
    defaults = Sampling(temperature=0.7, top_k=40, top_p=0.9, max_tokens=5, seed=1, stop=("d",), stop_token_ids=(2,))
    given = Sampling(temperature=0.0, top_k=0, seed=0, stop=("g",))

    merged = given.over(defaults)

    assert merged == Sampling(
        temperature=0.0, top_k=0, top_p=0.9, max_tokens=5, seed=0, stop=("g",), stop_token_ids=(2,)
    )
    assert Sampling().over(Sampling(ignore_eos=True)).ignore_eos
