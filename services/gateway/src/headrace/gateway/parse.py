"""Requests from protobuf to the gateway's own types."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from headrace.api.common.v1 import sampling_pb2
from headrace.api.inference.v1 import inference_service_pb2 as pb
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
from headrace.gateway.core.principal import Priority

_PRIORITIES = {
    pb.PRIORITY_UNSPECIFIED: None,
    pb.PRIORITY_BATCH: Priority.BATCH,
    pb.PRIORITY_STANDARD: Priority.STANDARD,
    pb.PRIORITY_INTERACTIVE: Priority.INTERACTIVE,
}


def generate_ask(request: pb.GenerateRequest) -> Ask:
    """What Generate asks for; InvalidRequest when it has no prompt."""
    prompt: Prompt
    match request.WhichOneof("prompt"):
        case "text":
            prompt = TextPrompt(text=request.text)
        case "token_ids":
            prompt = TokenPrompt(ids=tuple(request.token_ids.ids))
        case _:
            raise InvalidRequest("prompt", "must be given: set text or token_ids")
    return Ask(
        model=request.model,
        prompt=prompt,
        sampling=sampling_of(request.sampling),
        priority=_priority(request.priority),
    )


def chat_ask(request: pb.ChatRequest) -> Ask:
    """What Chat asks for."""
    prompt = ChatPrompt(messages=_messages(request.messages))
    return Ask(
        model=request.model,
        prompt=prompt,
        sampling=sampling_of(request.sampling),
        priority=_priority(request.priority),
    )


def _priority(wanted: pb.Priority.ValueType) -> Priority | None:
    try:
        return _PRIORITIES[wanted]
    except KeyError:
        raise InvalidRequest("priority", f"{int(wanted)} is no priority that this gateway knows") from None


def countable_prompt(request: pb.CountTokensRequest) -> Prompt:
    """What is to be counted; InvalidRequest when there is nothing."""
    match request.WhichOneof("input"):
        case "text":
            return TextPrompt(text=request.text)
        case "conversation":
            messages = _messages(request.conversation.messages)
            return ChatPrompt(messages=messages, field="conversation.messages")
        case _:
            raise InvalidRequest("input", "must be given: set text or conversation")


def sampling_of(params: sampling_pb2.SamplingParams) -> Sampling:
    """The sampling fields that were given."""

    def given(name: str) -> Any:
        return getattr(params, name) if params.HasField(name) else None  # type: ignore[arg-type]  # it wants literals

    return Sampling(
        max_tokens=given("max_tokens"),
        temperature=given("temperature"),
        top_k=given("top_k"),
        top_p=given("top_p"),
        seed=given("seed"),
        stop=tuple(params.stop),
        stop_token_ids=tuple(params.stop_token_ids),
        ignore_eos=params.ignore_eos,
        min_p=given("min_p"),
        repetition_penalty=given("repetition_penalty"),
        frequency_penalty=given("frequency_penalty"),
        presence_penalty=given("presence_penalty"),
        logit_bias=tuple((entry.token_id, entry.bias) for entry in params.logit_bias),
        allowed_token_ids=tuple(params.allowed_token_ids),
        banned_token_ids=tuple(params.banned_token_ids),
        min_tokens=given("min_tokens"),
        n=given("n"),
        logprobs=given("logprobs"),
        prompt_logprobs=given("prompt_logprobs"),
        constraint=_constraint_of(params.constraint) if params.HasField("constraint") else None,
    )


def _constraint_of(constraint: sampling_pb2.Constraint) -> Constraint:
    match constraint.WhichOneof("shape"):
        case "json_schema":
            return Constraint(kind=ConstraintKind.JSON_SCHEMA, texts=(constraint.json_schema,))
        case "regex":
            return Constraint(kind=ConstraintKind.REGEX, texts=(constraint.regex,))
        case "choice":
            return Constraint(kind=ConstraintKind.CHOICE, texts=tuple(constraint.choice.texts))
    return Constraint(kind=None)


def _messages(messages: Iterable[pb.ChatMessage]) -> tuple[Message, ...]:
    return tuple(Message(role=message.role, content=message.content) for message in messages)
