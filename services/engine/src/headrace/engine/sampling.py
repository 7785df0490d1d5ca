"""SamplingParams from the wire to the core's plan; the core itself refuses values out of range."""

from __future__ import annotations

import secrets

from headrace.api.common.v1.sampling_pb2 import SamplingParams
from headrace.engine.core.sampling_plan import SamplingPlan


def plan_of(params: SamplingParams, *, default_max_tokens: int) -> SamplingPlan:
    """Fill in every default; a missing seed is drawn."""
    return SamplingPlan(
        max_tokens=params.max_tokens if params.HasField("max_tokens") else default_max_tokens,
        temperature=params.temperature if params.HasField("temperature") else 0.0,
        top_k=params.top_k,
        top_p=params.top_p if params.HasField("top_p") else 1.0,
        seed=params.seed if params.HasField("seed") else secrets.randbits(63),
        stop_token_ids=frozenset(params.stop_token_ids),
        ignore_eos=params.ignore_eos,
    )
