"""The backend on the native CPU kernels: packed weights, one call per step, no torch once the weights are packed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from headrace.base.errors import StartError
from headrace.engine.core.finish import Problem
from headrace.engine.core.sampling_plan import SamplingPlan
from headrace.engine.core.step import Computed, Logprobs, SequenceSlice
from headrace.engine.kernels.cpu.library import KvFormat, Pool, Unavailable, chosen_isa, load_library
from headrace.engine.kernels.cpu.model import NativeModel, block_bytes
from headrace.engine.layers.sampler import LEAST_TEMPERATURE, Sampler, prompt_logprobs
from headrace.engine.packed.cache import NotNative, packed_model
from headrace.engine.packed.file import PackedModel
from headrace.engine.packed.layout import FORMATS
from headrace.engine.worker.backend import TokenMask
from headrace.engine.worker.config import KvCacheDtype, WorkerConfig
from headrace.engine.worker.cores import usable_cores
from headrace.engine.worker.first_step import blocks_within, warm_up
from headrace.engine.worker.verification import Drawn, drawn, found, greedy

__all__ = ["NativeBackend", "NotNative", "load_native_backend"]

# Rows of prompt logits at a time: 12 MB for a vocabulary of 49,152.
PROMPT_ROWS = 64
TORCH_PRECISIONS = ("float32", "bfloat16")
SILENT = Computed()


def load_native_backend(config: WorkerConfig) -> NativeBackend:
    """The model that `config` names, on the native kernels; NotNative says why torch must run it.

    StartError when the model cannot be loaded, its KV memory holds no block, or torch has no such precision either.
    """
    if config.precision not in FORMATS:
        if config.kv_cache_dtype is KvCacheDtype.INT8:
            raise StartError(
                f"kv_cache_dtype=int8 needs the native CPU kernels: {config.precision} is computed by torch"
            )
        raise NotNative(f"precision {config.precision} is computed by the reference")
    try:
        library = load_library()
        pool = Pool(library, usable_cores(), chosen_isa(library))
        model = packed_model(Path(config.model), config.precision, config.block_size, pool)
    except (Unavailable, NotNative) as reason:
        if config.precision not in TORCH_PRECISIONS:
            raise StartError(f"precision={config.precision} needs the native CPU kernels: {reason}") from reason
        if config.kv_cache_dtype is KvCacheDtype.INT8:
            raise StartError(f"kv_cache_dtype=int8 needs the native CPU kernels: {reason}") from reason
        raise NotNative(f"the native CPU kernels cannot: {reason}") from reason
    return NativeBackend(model, pool, config)


class NativeBackend:
    """See Backend."""

    def __init__(self, model: PackedModel, pool: Pool, config: WorkerConfig) -> None:
        kept = KvFormat.INT8 if config.kv_cache_dtype is KvCacheDtype.INT8 else KvFormat.BF16
        self._num_blocks = blocks_within(config, block_bytes(model, pool, config.block_size, kept))
        isa, cache = pool.isa.name.lower(), ", int8 KV cache" if kept is KvFormat.INT8 else ""
        self.computes_on = f"native kernels, {model.precision}{cache}, {isa}, {pool.threads} threads"
        self._config = model.config
        self._block_size = config.block_size
        self._model = NativeModel(
            model, pool, block_size=config.block_size, num_blocks=self._num_blocks, kv_format=kept
        )  # fmt: skip
        self._sampler = Sampler(model.config.eos_ids)

    @property
    def vocab_size(self) -> int:
        """See Backend."""
        return self._config.vocab_size

    @property
    def eos_ids(self) -> frozenset[int]:
        """See Backend."""
        return self._config.eos_ids

    @property
    def max_model_len(self) -> int:
        """See Backend: the context the model was made for."""
        return self._config.max_position

    @property
    def num_blocks(self) -> int:
        """See Backend."""
        return self._num_blocks

    def warm_up(self) -> None:
        """See Backend: a prefill and a sampled decode, which bring the weights into memory."""
        warm_up(self, self._block_size)

    def execute(self, slices: Sequence[SequenceSlice], masks: Mapping[int, TokenMask]) -> list[Computed]:
        """See Backend. Results are the same to the bit across batches, chunks and thread counts."""
        if not slices:
            return []
        if not masks and all([_is_plain(piece) for piece in slices]):
            tokens, _ = self._model.step(slices, range(len(slices)), [-1] * len(slices))
            return [found(token) for token in tokens]
        return self._execute(slices, masks)

    def _execute(self, slices: Sequence[SequenceSlice], masks: Mapping[int, TokenMask]) -> list[Computed]:
        head_rows: list[int] = []
        logits_rows: list[int] = []
        likely: list[tuple[int, int]] = []  # slices that need no logits, and the first of their head rows
        draws: dict[int, Drawn] = {}
        end = logit_rows = 0
        for index, piece in enumerate(slices):
            end += len(piece.token_ids)
            if not piece.samples:
                continue
            count = 1 + piece.drafted
            if _only_likeliest(piece.plan) and piece.sequence_id not in masks:
                likely.append((index, len(head_rows)))
                logits_rows += (-1,) * count
            else:
                draws[index] = Drawn(piece=piece, row=logit_rows)
                logits_rows += range(logit_rows, logit_rows + count)
                logit_rows += count
            head_rows += range(end - count, end)
        tokens, logits = self._model.step(slices, head_rows, logits_rows)
        results = [SILENT] * len(slices)
        for index, first in likely:
            results[index] = greedy(slices[index], tokens[first : first + 1 + slices[index].drafted])
        if draws:
            sampled = drawn(self._sampler, logits, tuple(draws.values()), masks)
            for index, computed in zip(draws, sampled, strict=True):
                results[index] = computed
        if any(piece.plan.prompt_logprobs is not None for piece in slices):
            self._add_prompts(slices, results)
        return results

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See Backend."""
        for source, target in pairs:  # in order: a block may be the source of one pair and the target of a later one
            self._model.copy_block(source, target)

    def _add_prompts(self, slices: Sequence[SequenceSlice], results: list[Computed]) -> None:
        first_row = 0
        for index, piece in enumerate(slices):
            results[index] = self._with_prompt(piece, first_row, results[index])
            first_row += len(piece.token_ids)

    def _with_prompt(self, piece: SequenceSlice, first_row: int, computed: Computed) -> Computed:
        """`computed` and the log-probabilities of the prompt tokens that follow the slice's, if its plan asks for them.

        Logits are made a few rows at a time: those of 8,192 tokens would take 1.6 GB.
        """
        if piece.plan.prompt_logprobs is None or computed.problem is not None:
            return computed
        count = min(len(piece.token_ids), piece.prompt_length - 1 - piece.start)
        following = piece.known_token_ids[piece.start + 1 : piece.start + 1 + max(0, count)]
        found: list[Logprobs] = []
        for first in range(0, count, PROMPT_ROWS):
            rows = range(first_row + first, first_row + min(first + PROMPT_ROWS, count))
            part = prompt_logprobs(
                self._model.logits(rows), following[first : first + PROMPT_ROWS], piece.plan.prompt_logprobs
            )
            if isinstance(part, Problem):
                return Computed(problem=part)
            found += part
        return replace(computed, prompt_logprobs=tuple(found))


def _is_plain(piece: SequenceSlice) -> bool:
    """Whether this is the usual decode, of which nothing but the likeliest token is wanted."""
    plan = piece.plan
    return len(piece.token_ids) == 1 and piece.samples and plan.prompt_logprobs is None and _only_likeliest(plan)


def _only_likeliest(plan: SamplingPlan) -> bool:
    """Whether the plan's next token is the likeliest, whatever its logits are."""
    greedy = plan.temperature < LEAST_TEMPERATURE or plan.top_k == 1
    return greedy and plan.logprobs is None and not plan.has_rules
