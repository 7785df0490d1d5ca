"""From logits to tokens: every row on its own, every draw a pure function of (seed, position, token).

A draw adds Gumbel noise to the scaled logits and takes the largest (the Gumbel-max trick: an exact sample from the
softmax). Noise is a hash, not a generator's next number, so neither the batch nor a preemption nor a migration can
change an answer. It is hashed only for the tokens that top_k and top_p keep, and the vocabulary is never sorted: on 2
cores full-vocabulary noise of torch's generator takes 30 ms per step of 32 rows, and a sort 65 ms.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from headrace.engine.core.sampling_plan import SamplingPlan

# Below this, scaled logits would leave float32; the answer is greedy long before.
LEAST_TEMPERATURE = 1e-6
# top_p looks at this many of the likeliest tokens, then at 8 times as many, until they hold its mass.
FIRST_NUCLEUS = 128

_MASK64 = (1 << 64) - 1
Draw = tuple[SamplingPlan, int]


def sample(logits: Tensor, draws: Sequence[Draw]) -> list[int]:
    """The chosen token of each row of `logits`, float32 [rows, vocabulary].

    ``draws[i]`` is row i's plan and the absolute position in its sequence that the token will take. Among equal
    greedy logits the lowest token id wins. Temperature comes first, then top_k, then top_p of what top_k kept; tokens
    equal to the last one kept are kept as well.
    """
    tokens: list[int] = logits.argmax(dim=-1).tolist()
    for row, (plan, position) in enumerate(draws):
        if plan.temperature > 0 and plan.top_k != 1:
            tokens[row] = _draw(logits[row], plan, position)
    return tokens


def gumbel(seed: int, position: int, tokens: NDArray[np.uint32]) -> NDArray[np.float32]:
    """Standard Gumbel noise for `tokens` at `position`, a pure function of the three.

    32 hashed bits give a uniform v in (0, 1); -log1p(-v) is then exponential, and exact where v is small. So the
    large noise values, which let unlikely tokens win, keep all 32 bits: up to 22.9 instead of float32's 16.6
    (vllm#43150).
    """
    key = _mix64(_mix64(seed & _MASK64) ^ (position & _MASK64))
    bits = _mix32(_mix32(tokens * np.uint32(0x9E3779B1) ^ np.uint32(key >> 32)) ^ np.uint32(key & 0xFFFFFFFF))
    uniform = (bits.astype(np.float64) + 0.5) * 2.0**-32
    noise: NDArray[np.float32] = (-np.log(-np.log1p(-uniform))).astype(np.float32)
    return noise


def _draw(row: Tensor, plan: SamplingPlan, position: int) -> int:
    scaled = (row - row.max()) / max(plan.temperature, LEAST_TEMPERATURE)  # at most 0: nothing can overflow
    least = _least_kept(scaled, plan)
    if least is None:
        noise = gumbel(plan.seed, position, np.arange(len(row), dtype=np.uint32))
        return int((scaled.numpy() + noise).argmax())
    kept = (scaled >= least).nonzero().squeeze(1)
    noise = gumbel(plan.seed, position, kept.numpy().astype(np.uint32))
    return int(kept[int((scaled[kept].numpy() + noise).argmax())])


def _least_kept(scaled: Tensor, plan: SamplingPlan) -> float | None:
    """The lowest scaled logit that top_k and top_p keep; None when they keep every token."""
    limited = 0 < plan.top_k < len(scaled)
    if plan.top_p >= 1:
        return float(scaled.topk(plan.top_k).values[-1]) if limited else None
    if limited:
        return _nucleus_end(scaled.topk(plan.top_k).values, plan.top_p, log_mass=None)
    log_mass = float(scaled.logsumexp(0))
    width = FIRST_NUCLEUS
    while width < len(scaled):
        least = _nucleus_end(scaled.topk(width).values, plan.top_p, log_mass)
        if least is not None:
            return least
        width *= 8
    return _nucleus_end(scaled.topk(len(scaled)).values, plan.top_p, log_mass)


def _nucleus_end(likeliest: Tensor, top_p: float, log_mass: float | None) -> float | None:
    """The last of `likeliest` (descending) in the smallest set of mass `top_p`; None when they hold less than that.

    `log_mass` is that of the whole distribution; None makes `likeliest` the whole of it.
    """
    total = float(likeliest.logsumexp(0)) if log_mass is None else log_mass
    # float64, since float32 sums over a whole vocabulary lose the tail that top_p near 1 asks about.
    reached = (likeliest.double() - total).exp().cumsum(0)
    before = int((reached < top_p).sum())
    if before < len(likeliest):
        return float(likeliest[before])
    return float(likeliest[-1]) if log_mass is None else None


def _mix64(x: int) -> int:
    """Sebastiano Vigna's splitmix64 step."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK64
    return x ^ (x >> 31)


def _mix32(x: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Austin Appleby's MurmurHash3 finaliser; products wrap around, as they should."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))
