"""Requests from protobuf to the gateway's own types."""

from __future__ import annotations

from collections.abc import Iterable

from headrace.api.common.v1 import sampling_pb2
from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.base.errors import InvalidRequest
from headrace.gateway.core.ask import Ask, ChatPrompt, Message, Prompt, Sampling, TextPrompt, TokenPrompt


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
    return Ask(model=request.model, prompt=prompt, sampling=sampling_of(request.sampling))


def chat_ask(request: pb.ChatRequest) -> Ask:
    """What Chat asks for."""
    prompt = ChatPrompt(messages=_messages(request.messages))
    return Ask(model=request.model, prompt=prompt, sampling=sampling_of(request.sampling))


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

    def given(name: str) -> bool:
        return params.HasField(name)  # type: ignore[arg-type]  # the stub wants literals

    return Sampling(
        max_tokens=params.max_tokens if given("max_tokens") else None,
        temperature=params.temperature if given("temperature") else None,
        top_k=params.top_k if given("top_k") else None,
        top_p=params.top_p if given("top_p") else None,
        seed=params.seed if given("seed") else None,
        stop=tuple(params.stop),
        stop_token_ids=tuple(params.stop_token_ids),
        ignore_eos=params.ignore_eos,
    )


def _messages(messages: Iterable[pb.ChatMessage]) -> tuple[Message, ...]:
    return tuple(Message(role=message.role, content=message.content) for message in messages)
