"""The shape of a request: every refusal names the field at fault and how to mend it."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.base.errors import InvalidRequest
from headrace.gateway.core.ask import Ask, ChatPrompt, Message, Prompt, TextPrompt, TokenPrompt
from headrace.gateway.core.sampling_check import Limits, check_ids, check_sampling

ROLES = ("system", "user", "assistant")
DEFAULT_MAX_TOKENS = 1024


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
            check_ids("token_ids.ids", prompt.ids, limits)
        case ChatPrompt():
            _check_messages(prompt.field, prompt.messages, ROLES if prompt.tools is None else (*ROLES, "tool"))


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


def granted_max_tokens(asked: int | None, prompt_tokens: int, limits: Limits, *, min_tokens: int = 0) -> int:
    """The answer's length limit: what was asked (else 1024, or `min_tokens`), cut to what the context still allows."""
    room = limits.max_model_len - prompt_tokens
    return min(max(DEFAULT_MAX_TOKENS, min_tokens) if asked is None else asked, room)


def prompt_field(prompt: Prompt) -> str:
    """Where the prompt stands in its request, for refusals of the whole of it."""
    return prompt.field if isinstance(prompt, ChatPrompt) else "prompt"


def _check_messages(field: str, messages: Sequence[Message], roles: Sequence[str]) -> None:
    if not messages:
        raise InvalidRequest(field, "must hold at least one message")
    for index, message in enumerate(messages):
        if message.role not in roles:
            raise InvalidRequest(f"{field}[{index}].role", f"is {message.role!r}; use one of {', '.join(roles)}")
