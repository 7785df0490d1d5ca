"""What may enter the engine: anything a client can send is served or refused with the field at fault."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.engine.core.finish import ErrorReason, Problem
from headrace.engine.core.sampling_plan import SamplingPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """What the model can take: ids below `vocab_size`, sequences of at most `max_model_len` tokens."""

    vocab_size: int
    max_model_len: int


def examine(token_ids: Sequence[int], plan: SamplingPlan, limits: ModelLimits) -> SamplingPlan | Problem:
    """The plan with `max_tokens` capped to what the context leaves after the prompt, or what is wrong."""
    problem = _prompt_problem(token_ids, limits) or _plan_problem(plan)
    if problem is not None:
        return problem
    room = limits.max_model_len - len(token_ids)
    return plan if plan.max_tokens <= room else dataclasses.replace(plan, max_tokens=room)


def _prompt_problem(token_ids: Sequence[int], limits: ModelLimits) -> Problem | None:
    if not token_ids:
        return Problem(reason=ErrorReason.EMPTY_PROMPT, message="the prompt has no tokens", field="token_ids")
    if len(token_ids) >= limits.max_model_len:
        return Problem(
            reason=ErrorReason.CONTEXT_EXCEEDED,
            message=f"the prompt has {len(token_ids)} tokens; "
            f"the context of {limits.max_model_len} must hold it and one token of the answer",
            field="token_ids",
        )
    # min and max run in C: the slow search for the culprit is only for prompts that have one.
    if min(token_ids) < 0 or max(token_ids) >= limits.vocab_size:
        at, token = next((i, t) for i, t in enumerate(token_ids) if not 0 <= t < limits.vocab_size)
        return Problem(
            reason=ErrorReason.TOKEN_OUT_OF_RANGE,
            message=f"token id {token} is not below the vocabulary's size {limits.vocab_size}",
            field=f"token_ids[{at}]",
        )
    return None


def _plan_problem(plan: SamplingPlan) -> Problem | None:
    # Written so that NaN fails every test.
    if not plan.max_tokens >= 1:
        return _invalid("sampling.max_tokens", "must be at least 1")
    if not 0.0 <= plan.temperature <= 2.0:
        return _invalid("sampling.temperature", "must be from 0 to 2")
    if not 0.0 < plan.top_p <= 1.0:
        return _invalid("sampling.top_p", "must be above 0 and at most 1")
    if not plan.top_k >= 0:
        return _invalid("sampling.top_k", "must be at least 0")
    return None


def _invalid(field: str, why: str) -> Problem:
    return Problem(reason=ErrorReason.INVALID_FIELD, message=f"{field} {why}", field=field)
