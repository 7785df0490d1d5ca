"""A packed model with its KV cache, as one object that computes a step in one call."""

from __future__ import annotations

import ctypes
import mmap
from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headrace.engine.core.step import SequenceSlice
from headrace.engine.kernels.cpu.library import BATCH, Batch, KvFormat, Layer, Linear, ModelSpec, Pool, address
from headrace.engine.packed.file import PackedModel
from headrace.engine.packed.layout import Matrix, matrices

Floats = NDArray[np.float32]


class NativeModel:
    """Weights, KV cache and working memory. Only one thread may use it at a time."""

    def __init__(
        self, model: PackedModel, pool: Pool, *, block_size: int, num_blocks: int, kv_format: KvFormat
    ) -> None:  # fmt: skip
        self.config = model.config
        self._pool = pool
        self._library = pool.library
        self._block_size = block_size
        self._model = model  # the library reads its arrays
        self._kv_format = kv_format
        cache_bytes = block_bytes(model, pool, block_size, kv_format) * num_blocks
        self._cache = mmap.mmap(-1, cache_bytes)  # zeros, which become memory when they are first written
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._cache.madvise(mmap.MADV_HUGEPAGE)
        self._frequencies = _inverse_frequencies(model)
        self._layers = self._make_layers()
        self._handle = self._library.hr_model_create(pool.handle, ctypes.byref(self._make_spec(num_blocks)))
        # Made once: between two calls one core waits for this one, and Python's code is not in its caches.
        self._batch = Batch()
        self._batch_at = ctypes.byref(self._batch)
        self._best = (ctypes.c_int32 * 64)()
        self._best_at = ctypes.addressof(self._best)
        self._no_logits = np.empty((0, self.config.vocab_size), dtype=np.float32)

    def close(self) -> None:
        """Free the working memory. The model must not be used any more."""
        self._library.hr_model_destroy(self._handle)

    def step(
        self, slices: Sequence[SequenceSlice], head_rows: Sequence[int], logits_rows: Sequence[int]
    ) -> tuple[list[int], Floats]:
        """Compute `slices`; the likeliest tokens after `head_rows` (-1: no numbers), and the logits asked for.

        ``logits_rows[i]`` is the row of the result that the logits after ``head_rows[i]`` go to, -1 for none.
        """
        tokens: list[int] = []
        positions: list[int] = []
        first_row = [0]
        tables = array("i")
        table_start: list[int] = []
        for piece in slices:
            start, token_ids, table = piece.start, piece.token_ids, piece.block_table
            end = start + len(token_ids)
            tokens += token_ids
            positions += (start,) if end - start == 1 else range(start, end)
            first_row.append(len(tokens))
            table_start.append(len(tables))
            blocks = -(-end // self._block_size)
            tables.extend(table if blocks == len(table) else table[:blocks])
        wanted = len(logits_rows) - logits_rows.count(-1)
        logits = np.empty((wanted, self.config.vocab_size), dtype=np.float32) if wanted else self._no_logits
        if len(head_rows) > len(self._best):
            self._best = (ctypes.c_int32 * (2 * len(head_rows)))()
            self._best_at = ctypes.addressof(self._best)
        columns = (tokens, positions, first_row, table_start, head_rows, logits_rows)
        self._call(columns, tables, len(slices), logits.ctypes.data if wanted else 0)
        return self._best[: len(head_rows)], logits

    def logits(self, rows: range) -> Floats:
        """Logits after these rows of the last step, [rows, vocabulary]."""
        wanted = np.array(rows, dtype=np.int32)
        out = np.empty((len(rows), self.config.vocab_size), dtype=np.float32)
        self._library.hr_step_logits(self._handle, address(wanted), len(rows), address(out))
        return out

    def copy_block(self, source: int, target: int) -> None:
        """Copy the keys and values of one block to another."""
        self._library.hr_copy_block(self._handle, source, target)

    def _call(self, columns: tuple[Sequence[int], ...], tables: array[int], slices: int, logits_at: int) -> None:
        """One native step; `columns` are those of hr_batch in its order, `tables` left out, in one piece of memory."""
        # One array for all of them: an array and its address cost 5 us, which the second core waits for.
        tokens, positions, first_row, table_start, head_rows, logits_rows = columns
        numbers = array("i", [*tokens, *positions, *first_row, *table_start, *head_rows, *logits_rows])
        rows = len(tokens)
        at, _ = numbers.buffer_info()
        starts_at = at + 4 * (2 * rows + slices + 1)
        heads_at = starts_at + 4 * slices
        logits_row_at = heads_at + 4 * len(head_rows)
        BATCH.pack_into(
            self._batch, 0, rows, slices, len(head_rows), 0,
            at, at + 4 * rows, at + 8 * rows, tables.buffer_info()[0], starts_at, heads_at, logits_row_at,
            logits_at, self._best_at,
        )  # fmt: skip
        self._library.hr_step(self._handle, self._batch_at)

    def _make_layers(self) -> ctypes.Array[Layer]:
        c = self.config
        packed = {matrix.name: matrix for matrix in matrices(c, self._model.precision)}
        layers = (Layer * c.num_layers)()
        for i in range(c.num_layers):
            layers[i] = Layer(
                input_norm=self._at(f"{i}.input_norm"),
                mlp_norm=self._at(f"{i}.mlp_norm"),
                head_norms=self._at(f"{i}.head_norms"),
                qkv=self._linear(packed[f"{i}.qkv"]),
                out=self._linear(packed[f"{i}.out"]),
                gate_up=self._linear(packed[f"{i}.gate_up"]),
                down=self._linear(packed[f"{i}.down"]),
                window=c.window(i) or 0,
            )
        return layers

    def _make_spec(self, num_blocks: int) -> ModelSpec:
        c = self.config
        head = next(matrix for matrix in matrices(c, self._model.precision) if matrix.name == "head")
        return ModelSpec(
            vocabulary=c.vocab_size, hidden=c.hidden_size, intermediate=c.intermediate_size, layers=c.num_layers,
            heads=c.num_heads, kv_heads=c.num_kv_heads, head_dim=c.head_dim, block_size=self._block_size,
            blocks=num_blocks, rms_eps=c.rms_eps, rope_factor=c.rope_attention_factor,
            kv_format=self._kv_format,
            frequencies=address(self._frequencies), layer=self._layers, final_norm=self._at("final_norm"),
            head=self._linear(head), embedding=self._at("embedding"),
            cache=address(np.frombuffer(self._cache, dtype=np.uint8)),
        )  # fmt: skip

    def _linear(self, matrix: Matrix) -> Linear:
        return Linear(
            format=matrix.format, columns=matrix.columns, depth=matrix.depth, panels=matrix.panels,
            weights=self._at(f"{matrix.name}.weights"), scales=self._at(f"{matrix.name}.scales"),
            bias=self._at(f"{matrix.name}.bias"),
        )  # fmt: skip

    def _at(self, name: str) -> int | None:
        return address(self._model.array(name))


def block_bytes(model: PackedModel, pool: Pool, block_size: int, kv_format: KvFormat) -> int:
    """Bytes of one block of `block_size` tokens: keys and values of all layers."""
    c = model.config
    return int(pool.library.hr_cache_bytes(kv_format, c.num_layers, 1, block_size, c.num_kv_heads, c.head_dim))


def _inverse_frequencies(model: PackedModel) -> Floats:
    """Radians per position of each rotary pair, context extension included: as layers.rotary, in float32 steps."""
    c = model.config
    exponents = np.arange(0, c.head_dim, 2, dtype=np.float32) / np.float32(c.head_dim)
    frequencies: Floats = (np.float32(1.0) / np.power(np.float32(c.rope_theta), exponents)).astype(np.float32)
    if c.rope_divisors:
        frequencies /= np.array(c.rope_divisors, dtype=np.float32)
    return frequencies
