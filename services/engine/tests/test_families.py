"""Every family and every way its members differ, on random tiny checkpoints, against transformers."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import gguf
import gguf.quants
import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.engine.core.sampling_plan import SamplingPlan
from headrace.engine.core.step import SequenceSlice
from headrace.engine.models.decoder import Decoder
from headrace.engine.models.loader import load_model

BLOCK, VOCAB, LAYERS, ANSWER = 4, 131, 3, 30
WHOLE = 1000
CHUNKS = (1, 7, 16, WHOLE)
PLAN = SamplingPlan(max_tokens=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One kind of model: transformers' class prefix, GGUF architecture, and what its config sets."""

    family: str
    arch: str
    window: int = 0
    changes: dict[str, Any] = field(default_factory=dict)


QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 9}
VARIANTS = {
    "llama": Variant(family="Llama", arch="llama"),
    "llama with biases": Variant(family="Llama", arch="llama", changes={"attention_bias": True, "mlp_bias": True}),
    "mistral": Variant(family="Mistral", arch="llama", changes={"sliding_window": None}),
    "mistral, window": Variant(family="Mistral", arch="llama", window=9, changes={"sliding_window": 9}),
    "qwen2": Variant(family="Qwen2", arch="qwen2"),
    "qwen2, upper layers slide": Variant(family="Qwen2", arch="qwen2", window=9,
                                         changes={**QWEN_WINDOW, "max_window_layers": 1}),
    "qwen3": Variant(family="Qwen3", arch="qwen3"),
    "qwen3, middle layer slides, biases": Variant(
        family="Qwen3", arch="qwen3", window=9,
        changes={**QWEN_WINDOW, "attention_bias": True,
                 "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    ),
}  # fmt: skip
HEADS = {
    "1 KV head": {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 12},
    "as many KV heads": {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 16},
    "3 to 1, heads of 10": {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10},
}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 800.0, "factor": 4.0, "original_max_position_embeddings": 48}
ROPES: dict[str, dict[str, Any]] = {
    "plain": {"rope_type": "default", "rope_theta": 1000.0},
    "linear": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1000.0, "factor": 2.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn, all set": {**YARN, "beta_fast": 8.0, "beta_slow": 2.0, "truncate": False, "mscale": 1.0,
                      "mscale_all_dim": 0.5},
    "yarn, own attention factor": {**YARN, "attention_factor": 0.7},
}  # fmt: skip
PROMPTS = [
    torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(length)).tolist() for length in (1, 23, 41)
]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield
    torch.set_num_threads(threads)


