"""From a checkpoint to packed arrays, one matrix at a time: no second copy of the weights is ever in memory."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.engine.kernels.cpu.library import PANEL, Pool, address
from headrace.engine.models.checkpoint import Checkpoint
from headrace.engine.packed.file import Bytes
from headrace.engine.packed.layout import Matrix, Place, matrices

Floats = NDArray[np.float32]


def pack(checkpoint: Checkpoint, precision: str, pool: Pool, data: Bytes, places: dict[str, Place]) -> None:
    """Fill `data` (zeros), whose arrays lie at `places`; StartError as Checkpoint.read_into."""
    packing = _Packing(checkpoint, pool, data, places)
    for matrix in matrices(checkpoint.config, precision):
        packing.add_matrix(matrix)
    packing.add_vectors()


class _Packing:
    def __init__(self, checkpoint: Checkpoint, pool: Pool, data: Bytes, places: dict[str, Place]) -> None:
        self._checkpoint = checkpoint
        self._pool = pool
        self._data = data
        self._places = places

    def add_matrix(self, matrix: Matrix) -> None:
        if not matrix.alternate:
            rows = np.concatenate([self._read(f"{name}.weight", (n, matrix.depth)) for name, n in matrix.parts])
            self._pack(matrix, rows, first_panel=0, step=1)
        for i, (name, count) in enumerate(matrix.parts if matrix.alternate else ()):
            rows = self._read(f"{name}.weight", (count, matrix.depth))
            self._pack(matrix, rows, first_panel=i, step=len(matrix.parts))
        if matrix.bias:
            self._add_bias(matrix)

    def add_vectors(self) -> None:
        c = self._checkpoint.config
        if not c.tied_embeddings:
            self._add_embedding()
        for i in range(c.num_layers):
            prefix = f"model.layers.{i}."
            self._floats(f"{i}.input_norm")[: c.hidden_size] = self._read(
                f"{prefix}input_layernorm.weight", (c.hidden_size,)
            )
            self._floats(f"{i}.mlp_norm")[: c.hidden_size] = self._read(
                f"{prefix}post_attention_layernorm.weight", (c.hidden_size,)
            )
            if c.qk_norm:
                heads = self._floats(f"{i}.head_norms").reshape(-1, c.head_dim)
                heads[: c.num_heads] = self._read(f"{prefix}self_attn.q_norm.weight", (c.head_dim,))
                heads[c.num_heads :] = self._read(f"{prefix}self_attn.k_norm.weight", (c.head_dim,))
        self._floats("final_norm")[: c.hidden_size] = self._read("model.norm.weight", (c.hidden_size,))

    def _add_embedding(self) -> None:
        c = self._checkpoint.config
        place = self._places["embedding"]
        target = self._data[place.offset : place.offset + place.size].view(np.int16)
        table = torch.from_numpy(target).view(torch.bfloat16).view(c.vocab_size, c.hidden_size)
        self._checkpoint.read_into("model.embed_tokens.weight", table)

    def _add_bias(self, matrix: Matrix) -> None:
        bias = self._floats(f"{matrix.name}.bias")
        parts = [self._read(f"{name}.bias", (count,)) for name, count in matrix.parts]
        if not matrix.alternate:
            bias[: sum(count for _, count in matrix.parts)] = np.concatenate(parts)
            return
        panels = bias.reshape(-1, len(parts), PANEL)
        for i, part in enumerate(parts):
            panels[:, i] = np.pad(part, (0, -len(part) % PANEL)).reshape(-1, PANEL)

    def _pack(self, matrix: Matrix, rows: Floats, *, first_panel: int, step: int) -> None:
        arrays = [self._array(f"{matrix.name}.{kind}") for kind in ("weights", "scales")]
        self._pool.library.hr_pack(
            self._pool.handle, matrix.format, address(rows), len(rows), matrix.depth, first_panel, step,
            *map(address, arrays),
        )  # fmt: skip

    def _read(self, name: str, shape: tuple[int, ...]) -> Floats:
        out = np.empty(shape, dtype=np.float32)
        self._checkpoint.read_into(name, torch.from_numpy(out))
        return out

    def _array(self, name: str) -> Bytes | None:
        place = self._places.get(name)
        return None if place is None else self._data[place.offset : place.offset + place.size]

    def _floats(self, name: str) -> Floats:
        array = self._array(name)
        assert array is not None
        return array.view(np.float32)
