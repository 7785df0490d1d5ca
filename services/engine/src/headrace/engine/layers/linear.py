"""Matrix products with weights stored as rows of outputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

# Up to this many rows MKL's float32 product reads the weights at memory speed when the activations are the transposed
# side, and at a quarter of it the other way round: all linears of the 135M model take 13 instead of 50 ms at 2 to 4
# rows and 31 instead of 44 at 8 (2 Zen 4 cores, torch 2.13); from 10 rows on there is no difference to rely on.
SKINNY_ROWS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """A linear layer: `weight` [out, in] and, in the models that have one, `bias` [out]."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """``x @ weight.T + bias`` for x [rows, in]; [rows, out]."""
        if self.bias is None:
            return linear(x, self.weight)
        return linear(x, self.weight).add_(self.bias)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight.T`` for x [rows, in] and weight [out, in]; [rows, out], newly allocated."""
    rows = x.shape[0]
    if x.dtype != torch.float32 or rows > SKINNY_ROWS:
        return F.linear(x, weight)
    if rows == 1:  # two equal rows take 13 ms, one (a matrix-vector product) 32
        return torch.mm(weight, x.repeat(2, 1).t())[:, 0].unsqueeze(0)
    return torch.mm(weight, x.t()).t().contiguous()
