"""The shape of a Llama model, read from GGUF metadata or from a Hugging Face config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.base.errors import StartError

GGUF_ARCHITECTURES = ("llama",)
HF_ARCHITECTURES = ("LlamaForCausalLM",)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder of the Llama family; sizes in elements.

    `rope_divisors` holds one divisor per rotary frequency (head_dim / 2 of them), which is how every supported
    kind of context extension reads after load; it is empty for plain rotary embeddings.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rope_theta: float
    rms_eps: float
    tied_embeddings: bool
    eos_ids: frozenset[int]
    rope_divisors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """StartError for shapes that no forward pass could have."""
        sizes = (self.vocab_size, self.hidden_size, self.intermediate_size, self.num_layers, self.num_kv_heads)
        if min(*sizes, self.num_heads, self.head_dim, self.max_position) < 1:
            raise StartError(f"the model's shape has a size below 1: {self}")
        if self.num_heads % self.num_kv_heads or self.head_dim % 2:
            raise StartError(
                f"{self.num_heads} attention heads of size {self.head_dim} over {self.num_kv_heads} KV heads is not"
                " supported: the heads must be a multiple of the KV heads, and their size even"
            )

    @property
    def q_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key (or value) heads together."""
        return self.num_kv_heads * self.head_dim


def config_from_gguf(
    metadata: Mapping[str, Any], *, vocab_size: int, tied: bool, rope: tuple[float, ...]
) -> ModelConfig:
    """The config in GGUF metadata; what it leaves to the tensors (vocabulary, tying, llama3 rotary) is passed in."""
    architecture = metadata.get("general.architecture")
    if architecture not in GGUF_ARCHITECTURES:
        raise StartError(f"GGUF architecture {architecture!r} is not supported, only {', '.join(GGUF_ARCHITECTURES)}")
    if metadata.get("llama.expert_count", 0):
        raise StartError("GGUF models with experts are not supported, only dense llama")
    heads = int(_need(metadata, "llama.attention.head_count"))
    hidden = int(_need(metadata, "llama.embedding_length"))
    head_dim = int(metadata.get("llama.attention.key_length", hidden // heads))
    if int(metadata.get("llama.rope.dimension_count", head_dim)) != head_dim:
        raise StartError("rotary embeddings over a part of the head are not supported")
    return ModelConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=int(_need(metadata, "llama.feed_forward_length")),
        num_layers=int(_need(metadata, "llama.block_count")),
        num_heads=heads,
        num_kv_heads=int(metadata.get("llama.attention.head_count_kv", heads)),
        head_dim=head_dim,
        max_position=int(_need(metadata, "llama.context_length")),
        rope_theta=float(metadata.get("llama.rope.freq_base", 10_000.0)),
        rms_eps=float(_need(metadata, "llama.attention.layer_norm_rms_epsilon")),
        tied_embeddings=tied,
        eos_ids=_gguf_eos(metadata),
        rope_divisors=rope or _gguf_rope_divisors(metadata, head_dim),
    )


def config_from_hf(config: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    """The config in a Hugging Face folder's config.json, with eos ids of generation_config.json added."""
    architectures = list(config.get("architectures") or [])
    if not any(name in HF_ARCHITECTURES for name in architectures):
        raise StartError(f"architecture {architectures} is not supported, only {', '.join(HF_ARCHITECTURES)}")
    for key, wanted in (("attention_bias", False), ("mlp_bias", False), ("hidden_act", "silu")):
        if config.get(key, wanted) != wanted:
            raise StartError(f"{key}={config[key]!r} in config.json is not supported, only {wanted!r}")
    heads = int(_need(config, "num_attention_heads"))
    hidden = int(_need(config, "hidden_size"))
    head_dim = int(config.get("head_dim") or hidden // heads)
    rope = config.get("rope_parameters") or {}  # transformers 5; earlier ones had the two keys below
    rope_theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    return ModelConfig(
        vocab_size=int(_need(config, "vocab_size")),
        hidden_size=hidden,
        intermediate_size=int(_need(config, "intermediate_size")),
        num_layers=int(_need(config, "num_hidden_layers")),
        num_heads=heads,
        num_kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=head_dim,
        max_position=int(_need(config, "max_position_embeddings")),
        rope_theta=rope_theta,
        rms_eps=float(config.get("rms_norm_eps", 1e-6)),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        eos_ids=_ids(config.get("eos_token_id")) | _ids(generation.get("eos_token_id")),
        rope_divisors=_hf_rope_divisors(rope or config.get("rope_scaling") or {}, rope_theta, head_dim),
    )


def _need(values: Mapping[str, Any], key: str) -> Any:
    if values.get(key) is None:
        raise StartError(f"the model's configuration has no {key}")
    return values[key]


def _ids(value: Any) -> frozenset[int]:
    if value is None:
        return frozenset()
    return frozenset(int(i) for i in value) if isinstance(value, list) else frozenset({int(value)})


def _gguf_eos(metadata: Mapping[str, Any]) -> frozenset[int]:
    """End of text, and end of turn where a chat model has its own."""
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    return frozenset(int(metadata[key]) for key in keys if key in metadata)


def _gguf_rope_divisors(metadata: Mapping[str, Any], head_dim: int) -> tuple[float, ...]:
    kind = metadata.get("llama.rope.scaling.type", "none")
    if kind == "none":
        return ()
    if kind != "linear":
        raise StartError(f"rotary scaling {kind!r} is not supported, only none, linear and llama3")
    return (float(_need(metadata, "llama.rope.scaling.factor")),) * (head_dim // 2)


def _hf_rope_divisors(rope: Mapping[str, Any], theta: float, head_dim: int) -> tuple[float, ...]:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return ()
    if kind not in ("linear", "llama3"):
        raise StartError(f"rotary scaling {kind!r} is not supported, only default, linear and llama3")
    factor = float(_need(rope, "factor"))
    if kind == "linear":
        return (factor,) * (head_dim // 2)
    low, high = float(_need(rope, "low_freq_factor")), float(_need(rope, "high_freq_factor"))
    context = float(_need(rope, "original_max_position_embeddings"))
    turns = (context * theta ** (-2 * i / head_dim) / (2 * math.pi) for i in range(head_dim // 2))
    return tuple(_llama3_divisor(t, factor, low, high) for t in turns)


def _llama3_divisor(turns: float, factor: float, low: float, high: float) -> float:
    """1 above `high` turns within the trained context, `factor` below `low`, smooth between (Llama 3.1)."""
    kept = min(max((turns - low) / (high - low), 0.0), 1.0)
    return 1.0 / (kept + (1.0 - kept) / factor)
