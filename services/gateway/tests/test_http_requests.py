"""What a request over HTTP may be: each refusal names the field as the client wrote it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.base.errors import DeadlinePassed, Exhausted, HeadraceError, InvalidRequest, Unavailable
from headrace.gateway.core.ask import Constraint, ConstraintKind, TextPrompt, TokenPrompt
from headrace.gateway.http.errors import failure_of
from headrace.gateway.http.requests import chat_request, completion_request
from headrace.gateway.http.sampling_fields import param_of

MESSAGES = [{"role": "user", "content": "x"}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def chat(**fields: Any) -> Any:
    return chat_request(json.dumps({"model": "m", "messages": MESSAGES} | fields).encode())


def completion(**fields: Any) -> Any:
    return completion_request(json.dumps({"model": "m", "prompt": "x"} | fields).encode())


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"messages": None}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [1]}, "messages[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": "x", "name": "Ada"}]}, "messages[0].name"),
        ({"messages": [{"role": "user", "content": "x", "colour": "red"}]}, "messages[0].colour"),
        ({"messages": [{"role": "assistant"}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[]"}}]}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 10**400}, "top_p"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
        ({"top_k": 1 << 32}, "top_k"),
        ({"top_k": -2}, "top_k"),
        ({"seed": 1 << 64}, "seed"),
        ({"stop": 1}, "stop"),
        ({"stop": ["a", 1]}, "stop[1]"),
        ({"stop_token_ids": [1, -1]}, "stop_token_ids[1]"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logit_bias": {"one": 1}}, "logit_bias"),
        ({"logit_bias": {"1": "x"}}, "logit_bias.1"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": 2}, "logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"colour": 1}}, "stream_options.colour"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": 1}}},
            "response_format.json_schema.schema",
        ),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        ({"tools": "all"}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "no spaces"}}]}, "tools[0].function.name"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
        ({"tools": TOOLS, "parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"echo": True}, "echo"),
        ({"best_of": 1}, "best_of"),
    ],
)
def test_a_chat_request_is_refused_by_the_field_at_fault(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        chat(**fields)

    assert refused.value.field == field


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [[1], [2]]}, "prompt"),
        ({"prompt": [1, -1]}, "prompt[1]"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": {"text": "x"}}, "prompt"),
        ({"echo": True}, "echo"),
        ({"suffix": "y"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"logprobs": True}, "logprobs"),
        ({"messages": MESSAGES}, "messages"),
    ],
)
def test_a_completion_request_is_refused_by_the_field_at_fault(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        completion(**fields)

    assert refused.value.field == field


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'"x"', b'{"temperature": NaN}', b"\xff", b"[" * 100_000, b'{"a":' + b"1" * 5000 + b"}"]
)
def test_a_body_that_is_no_json_object_is_refused_as_a_whole(body: bytes) -> None:
    with pytest.raises(InvalidRequest) as refused:
        chat_request(body)

    assert (refused.value.field, refused.value.reason) == ("body", "MALFORMED_JSON")


def test_prompts_may_be_texts_and_token_ids_alone_or_in_a_list_of_one() -> None:
    assert completion(prompt="a").ask.prompt == completion(prompt=["a"]).ask.prompt == TextPrompt(text="a")
    assert completion(prompt=[1, 2]).ask.prompt == completion(prompt=[[1, 2]]).ask.prompt == TokenPrompt(ids=(1, 2))


def test_nulls_and_labels_ask_for_nothing() -> None:
    labels = {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "prompt_cache_key": "k"}
    nothing = dict.fromkeys(("temperature", "stop", "stream_options", "response_format", "unheard_of"))

    assert chat(**labels, **nothing, n=1, tools=[], tool_choice="none").ask == chat(n=1).ask
    assert completion(best_of=2, n=2, echo=False, suffix="").ask == completion(n=2).ask


def test_shapes_come_from_each_way_to_ask_for_one() -> None:
    def shape(**fields: Any) -> Constraint | None:
        found: Constraint | None = chat(**fields).ask.sampling.constraint
        return found

    schema = {"type": "integer"}
    wanted = Constraint(kind=ConstraintKind.JSON_SCHEMA, texts=('{"type":"integer"}',))
    official = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": schema}}
    assert shape(response_format=official) == shape(guided_json=schema) == wanted
    assert shape(guided_json='{"type":"integer"}') == wanted
    assert shape(response_format={"type": "text"}) is None
    assert shape(guided_choice=["a", "b"]) == Constraint(kind=ConstraintKind.CHOICE, texts=("a", "b"))
    anything = shape(response_format={"type": "json_object"})
    assert anything is not None
    assert json.loads(anything.texts[0]) == {"type": "object"}


def test_fields_of_the_inner_protocol_are_called_what_the_client_called_them() -> None:
    newer = chat(max_completion_tokens=5, logprobs=True, logit_bias={"5": 1}, guided_choice=["a"]).names
    assert param_of("sampling.max_tokens", newer) == "max_completion_tokens"
    assert param_of("sampling.logprobs", newer) == "top_logprobs"
    assert param_of("sampling.logit_bias[0].token_id", newer) == "logit_bias"
    assert param_of("sampling.constraint.choice.texts[2]", newer) == "guided_choice[2]"
    assert param_of("sampling.top_p", newer) == "top_p"
    assert param_of("sampling.max_tokens", chat(max_tokens=5).names) == "max_tokens"
    assert param_of("token_ids.ids[7]", completion(prompt=[1]).names) == "prompt[7]"
    assert param_of("messages[0].role", newer) == "messages[0].role"


@pytest.mark.parametrize(
    ("error", "status", "headers"),
    [
        (Exhausted("busy", retry_after_s=0.2), 429, {"retry-after": "1", "retry-after-ms": "200"}),
        (Exhausted("larger than the limit"), 429, {"x-should-retry": "false"}),
        (Unavailable("nobody", retry_after_s=2.5), 503, {"retry-after": "3", "retry-after-ms": "2500"}),
        (Unavailable("nobody"), 503, {"retry-after": "1", "retry-after-ms": "1000"}),
        (DeadlinePassed("late"), 504, {"x-should-retry": "false"}),
        (InvalidRequest("sampling.top_p", "is \ud800"), 400, {}),
    ],
)
def test_errors_say_whether_and_when_to_try_again(error: HeadraceError, status: int, headers: dict[str, str]) -> None:
    failure = failure_of(error, {})

    assert (failure.status, dict(failure.headers)) == (status, headers)
    assert set(json.loads(failure.body)["error"]) == {"message", "type", "param", "code"}
