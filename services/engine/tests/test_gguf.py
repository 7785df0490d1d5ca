from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize as reference
from gguf.quants import quantize

from headrace.base.errors import StartError
from headrace.engine.models.dequantize import block_format, dequantize
from headrace.engine.models.gguf import GgufCheckpoint, gguf_name
from headrace.engine.models.loader import load_model

KIND = gguf.GGMLQuantizationType
QUANTIZED = [KIND.Q4_0, KIND.Q4_1, KIND.Q8_0, KIND.Q5_0, KIND.Q5_1, KIND.Q4_K, KIND.Q6_K, KIND.Q5_K, KIND.IQ4_XS]
HIDDEN, HEADS, KV_HEADS, INTERMEDIATE, VOCAB, LAYERS = 64, 4, 2, 96, 70, 2
HEAD_DIM = HIDDEN // HEADS


def random_bytes(kind: Any, blocks: int) -> np.ndarray:
    """Random blocks, without the NaN and infinity that random float16 scales would hold."""
    weights, size = gguf.GGML_QUANT_SIZES[kind]
    if kind in (KIND.Q4_0, KIND.Q4_1, KIND.Q8_0, KIND.Q5_0, KIND.Q5_1):
        values = np.random.default_rng(1).normal(size=(blocks, weights)).astype(np.float32)
        return quantize(values, kind).reshape(-1)
    raw = np.random.default_rng(2).integers(0, 256, size=(blocks, size), dtype=np.uint8)
    scales = {KIND.Q4_K: (0, 4), KIND.Q5_K: (0, 4), KIND.Q6_K: (208, 210), KIND.IQ4_XS: (0, 2)}[kind]
    raw[:, slice(*scales)] &= 0x3B  # the float16 numbers stay below 1
    return raw.reshape(-1)


@pytest.mark.parametrize("kind", QUANTIZED, ids=lambda kind: kind.name)
def test_quantised_blocks_become_exactly_what_the_gguf_library_makes_of_them(kind: Any) -> None:
    blocks = {KIND.Q4_1: 40_000, KIND.Q4_K: 5_000, KIND.Q6_K: 5_000}.get(kind, 600)  # those three: several chunks
    raw = random_bytes(kind, blocks)
    expected = torch.from_numpy(reference(raw, kind).reshape(-1))
    for dtype in (torch.float32, torch.bfloat16):
        out = torch.full(expected.shape, torch.nan, dtype=dtype)
        dequantize(int(kind), torch.from_numpy(raw), out)
        assert torch.equal(out, expected.to(dtype))


@pytest.mark.parametrize(
    ("kind", "dtype"), [(KIND.F32, torch.float32), (KIND.F16, torch.float16), (KIND.BF16, torch.bfloat16)]
)
def test_plain_floats_keep_their_value(kind: Any, dtype: torch.dtype) -> None:
    stored = torch.randn(1000).to(dtype)
    out = torch.empty(1000)
    dequantize(int(kind), stored.view(torch.uint8), out)
    assert torch.equal(out, stored.float())


def test_a_type_nobody_can_read_is_named_with_those_that_can_be() -> None:
    with pytest.raises(StartError, match=r"type 26 is not supported; supported: F32, F16, Q4_0, Q4_1.*Q6_K"):
        block_format(26)


def hf_weights() -> dict[str, torch.Tensor]:
    """Random weights of a tiny Llama by Hugging Face name without ".weight"."""
    torch.manual_seed(3)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens": (VOCAB, HIDDEN),
        "model.norm": (HIDDEN,),
        "lm_head": (VOCAB, HIDDEN),
    }
    for i in range(LAYERS):
        layer = f"model.layers.{i}."
        shapes |= {layer + "input_layernorm": (HIDDEN,), layer + "post_attention_layernorm": (HIDDEN,)}
        shapes |= {layer + f"self_attn.{p}_proj": (HIDDEN, HIDDEN) for p in "qo"}
        shapes |= {layer + f"self_attn.{p}_proj": (KV_HEADS * HEAD_DIM, HIDDEN) for p in "kv"}
        shapes |= {layer + f"mlp.{p}_proj": (INTERMEDIATE, HIDDEN) for p in ("gate", "up")}
        shapes[layer + "mlp.down_proj"] = (HIDDEN, INTERMEDIATE)
    return {name: torch.randn(shape) * 0.1 for name, shape in shapes.items()}