def random_peer(
    variant: Variant, heads: dict[str, int], rope: dict[str, Any], *, tied: bool, hidden: int = 48, inner: int = 100
) -> Any:
    """A random model of transformers, with biases and norms that are not at their trivial start."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # whatever transformers finds worth saying about tiny models
        import transformers

        config = getattr(transformers, f"{variant.family}Config")(
            vocab_size=VOCAB, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=LAYERS, **heads,
            max_position_embeddings=192, rms_norm_eps=1e-5, initializer_range=1.4 / hidden**0.5, eos_token_id=[7, 9],
            tie_word_embeddings=tied, rope_parameters=dict(rope), **variant.changes,
        )  # fmt: skip
        torch.manual_seed(1)
        with torch.inference_mode(False):
            model: Any = getattr(transformers, f"{variant.family}ForCausalLM")(config)
    for name, weight in model.named_parameters():
        if name.endswith((".bias", "norm.weight")):
            weight.copy_(torch.randn(weight.shape) * 0.3 + (0.0 if name.endswith(".bias") else 1.0))
    return model.eval()


def save(peer: Any, folder: Path, **options: Any) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peer.save_pretrained(folder, **options)
    return folder


def piece(sequence: int, tokens: Sequence[int], start: int, table: Sequence[int]) -> SequenceSlice:
    return SequenceSlice(
        sequence_id=sequence, token_ids=tokens, start=start, block_table=table, samples=True, plan=PLAN
    )  # fmt: skip


def greedy(model: Decoder, chunk: int) -> list[tuple[list[int], Tensor]]:
    """Prompts and greedy answers, with the logits after every token but the last.

    All prompts are one batch over shuffled blocks, cut into chunks of `chunk`, each decoding as soon as it can.
    """
    each, count = -(-(max(map(len, PROMPTS)) + ANSWER) // BLOCK), len(PROMPTS)
    blocks = torch.randperm(count * each, generator=torch.Generator().manual_seed(1)).tolist()
    cache = model.new_cache(len(blocks) * BLOCK)
    cache.keys.fill_(torch.nan)  # whoever reads what nobody wrote shows it
    cache.values.fill_(torch.nan)
    known, logits = [list(prompt) for prompt in PROMPTS], [torch.empty(0, VOCAB) for _ in PROMPTS]
    while True:
        new = {i: known[i][len(rows) : len(rows) + chunk] for i, rows in enumerate(logits)}
        new = {i: tokens for i, tokens in new.items() if len(logits[i]) < len(PROMPTS[i]) + ANSWER - 1}
        if not new:
            return list(zip(known, logits, strict=True))
        batch = [piece(i, tokens, len(logits[i]), blocks[i::count]) for i, tokens in new.items()]
        parts = model.logits(model.hidden(batch, cache, BLOCK)).split([len(tokens) for tokens in new.values()])
        for i, part in zip(new, parts, strict=True):
            logits[i] = torch.cat((logits[i], part))
            if len(logits[i]) == len(known[i]):
                known[i].append(int(part[-1].argmax()))


def assert_computes_as(model: Decoder, peer: Any, chunks: Sequence[int] = CHUNKS) -> None:
    for chunk in chunks:
        for (tokens, logits), prompt in zip(greedy(model, chunk), PROMPTS, strict=True):
            # The peer sees the whole answer at once: by induction its own greedy answer is the same iff this holds.
            expected = peer(torch.tensor([tokens[:-1]]), use_cache=False).logits[0]
            assert len(tokens) == len(prompt) + ANSWER
            assert tokens[len(prompt) :] == expected[len(prompt) - 1 :].argmax(-1).tolist()
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


MATRIX = [
    pytest.param(variant, heads, rope, tied, id=f"{variant}; {heads}; {rope}; {'tied' if tied else 'untied'}")
    for variant, heads, rope, tied in product(VARIANTS, HEADS, ROPES, (True, False))
]


@pytest.mark.parametrize(("variant", "heads", "rope", "tied"), MATRIX)
def test_a_folder_computes_what_transformers_computes(
    tmp_path: Path, variant: str, heads: str, rope: str, tied: bool
) -> None:
    peer = random_peer(VARIANTS[variant], HEADS[heads], ROPES[rope], tied=tied)
    model = load_model(save(peer, tmp_path), "float32")
    assert (model.weights.head is model.weights.embedding) == tied
    assert model.config.eos_ids == {7, 9}
    assert any(model.config.windows) == bool(VARIANTS[variant].window)
    assert_computes_as(model, peer, (7, WHOLE) if tied else CHUNKS)


@pytest.mark.parametrize("variant", VARIANTS)
def test_bfloat16_stays_close_to_float32(tmp_path: Path, variant: str) -> None:
    peer = random_peer(VARIANTS[variant], HEADS["3 to 1, heads of 10"], YARN, tied=False)
    exact, rounded = (load_model(save(peer, tmp_path), precision) for precision in ("float32", "bfloat16"))
    assert {rounded.weights.head.dtype, rounded.new_cache(1).keys.dtype} == {torch.bfloat16}
    first, second = (
        m.logits(m.hidden([piece(0, PROMPTS[2], 0, range(11))], m.new_cache(44), BLOCK)) for m in (exact, rounded)
    )
    with torch.inference_mode(False):
        theirs = peer.bfloat16()(torch.tensor([PROMPTS[2]]), use_cache=False).logits[0].detach().float()
    # A random model magnifies every rounding; a trained one is compared in test_shipped_model.py.
    ours_off, theirs_off = ((logits - first).norm() / first.norm() for logits in (second, theirs))
    assert ours_off < min(0.1, 1.5 * theirs_off)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("variant", ["llama", "qwen2", "qwen3"])
def test_a_sharded_half_precision_folder_loads_as_the_float32_of_its_values(
    tmp_path: Path, dtype: torch.dtype, variant: str
) -> None:
    peer = random_peer(VARIANTS[variant], HEADS["3 to 1, heads of 10"], ROPES["plain"], tied=False)
    for weight in peer.parameters():  # not peer.to(dtype): that would round the rotary frequencies as well
        weight.copy_(weight.to(dtype))
    stored = {name: weight.to(dtype) for name, weight in peer.state_dict().items()}
    save(peer, tmp_path, state_dict=stored, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_computes_as(load_model(tmp_path, "float32"), peer, [16])


def pairs_adjacent(rows: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's convert_hf_to_gguf.py, LlamaModel.permute."""
    return rows.reshape(heads, 2, len(rows) // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def llama3_factors(rope: dict[str, Any], head_dim: int) -> np.ndarray:
    """llama.cpp's convert_hf_to_gguf.py, LlamaModel.generate_extra_tensors."""
    factors = []
    context, low, high = (rope[k] for k in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"))
    for i in range(0, head_dim, 2):
        wavelength = 2 * np.pi * rope["rope_theta"] ** (i / head_dim)
        smooth = (context / wavelength - low) / (high - low)
        between = 1 / ((1 - smooth) / rope["factor"] + smooth)
        factors.append(1 if wavelength < context / high else rope["factor"] if wavelength > context / low else between)
    return np.array(factors, dtype=np.float32)


def write_gguf(path: Path, variant: Variant, peer: Any, packed: dict[str, Any] | None = None) -> Path:
    """`peer` as llama.cpp's converter writes it; names are gguf's own. `packed`: quantised rows, and their kind."""
    c, arch, packed = peer.config, variant.arch, dict(packed or {})
    head_dim = peer.model.layers[0].self_attn.head_dim
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(LAYERS)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_eos_token_id(7)
    writer.add_eot_token_id(9)
    rope = c.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(rope, head_dim))
    if variant.window:
        writer.add_sliding_window(variant.window)
        if variant.family != "Mistral":
            writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in c.layer_types])
    names = gguf.get_tensor_name_map({v: k for k, v in gguf.MODEL_ARCH_NAMES.items()}[arch], LAYERS)
    for name, weight in peer.state_dict().items():
        if name == "lm_head.weight" and c.tie_word_embeddings:
            continue
        rows, kind = packed.get(name, (weight.numpy(), None))
        if arch == "llama" and (".q_proj." in name or ".k_proj." in name):
            rows = pairs_adjacent(rows, c.num_attention_heads if ".q_proj." in name else c.num_key_value_heads)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), rows.copy(), raw_dtype=kind)
        assert names.get_name(name, try_suffixes=(".weight", ".bias")) is not None
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def assert_layers_agree(model: Decoder, peer: Any) -> None:
    """After each layer but the last, whose output is normalised in transformers and shows in the logits."""
    prompt = PROMPTS[2]
    depths = peer(torch.tensor([prompt]), output_hidden_states=True, use_cache=False).hidden_states
    for depth in range(1, LAYERS):
        config = replace(model.config, num_layers=depth, windows=model.config.windows[:depth])
        shallow = Decoder(config, replace(model.weights, layers=model.weights.layers[:depth]))
        hidden = shallow.hidden([piece(0, prompt, 0, range(11))], shallow.new_cache(44), BLOCK)
        assert torch.cosine_similarity(hidden, depths[depth][0]).min() > 0.9999


