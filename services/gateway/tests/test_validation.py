"""The shape of requests, without a wire: each refusal names its field."""

from __future__ import annotations

import math
from typing import Any

import pytest

from headrace.base.errors import InvalidRequest
from headrace.gateway.core.ask import Ask, ChatPrompt, Message, Prompt, Sampling, TextPrompt, TokenPrompt
from headrace.gateway.core.validation import (
    Limits,
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
