"""The shape of a request: every refusal names the field at fault and how to mend it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.base.errors import InvalidRequest
from headrace.gateway.core.ask import Ask, ChatPrompt, Message, Prompt, Sampling, TextPrompt, TokenPrompt
from headrace.text.stop import validate_stops

ROLES = ("system", "user", "assistant")
MAX_STOP_TOKEN_IDS = 64
MAX_TEMPERATURE = 2.0
DEFAULT_MAX_TOKENS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a model can take: ids below `vocab_size`, at most `max_model_len` tokens of prompt and answer together."""

    vocab_size: int
    max_model_len: int


def check_model(model: str) -> None:
    """Refuse a request that names no model."""
    if not model:
        raise InvalidRequest("model", "must name a deployment; ListModels shows those this key may use")


def check_ask(ask: Ask, limits: Limits) -> None:
    """Refuse whatever can be refused before the prompt is tokenized."""
    check_prompt(ask.prompt, limits)
    check_sampling(ask.sampling, limits)


def check_prompt(prompt: Prompt, limits: Limits) -> None:
    """Refuse an empty prompt, unknown roles and ids beyond the vocabulary."""
    match prompt:
        case TextPrompt():
            if not prompt.text:
                raise InvalidRequest("prompt", "must not be empty")
        case TokenPrompt():
            if not prompt.ids:
                raise InvalidRequest("prompt", "must not be empty: token_ids.ids holds no token")
            check_length("prompt", len(prompt.ids), limits)
            _check_ids("token_ids.ids", prompt.ids, limits)
        case ChatPrompt():
            _check_messages(prompt.field, prompt.messages)


def check_sampling(sampling: Sampling, limits: Limits, *, field: str = "sampling") -> None:
    """Refuse values out of their documented range; not-a-number is out of every range."""
    if sampling.max_tokens is not None and sampling.max_tokens < 1:
        raise InvalidRequest(f"{field}.max_tokens", "must be at least 1")
    if sampling.temperature is not None and not 0.0 <= sampling.temperature <= MAX_TEMPERATURE:
        raise InvalidRequest(f"{field}.temperature", f"must be from 0 (greedy) to {MAX_TEMPERATURE:g}")
    if sampling.top_p is not None and not 0.0 < sampling.top_p <= 1.0:
        raise InvalidRequest(f"{field}.top_p", "must be above 0 and at most 1")
    validate_stops(sampling.stop, field=f"{field}.stop")
    if len(sampling.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest(f"{field}.stop_token_ids", f"holds more than {MAX_STOP_TOKEN_IDS} ids")
    _check_ids(f"{field}.stop_token_ids", sampling.stop_token_ids, limits)


def check_length(field: str, prompt_tokens: int, limits: Limits) -> None:
    """Refuse a rendered prompt that is empty or leaves no room for one token of answer."""
    if prompt_tokens == 0:
        raise InvalidRequest(field, "must not be empty: it holds no token")
    if prompt_tokens >= limits.max_model_len:
        raise InvalidRequest(
            field,
            f"has {prompt_tokens} tokens, but the context holds {limits.max_model_len} tokens of prompt and answer "
            f"together; use at most {limits.max_model_len - 1}",
            reason="CONTEXT_EXCEEDED",
        )


def granted_max_tokens(asked: int | None, prompt_tokens: int, limits: Limits) -> int:
    """The answer's length limit: what was asked, or 1024, but never more than the context still allows."""
    room = limits.max_model_len - prompt_tokens
    return min(DEFAULT_MAX_TOKENS if asked is None else asked, room)


def prompt_field(prompt: Prompt) -> str:
    """Where the prompt stands in its request, for refusals of the whole of it."""
    return prompt.field if isinstance(prompt, ChatPrompt) else "prompt"


def _check_ids(field: str, ids: Sequence[int], limits: Limits) -> None:
    for index, token_id in enumerate(ids):
        if token_id >= limits.vocab_size:
            raise InvalidRequest(
                f"{field}[{index}]", f"is {token_id}, but the vocabulary has {limits.vocab_size} tokens, from 0"
            )


def _check_messages(field: str, messages: Sequence[Message]) -> None:
    if not messages:
        raise InvalidRequest(field, "must hold at least one message")
    for index, message in enumerate(messages):
        if message.role not in ROLES:
            raise InvalidRequest(f"{field}[{index}].role", f"is {message.role!r}; use one of {', '.join(ROLES)}")
