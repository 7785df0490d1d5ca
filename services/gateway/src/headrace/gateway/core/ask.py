"""What a client asks for, in the gateway's own words."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

from headrace.gateway.core.principal import Priority
from headrace.text.tool_calls import ToolCall


class ConstraintKind(Enum):
    """What a constraint's text is, by the protocol's names."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """The shape an answer must have: one text, or for CHOICE the allowed texts; `kind` None when none was given."""

    kind: ConstraintKind | None
    texts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How to sample and when to stop; None and empty mean "the deployment's default"."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    banned_token_ids: tuple[int, ...] = ()
    min_tokens: int | None = None
    n: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    constraint: Constraint | None = None

    def over(self, defaults: Sampling) -> Sampling:
        """These values where given, else those of `defaults`."""
        chosen: dict[str, Any] = {}
        for name in (f.name for f in fields(self)):
            mine = getattr(self, name)
            absent = mine is None or mine is False or mine == ()
            chosen[name] = getattr(defaults, name) if absent else mine
        return Sampling(**chosen)


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPrompt:
    """A prompt as text; special tokens in it stay text."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPrompt:
    """A prompt as token ids."""

    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """A conversation, rendered with the model's template; `field` is where it stood in the request.

    `tools` are those the model may call, each as OpenAI's JSON; None where the way of asking knows of no tools.
    """

    messages: tuple[Message, ...]
    field: str = "messages"
    tools: tuple[str, ...] | None = None


Prompt = TextPrompt | TokenPrompt | ChatPrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request for an answer.

    `fallback` is what the way of asking means where the deployment has no default. Without a `priority` it has its
    credential's own.
    """

    model: str
    prompt: Prompt
    sampling: Sampling
    fallback: Sampling = Sampling()
    priority: Priority | None = None
