"""What the worker asks of a model: one call per step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.engine.core.sampling_plan import SamplingPlan
from headrace.engine.core.step import Computed, SequenceSlice

__all__ = ["Backend", "Computed", "SamplingPlan", "SequenceSlice", "TokenMask"]

TokenMask = NDArray[np.int32]
"""Bit t % 32 of word t // 32 is set when token t is allowed; ceil(vocabulary / 32) words."""


class Backend(Protocol):
    """A model with its KV cache. Only the worker's single thread calls it.

    A backend raises StartError when it cannot be made (a missing file, too little memory for one block); any other
    exception, then or later, ends the worker.
    """

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end an answer unless the plan ignores them."""

    @property
    def max_model_len(self) -> int:
        """Longest sequence in tokens, prompt and answer together, that the model can compute."""

    @property
    def num_blocks(self) -> int:
        """KV blocks that `kv_cache_memory_bytes` pays for, at least 1; block ids are 0 to num_blocks - 1."""

    def warm_up(self) -> None:
        """Run everything once that is slow the first time. The KV cache's content does not matter yet."""

    def execute(self, slices: Sequence[SequenceSlice], masks: Mapping[int, TokenMask]) -> list[Computed]:
        """Compute the slices: one result per slice, in their order; it holds a token where the slice samples.

        Where a slice ends with guesses it holds one more token for each guess that came true (see Computed), the same
        ones that steps without guesses would have brought.
        `masks` are the tokens that grammars allow next, by sequence id, for some of the slices that sample. The result
        is a function of each slice and its mask alone: never of its neighbours, nor of where chunks were cut.
        """

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy the keys and values of block ``pairs[i][0]`` to block ``pairs[i][1]``, before the next `execute`."""
