"""Where weights come from, whatever the file format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from headrace.engine.models.config import ModelConfig


class Checkpoint(Protocol):
    """An open model file or folder. Weights go by their Hugging Face names."""

    @property
    def config(self) -> ModelConfig:
        """The model's shape."""

    def read_into(self, name: str, out: Tensor) -> None:
        """Fill `out` (contiguous, float32 or bfloat16) with the weight `name`, converted to its type.

        Rows of query and key projections are in Hugging Face order, rotary halves apart. StartError when the weight
        is missing, has another shape, or is stored in a type that is not supported.
        """

    def unread(self) -> Sequence[str]:
        """Weights, by the file's own names, that nobody has read although the answer depends on them."""
