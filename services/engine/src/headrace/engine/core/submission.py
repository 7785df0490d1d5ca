"""What may enter the engine: anything a client can send is served or refused with the field at fault."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from headrace.base.sampling_limit import (
    MAX_BIASES,
    MAX_CHOICE_BYTES,
    MAX_CHOICES,
    MAX_JSON_SCHEMA_BYTES,
    MAX_LISTED_TOKENS,
    MAX_LOGPROBS,
    MAX_REGEX_BYTES,
    MAX_STOP_TOKEN_IDS,
)
from headrace.engine.core.finish import ErrorReason, Problem
from headrace.engine.core.sampling_plan import ConstraintKind, ConstraintSpec, SamplingPlan

# Log-probabilities of one prompt leave in one message: at most about 3 MB of it.
MAX_PROMPT_LIKELIHOODS = 1 << 18
MAX_CONSTRAINT_BYTES = {
    ConstraintKind.JSON_SCHEMA: MAX_JSON_SCHEMA_BYTES,
    ConstraintKind.REGEX: MAX_REGEX_BYTES,
    ConstraintKind.CHOICE: MAX_CHOICE_BYTES,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """What the model can take: ids below `vocab_size`, sequences of at most `max_model_len` tokens."""

    vocab_size: int
    max_model_len: int


def examine(
    token_ids: Sequence[int], plan: SamplingPlan, limits: ModelLimits, *, emitted_tokens: int = 0
) -> SamplingPlan | Problem:
    """The plan with `max_tokens` capped to what the context leaves after `token_ids`, or what is wrong.

    The last `emitted_tokens` of `token_ids` are answer already; `max_tokens` counts the tokens still to come,
    `min_tokens` those of the whole answer.
    """
    problem = (
        _prompt_problem(token_ids, emitted_tokens, limits)
        or _value_problem(plan, emitted_tokens)
        or _token_list_problem(plan, limits)
        or _logprobs_problem(plan, len(token_ids) - emitted_tokens)
        or (_constraint_problem(plan.constraint) if plan.constraint else None)
    )
    if problem is not None:
        return problem
    room = limits.max_model_len - len(token_ids)
    return plan if plan.max_tokens <= room else dataclasses.replace(plan, max_tokens=room)


def _prompt_problem(token_ids: Sequence[int], emitted_tokens: int, limits: ModelLimits) -> Problem | None:
    if not token_ids:
        return Problem(reason=ErrorReason.EMPTY_PROMPT, message="the prompt has no tokens", field="token_ids")
    if len(token_ids) >= limits.max_model_len:
        return Problem(
            reason=ErrorReason.CONTEXT_EXCEEDED,
            message=f"the prompt has {len(token_ids)} tokens; "
            f"the context of {limits.max_model_len} must hold it and one token of the answer",
            field="token_ids",
        )
    if not 0 <= emitted_tokens < len(token_ids):
        return _invalid("emitted_tokens", f"must be less than the {len(token_ids)} token_ids")
    return _out_of_range(token_ids, limits, "token_ids")


def _value_problem(plan: SamplingPlan, emitted_tokens: int) -> Problem | None:
    # Written so that NaN fails every test.
    most = plan.max_tokens + emitted_tokens
    tests = (
        ("max_tokens", plan.max_tokens >= 1, "must be at least 1"),
        ("temperature", 0.0 <= plan.temperature <= 2.0, "must be from 0 to 2"),
        ("top_k", plan.top_k >= 0, "must be at least 0"),
        ("top_p", 0.0 < plan.top_p <= 1.0, "must be above 0 and at most 1"),
        ("min_p", 0.0 <= plan.min_p <= 1.0, "must be from 0 to 1"),
        ("repetition_penalty", 0.0 < plan.repetition_penalty <= 10.0, "must be above 0 and at most 10"),
        ("frequency_penalty", -2.0 <= plan.frequency_penalty <= 2.0, "must be from -2 to 2"),
        ("presence_penalty", -2.0 <= plan.presence_penalty <= 2.0, "must be from -2 to 2"),
        ("min_tokens", 0 <= plan.min_tokens <= most, f"must be from 0 to max_tokens, {most}"),
    )
    return next((_invalid(f"sampling.{field}", why) for field, good, why in tests if not good), None)


def _token_list_problem(plan: SamplingPlan, limits: ModelLimits) -> Problem | None:
    return (
        _list_problem(plan.stop_token_ids, "sampling.stop_token_ids", MAX_STOP_TOKEN_IDS, limits)
        or _bias_problem(plan, limits)
        or _list_problem(plan.allowed_token_ids or (), "sampling.allowed_token_ids", MAX_LISTED_TOKENS, limits)
        or _list_problem(plan.banned_token_ids, "sampling.banned_token_ids", MAX_LISTED_TOKENS, limits)
        or _contradiction(plan)
    )


def _list_problem(token_ids: Collection[int], field: str, most: int, limits: ModelLimits) -> Problem | None:
    if len(token_ids) > most:
        return _invalid(field, f"holds {len(token_ids)} ids; at most {most} are allowed")
    return _out_of_range(token_ids, limits, field)


def _bias_problem(plan: SamplingPlan, limits: ModelLimits) -> Problem | None:
    field = "sampling.logit_bias"
    if len(plan.logit_bias) > MAX_BIASES:
        return _invalid(field, f"holds {len(plan.logit_bias)} entries; at most {MAX_BIASES} are allowed")
    for at, (token, bias) in enumerate(plan.logit_bias.items()):
        if not 0 <= token < limits.vocab_size:
            return _beyond(token, limits, f"{field}[{at}].token_id")
        if not -100.0 <= bias <= 100.0:
            return _invalid(f"{field}[{at}].bias", "must be from -100 to 100")
    return None


def _contradiction(plan: SamplingPlan) -> Problem | None:
    allowed = plan.allowed_token_ids
    if allowed is None or not set(allowed) <= set(plan.banned_token_ids):
        return None
    return _invalid("sampling.allowed_token_ids", "leaves no token: each is banned, too")


def _logprobs_problem(plan: SamplingPlan, prompt_tokens: int) -> Problem | None:
    for field, top in (("sampling.logprobs", plan.logprobs), ("sampling.prompt_logprobs", plan.prompt_logprobs)):
        if top is not None and not 0 <= top <= MAX_LOGPROBS:
            return _invalid(field, f"must be from 0 to {MAX_LOGPROBS}")
    if plan.prompt_logprobs is not None and prompt_tokens * (1 + plan.prompt_logprobs) > MAX_PROMPT_LIKELIHOODS:
        most = max(0, MAX_PROMPT_LIKELIHOODS // prompt_tokens - 1)
        return _invalid("sampling.prompt_logprobs", f"must be at most {most} for {prompt_tokens} tokens")
    return None


def _constraint_problem(constraint: ConstraintSpec) -> Problem | None:
    kind, texts = constraint.kind, constraint.texts
    field = f"sampling.constraint.{kind.value}"
    if kind is ConstraintKind.CHOICE:
        field = f"{field}.texts"
        if not 1 <= len(texts) <= MAX_CHOICES:
            return _invalid(field, f"must hold 1 to {MAX_CHOICES} texts")
    empty = next((at for at, text in enumerate(texts) if not text), None)
    if empty is not None:
        return _invalid(f"{field}[{empty}]" if kind is ConstraintKind.CHOICE else field, "must not be empty")
    most = MAX_CONSTRAINT_BYTES[kind]
    if sum(len(text.encode("utf-8", "surrogatepass")) for text in texts) > most:
        return _invalid(field, f"must be at most {most} bytes")
    return None


def _out_of_range(token_ids: Collection[int], limits: ModelLimits, field: str) -> Problem | None:
    # min and max run in C: the slow search for the culprit is only for lists that have one.
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < limits.vocab_size):
        return None
    at, token = next((i, t) for i, t in enumerate(token_ids) if not 0 <= t < limits.vocab_size)
    return _beyond(token, limits, f"{field}[{at}]")


def _beyond(token: int, limits: ModelLimits, field: str) -> Problem:
    return Problem(
        reason=ErrorReason.TOKEN_OUT_OF_RANGE,
        message=f"token id {token} is not below the vocabulary's size {limits.vocab_size}",
        field=field,
    )


def _invalid(field: str, why: str) -> Problem:
    return Problem(reason=ErrorReason.INVALID_FIELD, message=f"{field} {why}", field=field)
