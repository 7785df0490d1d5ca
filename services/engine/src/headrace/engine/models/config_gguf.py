"""The config in GGUF metadata, and in which tensors a file has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.base.errors import StartError
from headrace.engine.models.config import ModelConfig
from headrace.engine.models.family import BY_GGUF, Family
from headrace.engine.models.rope_scaling import rope_scaling

Shape = tuple[int, ...]

# Keys of other models that share an architecture's name with ours, and the value at which they change nothing.
_WITHOUT_EFFECT = {
    "expert_count": 0,
    "attention.causal": True,
    "attention.scale": 0.0,
    "attention.clamp_kqv": 0.0,
    "attention.temperature_scale": 0.0,
    "embedding_scale": 0.0,
    "residual_scale": 0.0,
    "logit_scale": 0.0,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
}


def family_from_gguf(metadata: Mapping[str, Any]) -> Family:
    """The family that the file's architecture names."""
    architecture = metadata.get("general.architecture")
    family = BY_GGUF.get(str(architecture))
    if family is None:
        raise StartError(f"GGUF architecture {architecture!r} is not supported, only {', '.join(sorted(BY_GGUF))}")
    return family


def config_from_gguf(
    metadata: Mapping[str, Any], *, tensors: Mapping[str, Shape], rope_divisors: tuple[float, ...]
) -> ModelConfig:
    """The config; `rope_divisors` is the content of the tensor rope_freqs, llama3's scaling, () without one."""
    family = family_from_gguf(metadata)
    own = _Keys(metadata, family.gguf)
    own.refuse_what_is_not_supported()
    heads = int(own.need("attention.head_count"))
    hidden = int(own.need("embedding_length"))
    layers = int(own.need("block_count"))
    head_dim = int(own.get("attention.key_length", hidden // heads))
    for key, what in (("rope.dimension_count", "rotation of a part of the head"),
                      ("attention.value_length", "another head size for values")):  # fmt: skip
        if int(own.get(key, head_dim)) != head_dim:
            raise StartError(f"{own.name(key)}={own.get(key, head_dim)} is not supported: it means {what}")
    theta = float(own.get("rope.freq_base", 10_000.0))
    scaling = rope_scaling(
        own.rope(), theta=theta, head_dim=head_dim, max_position=int(own.need("context_length"))
    )  # fmt: skip
    return ModelConfig(
        vocab_size=tensors["token_embd.weight"][0],
        hidden_size=hidden,
        intermediate_size=int(own.need("feed_forward_length")),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=int(own.get("attention.head_count_kv", heads)),
        head_dim=head_dim,
        max_position=scaling.max_position,
        rope_theta=theta,
        rms_eps=float(own.need("attention.layer_norm_rms_epsilon")),
        tied_embeddings="output.weight" not in tensors,
        eos_ids=_eos(metadata),
        rope_divisors=rope_divisors or scaling.divisors,
        rope_attention_factor=scaling.attention_factor,
        qkv_bias=family.qkv_bias or "blk.0.attn_q.bias" in tensors,
        out_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_up.bias" in tensors,
        qk_norm=family.qk_norm,
        windows=own.windows(layers),
    )


class _Keys:
    """The keys of one architecture, named without its prefix."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str) -> None:
        self._metadata = metadata
        self._architecture = architecture

    def name(self, key: str) -> str:
        return f"{self._architecture}.{key}"

    def get(self, key: str, default: Any) -> Any:
        value = self._metadata.get(self.name(key), default)
        if isinstance(value, tuple) and len(set(value)) == 1:  # the same for every layer
            return value[0]
        return value

    def need(self, key: str) -> Any:
        value = self.get(key, None)
        if value is None:
            raise StartError(f"the model's metadata has no {self.name(key)}")
        return value

    def refuse_what_is_not_supported(self) -> None:
        for key, harmless in _WITHOUT_EFFECT.items():
            if self.get(key, harmless) != harmless:
                raise StartError(f"{self.name(key)}={self.get(key, harmless)!r} is not supported, only {harmless!r}")

    def rope(self) -> Mapping[str, Any]:
        """The scaling's parameters by their names in a config.json."""
        factor = self.get("rope.scaling.factor", self.get("rope.scale_linear", None))
        # A factor without a type is linear, in llama.cpp and in the files from before there were types.
        kind = self.get("rope.scaling.type", "linear" if factor else "none")
        if kind not in ("none", "linear", "yarn"):
            raise StartError(f"{self.name('rope.scaling.type')}={kind!r} is not supported, only none, linear and yarn")
        return {
            "rope_type": "default" if kind == "none" else kind,
            "factor": factor,
            "original_max_position_embeddings": self.get("rope.scaling.original_context_length", None),
            "beta_fast": self.get("rope.scaling.yarn_beta_fast", None),
            "beta_slow": self.get("rope.scaling.yarn_beta_slow", None),
        }

    def windows(self, layers: int) -> tuple[int | None, ...]:
        size = int(self.get("attention.sliding_window", 0))
        if not size:
            return ()
        key = self.name("attention.sliding_window_pattern")
        sliding = self._metadata.get(key, (True,) * layers)
        if not isinstance(sliding, tuple) or len(sliding) != layers:
            raise StartError(f"{key}={sliding!r} is not supported, only one boolean for each of {layers} layers")
        return tuple(size if slides else None for slides in sliding)


def _eos(metadata: Mapping[str, Any]) -> frozenset[int]:
    """End of text, and end of turn or message where a chat model has its own."""
    keys = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
    return frozenset(int(metadata[key]) for key in keys if key in metadata)
