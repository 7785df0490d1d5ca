"""The range of every sampling field: a refusal names the field, and the entry in it, at fault."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.base.errors import InvalidRequest
from headrace.base.sampling_limit import (
    MAX_ANSWERS,
    MAX_BIAS,
    MAX_BIASES,
    MAX_CHOICE_BYTES,
    MAX_CHOICES,
    MAX_JSON_SCHEMA_BYTES,
    MAX_LISTED_TOKENS,
    MAX_LOGPROBS,
    MAX_REGEX_BYTES,
    MAX_STOP_TOKEN_IDS,
)
from headrace.gateway.core.ask import Constraint, ConstraintKind, Sampling
from headrace.text.stop import validate_stops

MAX_CONSTRAINT_BYTES = {
    ConstraintKind.JSON_SCHEMA: MAX_JSON_SCHEMA_BYTES,
    ConstraintKind.REGEX: MAX_REGEX_BYTES,
    ConstraintKind.CHOICE: MAX_CHOICE_BYTES,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a model can take: ids below `vocab_size`, at most `max_model_len` tokens of prompt and answer together."""

    vocab_size: int
    max_model_len: int


def check_sampling(sampling: Sampling, limits: Limits, *, field: str = "sampling") -> None:
    """Refuse values out of their documented range; not-a-number is out of every range."""
    for name, holds, why in _tests(sampling):
        if not holds:
            raise InvalidRequest(f"{field}.{name}", why)
    validate_stops(sampling.stop, field=f"{field}.stop")
    check_ids(f"{field}.stop_token_ids", sampling.stop_token_ids, limits, most=MAX_STOP_TOKEN_IDS)
    check_ids(f"{field}.allowed_token_ids", sampling.allowed_token_ids, limits, most=MAX_LISTED_TOKENS)
    check_ids(f"{field}.banned_token_ids", sampling.banned_token_ids, limits, most=MAX_LISTED_TOKENS)
    if sampling.allowed_token_ids and set(sampling.allowed_token_ids) <= set(sampling.banned_token_ids):
        raise InvalidRequest(f"{field}.allowed_token_ids", "leaves no token: each is banned, too")
    _check_bias(f"{field}.logit_bias", sampling.logit_bias, limits)
    if sampling.constraint is not None:
        _check_constraint(f"{field}.constraint", sampling.constraint)


def check_ids(field: str, ids: Sequence[int], limits: Limits, *, most: int | None = None) -> None:
    """Refuse ids beyond the vocabulary, by their place, and more of them than `most`."""
    if most is not None and len(ids) > most:
        raise InvalidRequest(field, f"holds {len(ids)} ids; at most {most} are allowed")
    if ids and max(ids) >= limits.vocab_size:  # in C; the slow search is only for lists that have a culprit
        index = next(index for index, token_id in enumerate(ids) if token_id >= limits.vocab_size)
        raise _beyond(f"{field}[{index}]", ids[index], limits)


def _tests(sampling: Sampling) -> Sequence[tuple[str, bool, str]]:
    """Field, whether its value is absent or good, and what a good one is. Written so that NaN fails every test."""
    s = sampling
    most = MAX_LOGPROBS
    return (
        ("max_tokens", s.max_tokens is None or s.max_tokens >= 1, "must be at least 1"),
        ("temperature", s.temperature is None or 0.0 <= s.temperature <= 2.0, "must be from 0 (greedy) to 2"),
        ("top_p", s.top_p is None or 0.0 < s.top_p <= 1.0, "must be above 0 and at most 1"),
        ("min_p", s.min_p is None or 0.0 <= s.min_p <= 1.0, "must be from 0 to 1"),
        (
            "repetition_penalty",
            s.repetition_penalty is None or 0.0 < s.repetition_penalty <= 10.0,
            "must be above 0 and at most 10",
        ),
        ("frequency_penalty", _within_2(s.frequency_penalty), "must be from -2 to 2"),
        ("presence_penalty", _within_2(s.presence_penalty), "must be from -2 to 2"),
        ("min_tokens", _ordered(s.min_tokens, s.max_tokens), f"must be at most max_tokens, {s.max_tokens}"),
        ("n", s.n is None or 1 <= s.n <= MAX_ANSWERS, f"must be from 1 to {MAX_ANSWERS}"),
        ("logprobs", s.logprobs is None or 0 <= s.logprobs <= most, f"must be from 0 to {most}"),
        ("prompt_logprobs", s.prompt_logprobs is None or 0 <= s.prompt_logprobs <= most, f"must be from 0 to {most}"),
    )


def _within_2(value: float | None) -> bool:
    return value is None or -2.0 <= value <= 2.0


def _ordered(least: int | None, most: int | None) -> bool:
    return least is None or most is None or least <= most


def _check_bias(field: str, entries: Sequence[tuple[int, float]], limits: Limits) -> None:
    if len(entries) > MAX_BIASES:
        raise InvalidRequest(field, f"holds {len(entries)} entries; at most {MAX_BIASES} are allowed")
    seen: set[int] = set()
    for index, (token_id, bias) in enumerate(entries):
        if token_id >= limits.vocab_size:
            raise _beyond(f"{field}[{index}].token_id", token_id, limits)
        if token_id in seen:
            raise InvalidRequest(f"{field}[{index}].token_id", f"{token_id} is listed twice")
        if not -MAX_BIAS <= bias <= MAX_BIAS:
            raise InvalidRequest(f"{field}[{index}].bias", f"must be from -{MAX_BIAS:g} to {MAX_BIAS:g}")
        seen.add(token_id)


def _check_constraint(field: str, constraint: Constraint) -> None:
    """Refuse what cannot be a constraint by its shape; whether it compiles is the engine's to say."""
    kind, texts = constraint.kind, constraint.texts
    if kind is None:
        raise InvalidRequest(field, "must be one of json_schema, regex and choice")
    field = f"{field}.{kind.value}"
    if kind is ConstraintKind.CHOICE:
        field = f"{field}.texts"
        if not 1 <= len(texts) <= MAX_CHOICES:
            raise InvalidRequest(field, f"must hold 1 to {MAX_CHOICES} texts")
    for index, text in enumerate(texts):
        if not text:
            raise InvalidRequest(f"{field}[{index}]" if kind is ConstraintKind.CHOICE else field, "must not be empty")
    most = MAX_CONSTRAINT_BYTES[kind]
    if sum(len(text.encode()) for text in texts) > most:
        raise InvalidRequest(field, f"must be at most {most} bytes")


def _beyond(field: str, token_id: int, limits: Limits) -> InvalidRequest:
    return InvalidRequest(field, f"is {token_id}, but the vocabulary has {limits.vocab_size} tokens, from 0")
