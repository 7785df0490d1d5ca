"""What a Hugging Face folder says about its model: read as transformers reads it, or refused in one line."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from headrace.base.errors import StartError
from headrace.engine.layers.rotary import inverse_frequencies
from headrace.engine.models.config import ModelConfig
from headrace.engine.models.config_hf import config_from_hf
from headrace.engine.models.hf_folder import HfFolder
from headrace.engine.models.loader import load_model, open_checkpoint

TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 70, "hidden_size": 64, "num_hidden_layers": 2,
    "intermediate_size": 96, "num_attention_heads": 4, "max_position_embeddings": 64,
}  # fmt: skip
FULL, SLIDING = "full_attention", "sliding_attention"


def config(family: str = "Llama", **changes: Any) -> ModelConfig:
    return config_from_hf(TINY | {"architectures": [f"{family}ForCausalLM"]} | changes, {})


def transformers_config(family: str, **values: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

        return getattr(transformers, f"{family}Config")(**{k: v for k, v in TINY.items()} | values)


LAYERS = {"num_hidden_layers": 4, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"use_sliding_window": False, "sliding_window": 16},
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 3},
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0},
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 4},
        {"use_sliding_window": True},
        {"use_sliding_window": True, "max_window_layers": 2},
        {"use_sliding_window": True, "sliding_window": 8, "layer_types": [SLIDING, FULL, SLIDING, FULL]},
        {"use_sliding_window": False, "sliding_window": 8, "layer_types": [FULL] * 4},
    ],
)
@pytest.mark.parametrize("family", ["Qwen2", "Qwen3"])
def test_the_layers_that_slide_are_those_that_slide_in_transformers(family: str, values: dict[str, Any]) -> None:
    theirs = transformers_config(family, **LAYERS, **values)
    expected = [theirs.sliding_window if kind == SLIDING else None for kind in theirs.layer_types]
    ours = config(family, **LAYERS, **values)
    assert [ours.window(layer) for layer in range(4)] == expected


@pytest.mark.parametrize("values", [{}, {"sliding_window": None}, {"sliding_window": 12}])
def test_all_layers_of_a_mistral_slide_by_the_window_it_names_or_by_its_class_s(values: dict[str, Any]) -> None:
    expected = transformers_config("Mistral", num_key_value_heads=4, **values).sliding_window
    ours = config("Mistral", num_key_value_heads=4, **values)
    assert [ours.window(layer) for layer in range(2)] == [expected, expected]


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_a_key_left_out_means_what_it_means_in_transformers(family: str) -> None:
    heads = 32  # a multiple of every family's KV heads
    theirs = transformers_config(family, num_attention_heads=heads, hidden_size=1024)
    ours = config(family, num_attention_heads=heads, hidden_size=1024)
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == getattr(theirs, "head_dim", 32)
    assert ours.rms_eps == theirs.rms_norm_eps
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.tied_embeddings == theirs.tie_word_embeddings


QWEN_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LLAMA31 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 8192}  # fmt: skip


@pytest.mark.parametrize(
    ("rope", "theta", "context", "longest"),
    [
        (LLAMA31, 500_000.0, 131072, 131072),
        ({**LLAMA31, "factor": 32.0}, 500_000.0, 131072, 131072),
        (QWEN_YARN, 1_000_000.0, 32768, 131072),
        (QWEN_YARN, 1_000_000.0, 131072, 131072),
        ({**QWEN_YARN, "factor": 2.0, "truncate": False}, 10_000.0, 40960, 65536),
        ({**QWEN_YARN, "attention_factor": 1.3, "beta_fast": 64.0}, 1_000_000.0, 32768, 131072),
        ({"rope_type": "yarn", "factor": 8.0}, 10_000.0, 4096, 32768),
        ({"rope_type": "linear", "factor": 4.0}, 100_000.0, 16384, 16384),
        ({"rope_type": "dynamic", "factor": 2.0}, 10_000.0, 4096, 4096),
    ],
)
@pytest.mark.parametrize("before_5", [False, True])
def test_rotary_frequencies_at_the_scale_of_real_models_are_those_of_transformers(
    rope: dict[str, Any], theta: float, context: int, longest: int, before_5: bool
) -> None:
    sizes = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
             "max_position_embeddings": context}  # fmt: skip
    theirs = transformers_config("Llama", **sizes, rope_parameters={**rope, "rope_theta": theta})
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    frequencies, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](theirs, torch.device("cpu"))
    given = (
        {"rope_scaling": rope, "rope_theta": theta} if before_5 else {"rope_parameters": {**rope, "rope_theta": theta}}
    )
    ours = config(**sizes, **given)
    torch.testing.assert_close(inverse_frequencies(ours), frequencies, rtol=1e-6, atol=0)
    assert ours.rope_attention_factor == pytest.approx(factor)
    assert ours.max_position == longest


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["MambaForCausalLM"]},
     r"\['MambaForCausalLM'\] is not supported, only LlamaForCausalLM, MistralForCausalLM, Qwen2For.*, Qwen3For"),
    ({"architectures": None}, r"architecture \[\] is not supported"),
    ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ({"quantization_config": {"quant_method": "gptq"}}, "quant_method='gptq' .* GGUF"),
    ({"rope_scaling": {"rope_type": "longrope"}}, "'longrope' is not supported, only default, linear, dynamic, llama3"),
    ({"rope_scaling": {"type": "linear"}}, "'linear' needs a positive factor"),
    ({"rope_scaling": {"type": "yarn", "factor": -1.0}}, "'yarn' needs a positive factor"),
    ({"rope_scaling": {"type": "llama3", "factor": 2.0}}, "'llama3' needs low_freq_factor"),
    ({"rope_parameters": {FULL: {"rope_theta": 1e4}}}, "by layer type"),
    ({"hidden_size": None}, "has no hidden_size"),
    ({"num_key_value_heads": 3}, "multiple of the KV heads"),
    ({"head_dim": 9}, "their size even"),
    ({"rope_theta": -1.0}, "rope_theta=-1.0 and rms_eps=1e-06 must both be above 0"),
    ({"rms_norm_eps": float("nan")}, "rms_eps=nan must both be above 0"),
    ({"num_attention_heads": 0}, "division"),
    ({"hidden_size": "wide"}, "wide"),
    ({"rope_parameters": "none"}, "dictionary update"),
    ({"architectures": ["MistralForCausalLM"], "num_key_value_heads": 4, "layer_types": [SLIDING, FULL]},
     "layer_types in a MistralForCausalLM"),
    ({"architectures": ["Qwen2ForCausalLM"], "layer_types": [SLIDING, FULL]}, "no sliding_window is in use"),
    ({"architectures": ["Qwen3ForCausalLM"], "layer_types": ["linear_attention", FULL]}, "must be 2 of full_attention"),
    ({"architectures": ["Qwen3ForCausalLM"], "layer_types": [FULL]}, "must be 2 of full_attention"),
    ({"architectures": ["Qwen3ForCausalLM"], "num_key_value_heads": 4, "use_sliding_window": True,
      "max_window_layers": 0, "sliding_window": -4}, "not all at least 1"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), REFUSALS, ids=[message for _, message in REFUSALS])
def test_a_configuration_that_cannot_be_computed_is_refused_in_one_line_that_names_it(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY | change))
    with pytest.raises(StartError, match=message) as refusal:
        HfFolder(tmp_path)
    assert str(tmp_path) in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_folder_says_which_of_its_files_is_missing_or_damaged(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"cannot read .*config\.json"):
        HfFolder(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(StartError, match="is not JSON"):
        HfFolder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    with pytest.raises(StartError, match=r"neither model\.safetensors nor"):
        HfFolder(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    for broken in ({}, {"weight_map": ["a"]}, {"weight_map": {"model.norm.weight": 3}}):
        index.write_text(json.dumps(broken))
        with pytest.raises(StartError, match="no weight_map of names to files"):
            HfFolder(tmp_path)
    index.write_text(json.dumps({"weight_map": {"model.embed_tokens.weight": "shard.safetensors"}}))
    with pytest.raises(StartError, match=r"cannot read .*shard\.safetensors"):
        load_model(tmp_path, "float32")
    save_file({"other": torch.ones(1)}, tmp_path / "shard.safetensors")
    with pytest.raises(StartError, match=r"shard\.safetensors is damaged"):
        load_model(tmp_path, "float32")
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors at all")
    with pytest.raises(StartError, match=r"cannot read .*model\.safetensors"):
        HfFolder(tmp_path)


def weights() -> dict[str, torch.Tensor]:
    shapes = {"model.embed_tokens": (70, 64), "model.norm": (64,)}
    for layer in ("model.layers.0.", "model.layers.1."):
        shapes |= {f"{layer}{norm}_layernorm": (64,) for norm in ("input", "post_attention")}
        shapes |= {f"{layer}self_attn.{name}_proj": (64, 64) for name in "qkvo"}
        shapes |= {f"{layer}mlp.{name}_proj": (96, 64) for name in ("gate", "up")}
        shapes[f"{layer}mlp.down_proj"] = (64, 96)
    return {f"{name}.weight": torch.randn(shape) for name, shape in shapes.items()}


def load(folder: Path, tensors: dict[str, torch.Tensor], **changes: Any) -> None:
    (folder / "config.json").write_text(json.dumps(TINY | {"tie_word_embeddings": True} | changes))
    save_file(tensors, folder / "model.safetensors")
    load_model(folder, "float32")


def test_weights_that_do_not_fit_the_configuration_are_named(tmp_path: Path) -> None:
    bias = {"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}
    with pytest.raises(
        StartError, match=r"has 1 weights that its .* do not: model\.layers\.0\.self_attn\.q_proj\.bias$"
    ):
        load(tmp_path, weights() | bias)
    with pytest.raises(StartError, match=r"no weight model\.layers\.0\.self_attn\.q_proj\.bias"):
        load(tmp_path, weights(), attention_bias=True)
    with pytest.raises(StartError, match=r"no weight lm_head\.weight"):
        load(tmp_path, weights(), tie_word_embeddings=False)
    narrow = {name: weight[:80] for name, weight in weights().items() if "gate_proj" in name or "up_proj" in name}
    with pytest.raises(StartError, match=r"down_proj\.weight is torch\.float32 \(64, 96\), expected .* \(64, 80\)"):
        load(tmp_path, weights() | narrow, intermediate_size=80)
    with pytest.raises(StartError, match=r"model\.norm\.weight is torch\.float8_e4m3fn"):
        load(tmp_path, weights() | {"model.norm.weight": torch.ones(64).to(torch.float8_e4m3fn)})


def test_copies_that_change_nothing_are_no_obstacle(tmp_path: Path) -> None:
    """A tied head that is stored once more, and the frequencies that old transformers stored."""
    tied = {"lm_head.weight": torch.randn(70, 64), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    load(tmp_path, weights() | tied)


def test_a_path_without_a_model_and_an_unknown_precision_say_what_is_wanted(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="give a GGUF file, or a folder"):
        open_checkpoint(tmp_path / "absent")
    with pytest.raises(StartError, match="only float32 and bfloat16"):
        load_model(tmp_path, "int3")
