"""What a client asks for, in the gateway's own words."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


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
    """A conversation, rendered with the model's template; `field` is where it stood in the request."""

    messages: tuple[Message, ...]
    field: str = "messages"


Prompt = TextPrompt | TokenPrompt | ChatPrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request for an answer."""

    model: str
    prompt: Prompt
    sampling: Sampling
