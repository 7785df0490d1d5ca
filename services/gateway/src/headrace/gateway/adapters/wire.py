"""Between an engine's messages and the gateway's own types."""

from __future__ import annotations

import math

from headrace.api.common.v1 import answer_pb2, sampling_pb2
from headrace.api.engine.v1 import engine_service_pb2 as engine_pb2
from headrace.gateway.core.ask import Constraint, ConstraintKind, Sampling
from headrace.gateway.core.step import Finish, FinishReason, SlotLogprobs, Step

_REASONS = {
    answer_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    answer_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    answer_pb2.FINISH_REASON_CANCELLED: FinishReason.CANCELLED,
    answer_pb2.FINISH_REASON_ERROR: FinishReason.ERROR,
}


def step_of(step: engine_pb2.Step) -> Step:
    """The step as it stands, true or not."""
    return Step(
        number=step.step,
        slots=list(step.slots),  # a list once: a message's field makes an object of each element it is asked for
        token_ids=list(step.token_ids),
        finishes=tuple(_finish_of(finish) for finish in step.finishes),
        logprobs=tuple(_logprobs_of(entry) for entry in step.logprobs),
    )


def params_of(
    sampling: Sampling, *, max_tokens: int, seed: int, n: int, prompt_logprobs: int | None
) -> sampling_pb2.SamplingParams:
    """What an engine is told of `sampling`; stop texts are the gateway's own business, absent values stay absent."""
    return sampling_pb2.SamplingParams(
        max_tokens=max_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        seed=seed,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        logit_bias=[sampling_pb2.LogitBias(token_id=token, bias=bias) for token, bias in sampling.logit_bias],
        allowed_token_ids=sampling.allowed_token_ids,
        banned_token_ids=sampling.banned_token_ids,
        min_tokens=sampling.min_tokens,
        n=n if n > 1 else None,
        logprobs=sampling.logprobs,
        prompt_logprobs=prompt_logprobs,
        constraint=None if sampling.constraint is None else _constraint_message(sampling.constraint),
    )


def _constraint_message(constraint: Constraint) -> sampling_pb2.Constraint:
    match constraint.kind:
        case ConstraintKind.JSON_SCHEMA:
            return sampling_pb2.Constraint(json_schema=constraint.texts[0])
        case ConstraintKind.REGEX:
            return sampling_pb2.Constraint(regex=constraint.texts[0])
        case _:
            return sampling_pb2.Constraint(choice=sampling_pb2.Choices(texts=constraint.texts))


def _finish_of(finish: engine_pb2.Finish) -> Finish:
    return Finish(
        slot=finish.slot,
        reason=_REASONS.get(finish.reason, FinishReason.UNSPECIFIED),
        error_reason=finish.error_reason,
        error_message=finish.error_message,
        error_field=finish.error_field,
        queue_ms=finish.queue_ms,
        prefill_ms=finish.prefill_ms,
        cached_tokens=finish.cached_tokens,
        prompt_logprobs=tuple(finish.prompt_logprobs),
    )


def _logprobs_of(entry: engine_pb2.SlotLogprobs) -> SlotLogprobs:
    content = entry.logprobs
    return SlotLogprobs(
        slot=entry.slot,
        token_id=content.token.token_id,
        finite=all(math.isfinite(one.logprob) for one in (content.token, *content.top)),
        content=content,
    )
