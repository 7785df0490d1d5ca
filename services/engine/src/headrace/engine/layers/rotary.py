"""Rotary position embeddings (Su et al. 2021), with the two halves of a head as the pairs (the NeoX order)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.engine.models.config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """The angles of one step's rows: cosines and sines, float32 [rows, 1, head_dim / 2], times the model's factor."""

    cos: Tensor
    sin: Tensor


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """Radians per position of each pair, float32 [head_dim / 2], context extension included."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    return frequencies / torch.tensor(config.rope_divisors) if config.rope_divisors else frequencies


def rotation(positions: Tensor, frequencies: Tensor, factor: float) -> Rotation:
    """The angles at `positions` [rows]: computed per step, because a table over the context would be megabytes.

    `factor` scales what is rotated by them, as YaRN sharpens attention over long contexts.
    """
    angles = (positions.float().unsqueeze(1) * frequencies).unsqueeze(1)
    return Rotation(cos=angles.cos().mul_(factor), sin=angles.sin().mul_(factor))


def rotate(heads: Tensor, by: Rotation) -> Tensor:
    """`heads` [rows, heads, head_dim] rotated, computed in float32, in the type of `heads`."""
    first, second = heads.float().chunk(2, dim=-1)
    out = torch.empty(heads.shape)
    out_first, out_second = out.chunk(2, dim=-1)
    torch.mul(first, by.cos, out=out_first).addcmul_(second, by.sin, value=-1)
    torch.mul(second, by.cos, out=out_second).addcmul_(first, by.sin)
    return out.to(heads.dtype)
