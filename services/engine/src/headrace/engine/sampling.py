"""SamplingParams from the wire to the core's plan; the core itself refuses values out of range."""

from __future__ import annotations

import secrets

from headrace.api.common.v1.sampling_pb2 import Constraint, SamplingParams
from headrace.base.errors import InvalidRequest
from headrace.base.sampling_limit import MAX_ANSWERS
from headrace.engine.core.sampling_plan import ConstraintKind, ConstraintSpec, SamplingPlan


def plan_of(params: SamplingParams, *, default_max_tokens: int) -> SamplingPlan:
    """Fill in every default; a missing seed is drawn. InvalidRequest for what no plan can express."""
    return SamplingPlan(
        max_tokens=params.max_tokens if params.HasField("max_tokens") else default_max_tokens,
        temperature=params.temperature if params.HasField("temperature") else 0.0,
        top_k=params.top_k,
        top_p=params.top_p if params.HasField("top_p") else 1.0,
        seed=params.seed if params.HasField("seed") else secrets.randbits(63),
        stop_token_ids=tuple(params.stop_token_ids),
        ignore_eos=params.ignore_eos,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty if params.HasField("repetition_penalty") else 1.0,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        logit_bias=_bias(params),
        allowed_token_ids=tuple(params.allowed_token_ids) or None,
        banned_token_ids=tuple(params.banned_token_ids),
        min_tokens=params.min_tokens,
        logprobs=params.logprobs if params.HasField("logprobs") else None,
        prompt_logprobs=params.prompt_logprobs if params.HasField("prompt_logprobs") else None,
        constraint=_constraint(params.constraint) if params.HasField("constraint") else None,
    )


def answers_wanted(params: SamplingParams) -> int:
    """`n`, by default 1; InvalidRequest when it is out of range."""
    if not params.HasField("n"):
        return 1
    if not 1 <= params.n <= MAX_ANSWERS:
        raise InvalidRequest("sampling.n", f"must be from 1 to {MAX_ANSWERS}")
    return params.n


def _bias(params: SamplingParams) -> dict[int, float]:
    biases: dict[int, float] = {}
    for at, entry in enumerate(params.logit_bias):
        if entry.token_id in biases:
            raise InvalidRequest(f"sampling.logit_bias[{at}].token_id", f"{entry.token_id} is listed twice")
        biases[entry.token_id] = entry.bias
    return biases


def _constraint(constraint: Constraint) -> ConstraintSpec:
    match constraint.WhichOneof("shape"):
        case "json_schema":
            return ConstraintSpec(kind=ConstraintKind.JSON_SCHEMA, texts=(constraint.json_schema,))
        case "regex":
            return ConstraintSpec(kind=ConstraintKind.REGEX, texts=(constraint.regex,))
        case "choice":
            return ConstraintSpec(kind=ConstraintKind.CHOICE, texts=tuple(constraint.choice.texts))
    raise InvalidRequest("sampling.constraint", "must be one of json_schema, regex and choice")