def neighbours(rows: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's convert_hf_to_gguf.py, LlamaModel.permute."""
    return rows.reshape(heads, 2, len(rows) // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def write_gguf(path: Path, weights: dict[str, torch.Tensor], *, rope: list[float] | None = None, **keys: Any) -> Path:
    """The weights as llama.cpp's converter writes them; `keys` add or replace metadata."""
    writer = gguf.GGUFWriter(path, keys.pop("architecture", "llama"))
    writer.add_uint32("llama.block_count", LAYERS)
    writer.add_uint32("llama.context_length", 128)
    writer.add_uint32("llama.embedding_length", HIDDEN)
    writer.add_uint32("llama.feed_forward_length", INTERMEDIATE)
    writer.add_uint32("llama.attention.head_count", HEADS)
    writer.add_uint32("llama.attention.head_count_kv", KV_HEADS)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32("llama.rope.freq_base", 1000.0)
    writer.add_uint32("tokenizer.ggml.eos_token_id", 5)
    writer.add_uint32("tokenizer.ggml.eot_token_id", 6)
    writer.add_array("tokenizer.ggml.tokens", [f"token {i}" for i in range(VOCAB)])
    for key, value in keys.items():
        writer.add_uint32(key, value)
    if rope:
        writer.add_tensor("rope_freqs.weight", np.array(rope, dtype=np.float32))
    for name, weight in weights.items():
        rows = weight.numpy()
        if name.endswith((".q_proj", ".k_proj")):
            rows = neighbours(rows, HEADS if name.endswith(".q_proj") else KV_HEADS)
        writer.add_tensor(gguf_name(name + ".weight"), rows)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_file_gives_every_weight_as_hugging_face_has_it(tmp_path: Path) -> None:
    weights = hf_weights()
    checkpoint = GgufCheckpoint(write_gguf(tmp_path / "tiny.gguf", weights))
    for name, expected in weights.items():
        out = torch.empty(expected.shape)
        checkpoint.read_into(name + ".weight", out)
        assert torch.equal(out, expected), name
    assert checkpoint.unread() == []


def test_a_gguf_file_tells_the_model_s_shape(tmp_path: Path) -> None:
    weights = hf_weights()
    divisors = [1.0, 1.0, 1.5, 2.0, 4.0, 8.0, 8.0, 8.0]
    config = GgufCheckpoint(write_gguf(tmp_path / "untied.gguf", weights, rope=divisors)).config
    assert (config.vocab_size, config.num_kv_heads, config.head_dim, config.max_position) == (VOCAB, 2, 16, 128)
    assert config.eos_ids == {5, 6}
    assert not config.tied_embeddings
    assert config.rope_divisors == tuple(divisors)
    del weights["lm_head"]
    tied = GgufCheckpoint(write_gguf(tmp_path / "tied.gguf", weights)).config
    assert tied == replace(config, tied_embeddings=True, rope_divisors=())
    model = load_model(tmp_path / "tied.gguf", "float32")
    assert model.weights.head is model.weights.embedding


def test_models_that_cannot_be_computed_are_refused_by_what_they_are(tmp_path: Path) -> None:
    weights = hf_weights()
    refusals: list[tuple[dict[str, Any], str]] = [
        ({"architecture": "gemma3"}, "architecture 'gemma3' is not supported, only llama, qwen2, qwen3$"),
        ({"llama.expert_count": 8}, "llama.expert_count=8 is not supported, only 0"),
        ({"llama.attention.causal": 0}, "llama.attention.causal=0 is not supported, only True"),
        ({"llama.rope.dimension_count": 8}, "part of the head"),
        ({"llama.attention.value_length": 8}, "another head size for values"),
        ({"llama.attention.sliding_window": 8, "llama.attention.sliding_window_pattern": 2}, "one boolean for each"),
        ({"split.count": 3}, "one part of a split GGUF model"),
    ]
    for i, (keys, message) in enumerate(refusals):
        with pytest.raises(StartError, match=message):
            GgufCheckpoint(write_gguf(tmp_path / f"{i}.gguf", weights, **keys))
    extra = weights | {"model.layers.1.self_attn.q_norm": torch.ones(HEAD_DIM)}
    with pytest.raises(StartError, match=r"1 weights that its arch.* do not: blk\.1\.attn_q_norm\.weight$"):
        load_model(write_gguf(tmp_path / "extra.gguf", extra), "float32")
    missing = {name: w for name, w in weights.items() if name != "model.layers.1.mlp.up_proj"}
    with pytest.raises(StartError, match=r"no tensor blk\.1\.ffn_up\.weight"):
        load_model(write_gguf(tmp_path / "missing.gguf", missing), "float32")
    narrow = weights | {"model.layers.0.mlp.up_proj": torch.zeros(8, HIDDEN)}
    with pytest.raises(StartError, match=r"up_proj\.weight has shape \(8, 64\), expected \(96, 64\)"):
        load_model(write_gguf(tmp_path / "narrow.gguf", narrow), "float32")


def test_damaged_files_are_refused_in_one_line_wherever_they_break(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf", hf_weights()).read_bytes()
    broken = tmp_path / "broken.gguf"
    ends = [0, 3, 20, 200, 2000, 2500, 3500, len(whole) - 20_000, len(whole) - 200]
    for end in ends:
        broken.write_bytes(whole[:end])
        with pytest.raises(StartError) as refusal:
            load_model(broken, "float32")
        assert "\n" not in str(refusal.value)
    broken.write_bytes(whole[:8] + struct.pack("<Q", 1 << 40) + whole[16:])  # more tensors than bytes
    with pytest.raises(StartError, match="broken"):
        load_model(broken, "float32")
