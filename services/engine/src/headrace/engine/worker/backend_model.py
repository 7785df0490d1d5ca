"""The backend that runs a real model: plain torch on the CPU."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

# libgomp reads this once, when torch loads it. By default its threads spin for milliseconds at the end of each of the
# hundreds of parallel regions of a step. That is fine on an idle machine; next to one busy process on two cores a step
# of 32 sequences then goes from 0.14 to 0.6 s, with a p90 of 3.9 s. At 1000 spins it is 0.16 and 0.27 s; without any
# spinning (OMP_WAIT_POLICY=passive) the idle machine loses a third.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import numpy as np
import torch
from torch import Tensor

from headrace.engine.core.finish import Problem
from headrace.engine.core.step import Computed, Logprobs, SequenceSlice
from headrace.engine.layers.sampler import Sampler, prompt_logprobs
from headrace.engine.models.decoder import Decoder
from headrace.engine.models.loader import load_model
from headrace.engine.worker.backend import Backend, TokenMask
from headrace.engine.worker.config import WorkerConfig
from headrace.engine.worker.cores import usable_cores
from headrace.engine.worker.first_step import blocks_within, warm_up
from headrace.engine.worker.verification import Drawn, drawn

# Rows of prompt logits at a time: 12 MB for a vocabulary of 49,152.
PROMPT_ROWS = 64
SILENT = Computed()
NO_LOGITS = np.empty((0, 0), dtype=np.float32)


def load_model_backend(config: WorkerConfig) -> Backend:
    """Load the model that `config` names; StartError when it cannot be loaded or its KV memory holds no block.

    Sets this process's torch threads to the cores it may use, and flushes denormals to zero: activations near zero
    would otherwise take a hundred times as long.
    """
    # Before the first parallel operation: threads of the pool inherit the mode of the thread that starts them.
    torch.set_flush_denormal(True)
    # Conversion is memory-bound and made of many short operations: alone it takes 0.3 s with one thread and 0.2 s with
    # two, but two of them beside a busy process took up to 12 s. Starting processes are never alone.
    torch.set_num_threads(1)
    model = load_model(Path(config.model), config.precision)
    torch.set_num_threads(usable_cores())
    return ModelBackend(model, config)


class ModelBackend:
    """See Backend."""

    def __init__(self, model: Decoder, config: WorkerConfig) -> None:
        self._model = model
        self._sampler = Sampler(model.config.eos_ids)
        self._block_size = config.block_size
        self._num_blocks = blocks_within(config, block_bytes(model, config.block_size))
        self._cache = model.new_cache(self._num_blocks * config.block_size)

    @property
    def vocab_size(self) -> int:
        """See Backend."""
        return self._model.config.vocab_size

    @property
    def eos_ids(self) -> frozenset[int]:
        """See Backend."""
        return self._model.config.eos_ids

    @property
    def max_model_len(self) -> int:
        """See Backend: the context the model was made for."""
        return self._model.config.max_position

    @property
    def num_blocks(self) -> int:
        """See Backend."""
        return self._num_blocks

    def warm_up(self) -> None:
        """See Backend: a prefill, then a sampled decode, in block 0 and those after it."""
        warm_up(self, self._block_size)

    def execute(self, slices: Sequence[SequenceSlice], masks: Mapping[int, TokenMask]) -> list[Computed]:
        """See Backend. Results agree across batches and chunks up to float noise: a near-tie may fall either way."""
        if not slices:
            return []
        ends = list(accumulate(len(piece.token_ids) for piece in slices))
        rows: list[int] = []
        wanted: list[Drawn] = []
        for end, piece in zip(ends, slices, strict=True):
            if piece.samples:
                wanted.append(Drawn(piece=piece, row=len(rows)))
                rows += range(end - 1 - piece.drafted, end)
        with torch.inference_mode():
            hidden = self._model.hidden(slices, self._cache, self._block_size)
            logits = np.asarray(self._model.logits(hidden[rows])) if rows else NO_LOGITS
            sampled = iter(drawn(self._sampler, logits, wanted, masks))
            return [
                self._with_prompt(
                    piece, hidden[end - len(piece.token_ids) : end], next(sampled) if piece.samples else SILENT
                )
                for piece, end in zip(slices, ends, strict=True)
            ]

    def _with_prompt(self, piece: SequenceSlice, hidden: Tensor, computed: Computed) -> Computed:
        """`computed` and the log-probabilities of the prompt tokens that follow the slice's, if its plan asks for them.

        The slice's `hidden` are turned into logits a few rows at a time: those of 8,192 tokens would take 1.6 GB.
        """
        count = min(len(piece.token_ids), piece.prompt_length - 1 - piece.start)
        if piece.plan.prompt_logprobs is None or count <= 0 or computed.problem is not None:
            return computed
        following = piece.known_token_ids[piece.start + 1 : piece.start + 1 + count]
        found: list[Logprobs] = []
        for first in range(0, count, PROMPT_ROWS):
            rows = self._model.logits(hidden[first : min(first + PROMPT_ROWS, count)])
            part = prompt_logprobs(rows, following[first : first + PROMPT_ROWS], piece.plan.prompt_logprobs)
            if isinstance(part, Problem):
                return Computed(problem=part)
            found += part
        return replace(computed, prompt_logprobs=tuple(found))

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See Backend."""
        size = self._block_size
        for source, target in pairs:  # in order: a block may be the source of one pair and the target of a later one
            for store in (self._cache.keys, self._cache.values):
                store[:, target * size : (target + 1) * size] = store[:, source * size : (source + 1) * size]


def block_bytes(model: Decoder, block_size: int) -> int:
    """Bytes of one block of `block_size` tokens: keys and values of all layers."""
    return 2 * model.config.num_layers * model.config.kv_size * block_size * model.dtype.itemsize
