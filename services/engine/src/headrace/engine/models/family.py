"""The supported architectures, and what sets them apart, as data.

All are pre-norm decoders with rotary positions, grouped queries and a SiLU-gated MLP. SmolLM is a Llama by name too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Windowed(Enum):
    """Which layers a sliding window narrows."""

    NONE = "NONE"
    ALL = "ALL"  # whenever config.json gives a window
    SOME = "SOME"  # as use_sliding_window, max_window_layers and layer_types say


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One architecture.

    `defaults` are the values that stand for keys left out of config.json, where they are not those of Llama
    (transformers' configuration classes).
    """

    architecture: str  # in config.json
    gguf: str  # general.architecture in GGUF
    # llama.cpp keeps the two numbers of a rotary pair side by side in q and k, but only for Llama's converter.
    gguf_pairs_adjacent: bool = False
    qkv_bias: bool = False  # always; otherwise as attention_bias says, if has_attention_bias
    has_attention_bias: bool = False  # q, k, v and out
    has_mlp_bias: bool = False
    qk_norm: bool = False
    windowed: Windowed = Windowed.NONE
    defaults: Mapping[str, Any] = field(default_factory=dict)


_QWEN_WINDOW = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}

FAMILIES = (
    Family(
        architecture="LlamaForCausalLM",
        gguf="llama",
        gguf_pairs_adjacent=True,
        has_attention_bias=True,
        has_mlp_bias=True,
    ),
    Family(
        architecture="MistralForCausalLM",
        gguf="llama",
        gguf_pairs_adjacent=True,
        windowed=Windowed.ALL,
        defaults={"num_key_value_heads": 8, "sliding_window": 4096},
    ),
    Family(
        architecture="Qwen2ForCausalLM",
        gguf="qwen2",
        qkv_bias=True,
        windowed=Windowed.SOME,
        defaults={"num_key_value_heads": 32, **_QWEN_WINDOW},
    ),
    Family(
        architecture="Qwen3ForCausalLM",
        gguf="qwen3",
        has_attention_bias=True,
        qk_norm=True,
        windowed=Windowed.SOME,
        defaults={"num_key_value_heads": 32, "head_dim": 128, **_QWEN_WINDOW},
    ),
)
BY_ARCHITECTURE: Mapping[str, Family] = {family.architecture: family for family in FAMILIES}
# Mistral is written as "llama": the first family of a name stands for all of it, and the file says the rest itself.
BY_GGUF: Mapping[str, Family] = {family.gguf: family for family in reversed(FAMILIES)}