GGUF_ROPES = ("plain", "linear", "llama3", "yarn")


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_gguf_file_computes_what_transformers_computes(tmp_path: Path, variant: str, heads: str) -> None:
    for i, (rope, tied) in enumerate(zip(GGUF_ROPES, (True, False, True, False), strict=True)):
        peer = random_peer(VARIANTS[variant], HEADS[heads], ROPES[rope], tied=tied)
        model = load_model(write_gguf(tmp_path / f"{i}.gguf", VARIANTS[variant], peer), "float32")
        assert (model.weights.head is model.weights.embedding) == tied
        assert model.config.eos_ids == {7, 9}
        assert_layers_agree(model, peer)
        assert_computes_as(model, peer, [16])


KIND = gguf.GGMLQuantizationType


def quantised(weight: Tensor, kind: Any) -> np.ndarray:
    """Rows of packed blocks near `weight`; of any values where the gguf library only reads the kind."""
    if kind not in (KIND.Q4_K, KIND.Q6_K):
        packed: np.ndarray = gguf.quants.quantize(weight.numpy(), kind)
        return packed
    weights, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(weight.numel()).integers(0, 256, (weight.numel() // weights, size), dtype=np.uint8)
    scales = [2e-4, 3e-3] if kind == KIND.Q4_K else [1e-4]  # of values around zero, as large as random weights
    first = 0 if kind == KIND.Q4_K else size - 2
    blocks[:, first : first + 2 * len(scales)] = np.array(scales, dtype=np.float16).view(np.uint8)
    return blocks.reshape(len(weight), -1)


@pytest.mark.parametrize("kind", [KIND.Q8_0, KIND.Q4_0, KIND.Q4_1, KIND.Q4_K, KIND.Q6_K, KIND.F16, KIND.BF16])
@pytest.mark.parametrize("variant", ["llama", "qwen2"])
def test_quantised_projections_with_grouped_queries_are_cut_and_ordered_rightly(
    tmp_path: Path, kind: Any, variant: str
) -> None:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    peer = random_peer(VARIANTS[variant], heads, ROPES["plain"], tied=False, hidden=256, inner=256)
    packed = {}
    for name, weight in peer.named_parameters():
        if weight.dim() == 2:
            rows = quantised(weight, kind)
            packed[name] = rows, kind
            weight.copy_(torch.from_numpy(gguf.quants.dequantize(rows, kind)))
    model = load_model(write_gguf(tmp_path / "model.gguf", VARIANTS[variant], peer, packed), "float32")
    assert_layers_agree(model, peer)
    assert_computes_as(model, peer, [16])
