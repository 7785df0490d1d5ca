"""Root mean square normalisation (Zhang and Sennrich 2019)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Each row of x [rows, hidden] scaled to a root mean square of one, then by `weight`; statistics in float32."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def head_norm(heads: Tensor, weights: Tensor, eps: float) -> Tensor:
    """Each head of `heads` [rows, heads, head_dim] scaled to one, then by its row of `weights` [heads, head_dim]."""
    return F.rms_norm(heads, (heads.shape[-1],), None, eps) * weights
