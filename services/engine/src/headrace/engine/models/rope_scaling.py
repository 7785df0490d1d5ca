"""Context extension: every supported kind becomes one divisor per rotary frequency and one factor.

The parameters have the names they have in a config.json; the formulas are those of transformers' modeling_rope_utils,
against which tests compare them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.base.errors import StartError

KINDS = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """`divisors` of the rotary frequencies (empty: all 1), the factor on rotated values, and the context it allows."""

    divisors: tuple[float, ...] = ()
    attention_factor: float = 1.0
    max_position: int


def rope_scaling(rope: Mapping[str, Any], *, theta: float, head_dim: int, max_position: int) -> RopeScaling:
    """What the parameters `rope` mean for heads of `head_dim`; StartError names a kind that is not supported.

    "dynamic" rescales only past `max_position`, which no sequence passes here, so it is plain rotary. For "yarn" the
    context is the extended one (factor times original), as Qwen's model cards have it, if that is longer.
    """
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in KINDS:
        raise StartError(f"rotary scaling {kind!r} is not supported, only {', '.join(KINDS)}")
    if kind in ("default", "dynamic"):
        return RopeScaling(max_position=max_position)
    original = int(rope.get("original_max_position_embeddings") or max_position)
    factor = rope.get("factor") or (max_position / original if kind == "yarn" else None)
    if factor is None or not math.isfinite(factor) or factor <= 0:
        raise StartError(f"rotary scaling {kind!r} needs a positive factor, not {factor!r}")
    if kind == "linear":
        return RopeScaling(divisors=(float(factor),) * (head_dim // 2), max_position=max_position)
    if kind == "llama3":
        return RopeScaling(divisors=_llama3(rope, factor, theta, head_dim, original), max_position=max_position)
    return RopeScaling(
        divisors=_yarn(rope, factor, theta, head_dim, original),
        attention_factor=_yarn_attention_factor(rope, factor),
        max_position=max(max_position, int(factor * original)),
    )


def _llama3(
    rope: Mapping[str, Any], factor: float, theta: float, head_dim: int, original: int
) -> tuple[float, ...]:  # fmt: skip
    """1 above `high` turns within the trained context, `factor` below `low`, smooth between (Llama 3.1)."""
    low, high = rope.get("low_freq_factor"), rope.get("high_freq_factor")
    if low is None or high is None:
        raise StartError("rotary scaling 'llama3' needs low_freq_factor and high_freq_factor")
    turns = (original * theta ** (-2 * i / head_dim) / (2 * math.pi) for i in range(head_dim // 2))
    return tuple(_blend(min(max((t - low) / (high - low), 0.0), 1.0), factor) for t in turns)


def _yarn(
    rope: Mapping[str, Any], factor: float, theta: float, head_dim: int, original: int
) -> tuple[float, ...]:  # fmt: skip
    """Fast pairs are kept, slow ones stretched, a linear ramp over the pairs between (Peng et al. 2023)."""

    def pair_that_turns(times: float) -> float:
        return head_dim * math.log(original / (times * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair_that_turns(rope.get("beta_fast") or 32), pair_that_turns(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    width = last - first or 0.001
    return tuple(_blend(1 - min(max((i - first) / width, 0.0), 1.0), factor) for i in range(head_dim // 2))


def _blend(kept: float, factor: float) -> float:
    """The divisor that leaves the share `kept` of a frequency as it is and divides the rest by `factor`."""
    return 1.0 / (kept + (1.0 - kept) / factor)


def _yarn_attention_factor(rope: Mapping[str, Any], factor: float) -> float:
    given = rope.get("attention_factor")
    if given is not None:
        return float(given)
    scale, scale_all = rope.get("mscale"), rope.get("mscale_all_dim")
    if scale and scale_all:
        return _temperature(factor, scale) / _temperature(factor, scale_all)
    return _temperature(factor, 1.0)


def _temperature(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0
