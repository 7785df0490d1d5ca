"""The Llama decoder (Touvron et al. 2023): weights in, logits out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.engine.core.step import SequenceSlice
from headrace.engine.kernels.reference.paged_attention import KvCache, paged_attention, write_kv
from headrace.engine.layers.attention import AttentionPlan, plan_attention
from headrace.engine.layers.linear import linear
from headrace.engine.layers.norm import rms_norm
from headrace.engine.layers.rotary import Rotation, inverse_frequencies, rotate, rotation
from headrace.engine.models.checkpoint import Checkpoint
from headrace.engine.models.config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One decoder layer. Projections that read the same input are one matrix: fewer, larger products."""

    input_norm: Tensor  # [hidden]
    qkv: Tensor  # [q_size + 2 kv_size, hidden]
    out: Tensor  # [hidden, q_size]
    mlp_norm: Tensor  # [hidden]
    gate_up: Tensor  # [2 intermediate, hidden]
    down: Tensor  # [hidden, intermediate]


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaWeights:
    """A whole model. `head` is `embedding` itself when the two are tied."""

    embedding: Tensor  # [vocabulary, hidden]
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor  # [hidden]
    head: Tensor  # [vocabulary, hidden]


class Llama:
    """A loaded model: pure but for the KV cache it is given."""

    def __init__(self, config: ModelConfig, weights: LlamaWeights) -> None:
        self.config = config
        self.weights = weights
        self.dtype = weights.embedding.dtype
        self._frequencies = inverse_frequencies(config)

    def new_cache(self, slots: int) -> KvCache:
        """An empty KV cache of `slots` tokens for this model."""
        c = self.config
        return KvCache.zeros(
            layers=c.num_layers, slots=slots, kv_heads=c.num_kv_heads, head_dim=c.head_dim, dtype=self.dtype
        )

    def forward(self, slices: Sequence[SequenceSlice], cache: KvCache, block_size: int) -> Tensor:
        """Compute `slices` (at least one), writing their keys and values into `cache`.

        Returns the logits after the last token of each slice that samples, float32 [sampling slices, vocabulary], in
        the order of the slices.
        """
        plan = plan_attention(slices, block_size, self.dtype)
        tokens = torch.tensor([token for piece in slices for token in piece.token_ids])
        positions = torch.cat([torch.arange(p.start, p.start + len(p.token_ids)) for p in slices])
        turn = rotation(positions, self._frequencies)
        hidden = F.embedding(tokens, self.weights.embedding)
        for index, layer in enumerate(self.weights.layers):
            hidden = hidden + self._attention(index, layer, hidden, turn, cache, plan)
            hidden = hidden + self._mlp(layer, hidden)
        last = hidden[_sampling_rows(slices)]
        return linear(rms_norm(last, self.weights.final_norm, self.config.rms_eps), self.weights.head).float()

    def _attention(
        self, index: int, layer: LayerWeights, hidden: Tensor, turn: Rotation, cache: KvCache, plan: AttentionPlan
    ) -> Tensor:
        c = self.config
        normed = rms_norm(hidden, layer.input_norm, c.rms_eps)
        queries_and_keys = c.num_heads + c.num_kv_heads
        qkv = linear(normed, layer.qkv).view(len(hidden), queries_and_keys + c.num_kv_heads, c.head_dim)
        turned = rotate(qkv[:, :queries_and_keys], turn)
        write_kv(cache, index, plan, turned[:, c.num_heads :], qkv[:, queries_and_keys:])
        return linear(paged_attention(turned[:, : c.num_heads], cache, index, plan), layer.out)

    def _mlp(self, layer: LayerWeights, hidden: Tensor) -> Tensor:
        gate, up = linear(rms_norm(hidden, layer.mlp_norm, self.config.rms_eps), layer.gate_up).chunk(2, dim=-1)
        return linear(F.silu(gate) * up, layer.down)


def load_llama(checkpoint: Checkpoint, dtype: torch.dtype) -> Llama:
    """The model in `checkpoint`, converted to `dtype` straight into its final memory."""
    c = checkpoint.config
    embedding = _read(checkpoint, dtype, c.hidden_size, ("model.embed_tokens", c.vocab_size))
    weights = LlamaWeights(
        embedding=embedding,
        layers=tuple(_read_layer(checkpoint, f"model.layers.{i}.", dtype) for i in range(c.num_layers)),
        final_norm=_read_vector(checkpoint, "model.norm", dtype),
        head=embedding if c.tied_embeddings else _read(checkpoint, dtype, c.hidden_size, ("lm_head", c.vocab_size)),
    )
    return Llama(c, weights)


def _read_layer(checkpoint: Checkpoint, prefix: str, dtype: torch.dtype) -> LayerWeights:
    c = checkpoint.config
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    qkv = ((attention + "q_proj", c.q_size), (attention + "k_proj", c.kv_size), (attention + "v_proj", c.kv_size))
    gate_up = ((mlp + "gate_proj", c.intermediate_size), (mlp + "up_proj", c.intermediate_size))
    return LayerWeights(
        input_norm=_read_vector(checkpoint, prefix + "input_layernorm", dtype),
        qkv=_read(checkpoint, dtype, c.hidden_size, *qkv),
        out=_read(checkpoint, dtype, c.q_size, (attention + "o_proj", c.hidden_size)),
        mlp_norm=_read_vector(checkpoint, prefix + "post_attention_layernorm", dtype),
        gate_up=_read(checkpoint, dtype, c.hidden_size, *gate_up),
        down=_read(checkpoint, dtype, c.intermediate_size, (mlp + "down_proj", c.hidden_size)),
    )


def _read(checkpoint: Checkpoint, dtype: torch.dtype, columns: int, *parts: tuple[str, int]) -> Tensor:
    """The named weights, given with their rows, one below the other."""
    out = torch.empty(sum(rows for _, rows in parts), columns, dtype=dtype)
    first = 0
    for name, rows in parts:
        checkpoint.read_into(name, out[first : first + rows])
        first += rows
    return out


def _read_vector(checkpoint: Checkpoint, name: str, dtype: torch.dtype) -> Tensor:
    out = torch.empty(checkpoint.config.hidden_size, dtype=dtype)
    checkpoint.read_into(name, out)
    return out


def _sampling_rows(slices: Sequence[SequenceSlice]) -> Tensor:
    rows = []
    end = 0
    for piece in slices:
        end += len(piece.token_ids)
        if piece.samples:
            rows.append(end - 1)
    return torch.tensor(rows, dtype=torch.long)
