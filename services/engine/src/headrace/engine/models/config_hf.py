"""The config in a Hugging Face folder: config.json, and generation_config.json for where answers end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.base.errors import StartError
from headrace.engine.models.config import ModelConfig
from headrace.engine.models.family import BY_ARCHITECTURE, Family, Windowed
from headrace.engine.models.rope_scaling import rope_scaling

_FULL, _SLIDING = "full_attention", "sliding_attention"


def config_from_hf(config: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    """The config in `config`, with the eos ids of `generation` added; StartError for what cannot be computed."""
    family = _family(config)
    values = {**family.defaults, **config}
    _refuse_what_is_not_supported(values)
    heads = int(_need(values, "num_attention_heads"))
    hidden = int(_need(values, "hidden_size"))
    layers = int(_need(values, "num_hidden_layers"))
    head_dim = int(values.get("head_dim") or hidden // heads)
    max_position = int(_need(values, "max_position_embeddings"))
    theta, rope_parameters = _rope(values)
    rope = rope_scaling(rope_parameters, theta=theta, head_dim=head_dim, max_position=max_position)
    attention_bias = family.has_attention_bias and bool(values.get("attention_bias"))
    return ModelConfig(
        vocab_size=int(_need(values, "vocab_size")),
        hidden_size=hidden,
        intermediate_size=int(_need(values, "intermediate_size")),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=int(values.get("num_key_value_heads") or heads),
        head_dim=head_dim,
        max_position=rope.max_position,
        rope_theta=theta,
        rms_eps=float(values.get("rms_norm_eps", 1e-6)),
        tied_embeddings=bool(values.get("tie_word_embeddings", False)),
        eos_ids=_ids(values.get("eos_token_id")) | _ids(generation.get("eos_token_id")),
        rope_divisors=rope.divisors,
        rope_attention_factor=rope.attention_factor,
        qkv_bias=family.qkv_bias or attention_bias,
        out_bias=attention_bias,
        mlp_bias=family.has_mlp_bias and bool(values.get("mlp_bias")),
        qk_norm=family.qk_norm,
        windows=_windows(values, family, layers),
    )


def _family(config: Mapping[str, Any]) -> Family:
    architectures = list(config.get("architectures") or [])
    for name in architectures:
        if name in BY_ARCHITECTURE:
            return BY_ARCHITECTURE[name]
    raise StartError(f"architecture {architectures} is not supported, only {', '.join(BY_ARCHITECTURE)}")


def _refuse_what_is_not_supported(values: Mapping[str, Any]) -> None:
    for key, wanted in (("hidden_act", "silu"), ("partial_rotary_factor", 1.0)):
        if values.get(key, wanted) != wanted:
            raise StartError(f"{key}={values[key]!r} in config.json is not supported, only {wanted!r}")
    if values.get("quantization_config"):
        method = dict(values["quantization_config"]).get("quant_method")
        raise StartError(
            f"quantization_config with quant_method={method!r} in config.json is not supported: only float32, float16"
            " and bfloat16 weights are; quantised ones are read from GGUF files"
        )


def _rope(values: Mapping[str, Any]) -> tuple[float, Mapping[str, Any]]:
    """The rotary base and the scaling's parameters: one dict in transformers 5, two keys before it."""
    rope = dict(values.get("rope_parameters") or values.get("rope_scaling") or {})
    if any(isinstance(value, dict) for value in rope.values()):
        raise StartError("rope_parameters by layer type in config.json are not supported, only one set for all layers")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise StartError("partial_rotary_factor in config.json is not supported, only rotation of the whole head")
    # Phi-style: outside the dict it counts first (transformers' standardize_rope_params).
    if values.get("original_max_position_embeddings"):
        rope["original_max_position_embeddings"] = values["original_max_position_embeddings"]
    return float(rope.get("rope_theta") or values.get("rope_theta") or 10_000.0), rope


def _windows(values: Mapping[str, Any], family: Family, layers: int) -> tuple[int | None, ...]:
    size = int(values.get("sliding_window") or 0)
    types = values.get("layer_types")
    if family.windowed is Windowed.NONE or (family.windowed is Windowed.ALL and not size):
        return ()
    if family.windowed is Windowed.ALL:
        if types and set(types) != {_SLIDING}:
            raise StartError(f"layer_types in a {family.architecture}'s config.json is not supported: all layers slide")
        return (size,) * layers
    if not values.get("use_sliding_window"):
        size = 0
    if types is None:
        first = int(values.get("max_window_layers") or 0)
        types = [_SLIDING if size and i >= first else _FULL for i in range(layers)]
    if len(types) != layers or not set(types) <= {_FULL, _SLIDING}:
        raise StartError(f"layer_types in config.json must be {layers} of {_FULL} and {_SLIDING}, not {types}")
    if _SLIDING not in types:
        return ()
    if not size:
        raise StartError(f"layer_types in config.json has {_SLIDING}, but no sliding_window is in use")
    return tuple(size if kind == _SLIDING else None for kind in types)


def _need(values: Mapping[str, Any], key: str) -> Any:
    if values.get(key) is None:
        raise StartError(f"the model's configuration has no {key}")
    return values[key]


def _ids(value: Any) -> frozenset[int]:
    if value is None:
        return frozenset()
    return frozenset(int(i) for i in value) if isinstance(value, list) else frozenset({int(value)})
