"""The decoder of the Llama lineage (Touvron et al. 2023): token ids in, logits out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.engine.core.step import SequenceSlice
from headrace.engine.kernels.reference.paged_attention import KvCache, paged_attention, write_kv
from headrace.engine.layers.attention import AttentionPlan, plan_attention
from headrace.engine.layers.linear import linear
from headrace.engine.layers.norm import head_norm, rms_norm
from headrace.engine.layers.rotary import Rotation, inverse_frequencies, rotate, rotation
from headrace.engine.models.config import ModelConfig
from headrace.engine.models.weights import DecoderWeights, LayerWeights


class Decoder:
    """A loaded model of any supported family: pure but for the KV cache it is given."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights) -> None:
        self.config = config
        self.weights = weights
        self.dtype = weights.embedding.dtype
        self._frequencies = inverse_frequencies(config)
        self._windows = [config.window(index) for index in range(config.num_layers)]

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
        return self.logits(self.hidden(slices, cache, block_size)[_sampling_rows(slices)])

    def hidden(self, slices: Sequence[SequenceSlice], cache: KvCache, block_size: int) -> Tensor:
        """Compute `slices` as `forward` does; the last layer's output of every token, [tokens, hidden]."""
        plans = {window: plan_attention(slices, block_size, self.dtype, window) for window in set(self._windows)}
        tokens = torch.tensor([token for piece in slices for token in piece.token_ids])
        positions = torch.cat([torch.arange(p.start, p.start + len(p.token_ids)) for p in slices])
        turn = rotation(positions, self._frequencies, self.config.rope_attention_factor)
        hidden = F.embedding(tokens, self.weights.embedding)
        for index, layer in enumerate(self.weights.layers):
            hidden = hidden + self._attention(index, layer, hidden, turn, cache, plans[self._windows[index]])
            hidden = hidden + self._mlp(layer, hidden)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 [rows, vocabulary] for rows of what `hidden` returned."""
        return linear(rms_norm(hidden, self.weights.final_norm, self.config.rms_eps), self.weights.head).float()

    def _attention(
        self, index: int, layer: LayerWeights, hidden: Tensor, turn: Rotation, cache: KvCache, plan: AttentionPlan
    ) -> Tensor:
        c = self.config
        queries_and_keys = c.num_heads + c.num_kv_heads
        qkv = layer.qkv(rms_norm(hidden, layer.input_norm, c.rms_eps))
        qkv = qkv.view(len(hidden), queries_and_keys + c.num_kv_heads, c.head_dim)
        turned = qkv[:, :queries_and_keys]
        if layer.qk_norm is not None:
            turned = head_norm(turned, layer.qk_norm, c.rms_eps)
        turned = rotate(turned, turn)
        write_kv(cache, index, plan, turned[:, c.num_heads :], qkv[:, queries_and_keys:])
        return layer.out(paged_attention(turned[:, : c.num_heads], cache, index, plan))

    def _mlp(self, layer: LayerWeights, hidden: Tensor) -> Tensor:
        gate, up = layer.gate_up(rms_norm(hidden, layer.mlp_norm, self.config.rms_eps)).chunk(2, dim=-1)
        return layer.down(F.silu(gate) * up)


def _sampling_rows(slices: Sequence[SequenceSlice]) -> Tensor:
    rows = []
    end = 0
    for piece in slices:
        end += len(piece.token_ids)
        if piece.samples:
            rows.append(end - 1)
    return torch.tensor(rows, dtype=torch.long)
