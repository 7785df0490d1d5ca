"""A decoder's weights in memory, read from a checkpoint straight into where they stay."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.engine.layers.linear import Projection
from headrace.engine.models.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One decoder layer. Projections that read the same input are one matrix: fewer, larger products."""

    input_norm: Tensor  # [hidden]
    qkv: Projection  # [q_size + 2 kv_size, hidden]
    qk_norm: Tensor | None  # [heads + kv_heads, head_dim]
    out: Projection  # [hidden, q_size]
    mlp_norm: Tensor  # [hidden]
    gate_up: Projection  # [2 intermediate, hidden]
    down: Projection  # [hidden, intermediate]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderWeights:
    """A whole model. `head` is `embedding` itself when the two are tied."""

    embedding: Tensor  # [vocabulary, hidden]
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor  # [hidden]
    head: Tensor  # [vocabulary, hidden]


def load_weights(checkpoint: Checkpoint, dtype: torch.dtype) -> DecoderWeights:
    """All weights as `dtype`; StartError as Checkpoint.read_into."""
    c = checkpoint.config
    reader = _Reader(checkpoint, dtype)
    embedding = reader.matrix(c.hidden_size, ("model.embed_tokens", c.vocab_size))
    return DecoderWeights(
        embedding=embedding,
        layers=tuple(_read_layer(reader, f"model.layers.{i}.") for i in range(c.num_layers)),
        final_norm=reader.vector("model.norm", c.hidden_size),
        head=embedding if c.tied_embeddings else reader.matrix(c.hidden_size, ("lm_head", c.vocab_size)),
    )


def _read_layer(reader: _Reader, prefix: str) -> LayerWeights:
    c = reader.checkpoint.config
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    qkv = ((attention + "q_proj", c.q_size), (attention + "k_proj", c.kv_size), (attention + "v_proj", c.kv_size))
    gate_up = ((mlp + "gate_proj", c.intermediate_size), (mlp + "up_proj", c.intermediate_size))
    return LayerWeights(
        input_norm=reader.vector(prefix + "input_layernorm", c.hidden_size),
        qkv=reader.projection(c.hidden_size, *qkv, bias=c.qkv_bias),
        qk_norm=reader.head_norms(attention) if c.qk_norm else None,
        out=reader.projection(c.q_size, (attention + "o_proj", c.hidden_size), bias=c.out_bias),
        mlp_norm=reader.vector(prefix + "post_attention_layernorm", c.hidden_size),
        gate_up=reader.projection(c.hidden_size, *gate_up, bias=c.mlp_bias),
        down=reader.projection(c.intermediate_size, (mlp + "down_proj", c.hidden_size), bias=c.mlp_bias),
    )


class _Reader:
    """Reads modules of a checkpoint, named without ".weight" and ".bias"."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype) -> None:
        self.checkpoint = checkpoint
        self._dtype = dtype

    def vector(self, module: str, size: int) -> Tensor:
        out = torch.empty(size, dtype=self._dtype)
        self.checkpoint.read_into(f"{module}.weight", out)
        return out

    def matrix(self, columns: int, *parts: tuple[str, int]) -> Tensor:
        """The weights of `parts`, given with their rows, one below the other."""
        out = torch.empty(sum(rows for _, rows in parts), columns, dtype=self._dtype)
        self._fill(out, "weight", parts)
        return out

    def projection(self, columns: int, *parts: tuple[str, int], bias: bool) -> Projection:
        weight = self.matrix(columns, *parts)
        if not bias:
            return Projection(weight=weight, bias=None)
        offsets = torch.empty(len(weight), dtype=self._dtype)
        self._fill(offsets, "bias", parts)
        return Projection(weight=weight, bias=offsets)

    def head_norms(self, attention: str) -> Tensor:
        """The norms of queries and keys, one row per head: both are applied at once."""
        c = self.checkpoint.config
        queries, keys = (self.vector(f"{attention}{name}_norm", c.head_dim) for name in "qk")
        return torch.cat((queries.expand(c.num_heads, -1), keys.expand(c.num_kv_heads, -1)))

    def _fill(self, out: Tensor, kind: str, parts: tuple[tuple[str, int], ...]) -> None:
        first = 0
        for module, rows in parts:
            self.checkpoint.read_into(f"{module}.{kind}", out[first : first + rows])
            first += rows
