"""Noise as a hash of (seed, position, token): no generator, so nothing that ran before can change a draw.

Measured per row of 49,152 on one core: noise for every token 0.15 ms in numpy (torch: 0.9), `loudest` 0.07 ms.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Hashes = NDArray[np.uint32]

# Tokens within this of the likeliest get their noise first; with the best of them known, hardly any other can win.
LIKELY = -4.0

_MASK64 = (1 << 64) - 1


def gumbel(seed: int, position: int, tokens: NDArray[np.uint32]) -> Floats:
    """Standard Gumbel noise for `tokens` at `position`, a pure function of the three.

    32 hashed bits give a uniform v in (0, 1); -log1p(-v) is then exponential, and exact where v is small. So the
    large noise values, which let unlikely tokens win, keep all 32 bits: up to 22.9 instead of float32's 16.6
    (vllm#43150).
    """
    return _to_gumbel(_hashes(seed, position, tokens))


def loudest(scaled: Floats, seed: int, position: int) -> int:
    """The token with the most of ``scaled + gumbel``: a draw from the softmax of `scaled` (the Gumbel-max trick).

    `scaled` [vocabulary] is at most 0 and somewhere 0. Every token is hashed, but only those get a logarithm that can
    still win: the likely ones, and those whose noise alone would lift them above the best of these.
    """
    hashes = _hashes(seed, position, np.arange(len(scaled), dtype=np.uint32))
    likely = scaled >= LIKELY
    first = likely.nonzero()[0]
    best = float((scaled[first] + _to_gumbel(hashes[first])).max())
    # noise > best - LIKELY means exactly v < 1 - exp(-exp(LIKELY - best)); a little more, for rounding.
    reach = -math.expm1(-math.exp(min(LIKELY - best, 700.0))) * 1.001
    cut = np.uint32(min(int(reach * 2.0**32) + 1, 0xFFFFFFFF))
    able = (likely | (hashes <= cut)).nonzero()[0]
    return int(able[(scaled[able] + _to_gumbel(hashes[able])).argmax()])


def _to_gumbel(hashes: Hashes) -> Floats:
    uniform = (hashes.astype(np.float64) + 0.5) * 2.0**-32
    noise: Floats = (-np.log(-np.log1p(-uniform))).astype(np.float32)
    return noise


def _hashes(seed: int, position: int, tokens: NDArray[np.uint32]) -> Hashes:
    key = _mix64(_mix64(seed & _MASK64) ^ (position & _MASK64))
    return _mix32(_mix32(tokens * np.uint32(0x9E3779B1) ^ np.uint32(key >> 32)) ^ np.uint32(key & 0xFFFFFFFF))


def _mix64(x: int) -> int:
    """Sebastiano Vigna's splitmix64 step."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK64
    return x ^ (x >> 31)


def _mix32(x: Hashes) -> Hashes:
    """Austin Appleby's MurmurHash3 finaliser; products wrap around, as they should."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))
