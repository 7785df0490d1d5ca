"""Whole models on the native kernels, against the plain torch decoder on the same random checkpoints."""

from __future__ import annotations

import fcntl
import gc
import json
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from headrace.base.errors import StartError
from headrace.engine.core.sampling_plan import SamplingPlan
from headrace.engine.core.step import Computed, SequenceSlice
from headrace.engine.kernels.cpu.library import LIBRARY, LIBRARY_VARIABLE, Unavailable, load_library
from headrace.engine.layers.sampler import NOT_NUMBERS
from headrace.engine.models.loader import load_model, open_checkpoint
from headrace.engine.models.weights import load_weights
from headrace.engine.packed import cache
from headrace.engine.packed.file import Damaged, open_file
from headrace.engine.packed.pruning import MOST_BYTES_VARIABLE
from headrace.engine.worker.assembly import assemble
from headrace.engine.worker.backend import Backend, TokenMask
from headrace.engine.worker.backend_native import NativeBackend, NotNative, load_native_backend
from headrace.engine.worker.config import KvCacheDtype, WorkerConfig

try:
    load_library()
except Unavailable as reason:
    pytest.skip(str(reason), allow_module_level=True)

VOCAB, BLOCK = 131, 16
GREEDY = SamplingPlan(max_tokens=1)
LOGPROBS = SamplingPlan(max_tokens=1, logprobs=VOCAB)
BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 72, "intermediate_size": 100, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 24, "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "eos_token_id": 3, "rope_theta": 1000.0,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "llama, biases, its own head": {
        "architectures": ["LlamaForCausalLM"], "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False,
    },
    "mistral, window": {"architectures": ["MistralForCausalLM"], "sliding_window": 19},
    "qwen2, yarn": {
        "architectures": ["Qwen2ForCausalLM"],
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    },
    "qwen3, upper layer slides": {
        "architectures": ["Qwen3ForCausalLM"], "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2,
    },
}  # fmt: skip


def write_model(folder: Path, changes: Mapping[str, Any], seed: int = 0) -> Path:
    """A random checkpoint with all the weights that the loader asks for."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**BASE, **changes}))
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, torch.Tensor] = {}

    class Recorder:
        config = _config(folder)

        def read_into(self, name: str, out: torch.Tensor) -> None:
            scale = out.shape[-1] ** -0.5 if out.dim() == 2 else 0.3
            made = torch.randn(out.shape, generator=generator) * scale + (1.0 if "norm" in name else 0.0)
            weights[name] = (made * 4 if "embed" in name else made).clone()
            out.copy_(weights[name])

        def unread(self) -> Sequence[str]:
            return ()

    load_weights(Recorder(), torch.float32)
    save_file(weights, folder / "model.safetensors")
    return folder


def _config(folder: Path) -> Any:
    save_file({"unused": torch.zeros(1)}, folder / "model.safetensors")
    return open_checkpoint(folder).config


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cache.FOLDER_VARIABLE, str(tmp_path / "cache"))


def native(path: Path, precision: str = "bfloat16", **changes: Any) -> NativeBackend:
    config = WorkerConfig(model=str(path), precision=precision, kv_cache_memory_bytes=4 << 20)
    backend = load_native_backend(replace(config, **changes))
    assert isinstance(backend, NativeBackend)
    return backend


def piece(
    known: Sequence[int], start: int = 0, end: int | None = None, *, id: int = 0, plan: SamplingPlan = GREEDY
) -> SequenceSlice:  # fmt: skip
    """Tokens `start` to `end` - 1 of a sequence with 16 blocks of its own."""
    end = len(known) if end is None else end
    return SequenceSlice(
        sequence_id=id, token_ids=known[start:end], start=start, block_table=range(16 * id, 16 * id + 16),
        samples=end == len(known), plan=plan, known_token_ids=known, prompt_length=len(known),
    )  # fmt: skip


def run(backend: Backend, *pieces: SequenceSlice, masks: Mapping[int, TokenMask] | None = None) -> list[Computed]:
    return backend.execute(pieces, masks or {})


def prompt_of(length: int, seed: int = 1) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def logprobs(computed: Computed) -> np.ndarray:
    """Of all tokens, by id."""
    assert computed.logprobs is not None
    found = np.zeros(VOCAB)
    for likelihood in computed.logprobs.top:
        found[likelihood.token_id] = likelihood.logprob
    return found


def expected_logprobs(path: Path, known: list[int]) -> np.ndarray:
    """After every token, by the plain decoder in float32."""
    model = load_model(path, "float32")
    whole = replace(piece(known), block_table=range(16))
    with torch.inference_mode():
        hidden = model.hidden([whole], model.new_cache(256), BLOCK)
        return torch.log_softmax(model.logits(hidden), dim=-1).numpy()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("precision", "kept", "least"),
    [
        ("bfloat16", KvCacheDtype.AUTO, 0.9995), ("bfloat16", KvCacheDtype.INT8, 0.999),
        ("int8", KvCacheDtype.AUTO, 0.998), ("int4", KvCacheDtype.AUTO, 0.95),
    ],
)  # fmt: skip
def test_a_model_says_what_the_plain_decoder_says(
    tmp_path: Path, name: str, precision: str, kept: KvCacheDtype, least: float
) -> None:
    path = write_model(tmp_path / "model", MODELS[name])
    known = prompt_of(75)
    expected = expected_logprobs(path, known)
    backend = native(path, precision, kv_cache_dtype=kept)
    agreement = []
    for length in (1, 2, 16, 17, 31, 32, 33, 75):
        (computed,) = run(backend, piece(known[:length], plan=LOGPROBS))
        agreement.append(np.corrcoef(logprobs(computed), expected[length - 1])[0, 1])
    assert min(agreement) > least


@pytest.mark.parametrize("kept", list(KvCacheDtype))
@pytest.mark.parametrize("precision", ["bfloat16", "int8", "int4"])
@pytest.mark.parametrize("name", ["llama", "qwen3, upper layer slides"])
def test_an_answer_is_the_same_to_the_bit_in_any_batch_and_any_chunks(
    tmp_path: Path, name: str, precision: str, kept: KvCacheDtype
) -> None:
    backend = native(write_model(tmp_path / "model", MODELS[name]), precision, kv_cache_dtype=kept)
    known, others = prompt_of(50), [prompt_of(40, seed) for seed in (2, 3)]
    (alone,) = run(backend, piece(known, plan=LOGPROBS))
    run(backend, piece(known, 0, 7), piece(others[0], 0, 39, id=1))
    run(backend, piece(others[1], 0, 1, id=2), piece(known, 7, 33))
    run(backend, piece(known, 33, 49), piece(others[0], 39, id=1, plan=LOGPROBS))
    beside = run(backend, piece(others[1], 1, id=2), piece(known, 49, plan=LOGPROBS), piece(others[0], 39, id=1))
    assert beside[1] == alone


def test_a_greedy_token_is_the_first_of_the_likeliest(tmp_path: Path) -> None:
    backend = native(write_model(tmp_path / "model", MODELS["llama"]))
    for seed in range(8):
        known = prompt_of(9, seed)
        fused, whole = (run(backend, piece(known, plan=plan))[0] for plan in (GREEDY, LOGPROBS))
        assert fused.token_id == whole.token_id == int(logprobs(whole).argmax())


def test_a_step_has_room_for_any_number_of_sequences(tmp_path: Path) -> None:
    backend = native(write_model(tmp_path / "model", MODELS["llama"]))
    known = prompt_of(3)
    alone = run(backend, piece(known))
    assert run(backend, *(replace(piece(known), sequence_id=id, block_table=[id]) for id in range(200))) == alone * 200
    assert run(backend, piece(known)) == alone


def test_a_step_mixes_greedy_drawn_masked_and_silent_slices(tmp_path: Path) -> None:
    backend = native(write_model(tmp_path / "model", MODELS["llama"]))
    drawn = SamplingPlan(max_tokens=1, temperature=1.5, seed=4)
    mask = np.zeros(-(-VOCAB // 32), dtype=np.int32)
    mask[2] = 1 << 5
    pieces = [
        piece(prompt_of(5, 1), id=0), piece(prompt_of(20, 2), 0, 10, id=1), piece(prompt_of(6, 3), id=2, plan=drawn),
        piece(prompt_of(7, 4), id=3),
    ]  # fmt: skip
    together = run(backend, *pieces, masks={3: mask})
    assert together[1] == Computed()
    assert together[3].token_id == 69
    assert [run(backend, one)[0] for one in (pieces[0], pieces[2])] == [together[0], together[2]]


def test_prompt_logprobs_are_those_of_each_prefix(tmp_path: Path) -> None:
    backend = native(write_model(tmp_path / "model", MODELS["llama"]))
    known = prompt_of(80)
    plan = SamplingPlan(max_tokens=1, prompt_logprobs=0, logprobs=VOCAB)
    first, second = (run(backend, piece(known, a, b, plan=plan))[0] for a, b in ((0, 70), (70, 80)))
    found = [entry.token for entry in (*first.prompt_logprobs, *second.prompt_logprobs)]
    assert [entry.token_id for entry in found] == known[1:]
    for position in (1, 15, 64, 79):
        (prefix,) = run(backend, piece(known[:position], id=1, plan=LOGPROBS))
        assert logprobs(prefix)[known[position]] == pytest.approx(found[position - 1].logprob, abs=1e-6)


@pytest.mark.parametrize(
    "plan",
    [
        GREEDY, LOGPROBS, SamplingPlan(max_tokens=1, temperature=1.2, seed=5, frequency_penalty=1.5, logprobs=2),
        SamplingPlan(max_tokens=1, temperature=0.9, top_k=20, seed=6),
    ],
    ids=["greedy", "logprobs", "penalised", "drawn"],
)  # fmt: skip
def test_guesses_change_how_many_steps_it_takes_and_nothing_else(tmp_path: Path, plan: SamplingPlan) -> None:
    backend = native(write_model(tmp_path / "model", MODELS["llama"]))
    prompt, others = prompt_of(40), prompt_of(7, 2)
    known, answer = list(prompt), []
    for start in [0, *range(40, 46)]:
        (computed,) = run(backend, replace(piece(known, start, plan=plan), prompt_length=40))
        answer.append(computed)
        assert computed.token_id is not None
        known.append(computed.token_id)
    tokens = known[40:]
    for true in range(5):
        guesses = tokens[1 : 1 + true] + [(tokens[1 + true] + 1) % VOCAB, 3][: 5 - true]
        guessing = replace(
            piece([*prompt, tokens[0], *guesses], 40, plan=plan), known_token_ids=[*prompt, tokens[0]],
            prompt_length=40, drafted=len(guesses),
        )  # fmt: skip
        run(backend, piece(prompt))
        _, found = run(backend, piece(others, id=1), guessing)
        assert [replace(found, more=()), *found.more] == answer[1 : 2 + true]


@pytest.mark.parametrize("kept", list(KvCacheDtype))
def test_a_copied_block_continues_as_the_original(tmp_path: Path, kept: KvCacheDtype) -> None:
    backend = native(write_model(tmp_path / "model", MODELS["llama"]), kv_cache_dtype=kept)
    known = prompt_of(30)
    run(backend, piece(known, 0, 29))
    backend.copy_blocks([(0, 200), (1, 7), (7, 201)])
    copy = replace(piece(known, 29, plan=LOGPROBS, id=5), block_table=[200, 201])
    assert run(backend, copy) == run(backend, piece(known, 29, plan=LOGPROBS))


def test_memory_is_counted_in_whole_blocks(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model", MODELS["llama"])
    per_block = 3 * 2 * BLOCK * (24 + 32) * 2  # layers, KV heads, tokens, a key and a padded value, bf16
    assert native(path, kv_cache_memory_bytes=7 * per_block - 1).num_blocks == 6
    assert native(path, kv_cache_memory_bytes=14 * per_block, block_size=32).num_blocks == 7
    with pytest.raises(StartError, match=f"at least {per_block}"):
        native(path, kv_cache_memory_bytes=per_block - 1)
    per_block = 3 * 2 * (BLOCK * (24 + 32) + 2 * BLOCK * 2)  # a byte each, and two scales for every token
    kept = KvCacheDtype.INT8
    assert native(path, kv_cache_memory_bytes=9 * per_block - 1, kv_cache_dtype=kept).num_blocks == 8


def test_a_sequence_that_is_not_numbers_ends_alone_and_leaves_nothing_behind(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model", {**MODELS["llama"], "tie_word_embeddings": False})
    clean, known, good = native(path), prompt_of(40), prompt_of(20, 2)
    expected = run(clean, piece(good, id=1, plan=LOGPROBS))
    backend = native(path)
    table = backend._model._model.array("embedding")
    assert table is not None
    broken = table.copy().view(np.uint16).reshape(VOCAB, -1)
    broken[5] = 0x7FC0  # a NaN
    backend._model._model._data = _patched(backend, broken)
    backend = NativeBackend(backend._model._model, backend._model._pool, WorkerConfig())
    known[3] = 5
    bad, fine = run(backend, piece(known), piece(good, id=1, plan=LOGPROBS))
    assert bad == Computed(problem=NOT_NUMBERS)
    assert [fine] == expected
    # The same blocks and rows, used again.
    assert run(backend, replace(piece(good, plan=LOGPROBS), block_table=range(16))) == expected


def _patched(backend: NativeBackend, embedding: np.ndarray) -> np.ndarray:
    model = backend._model._model
    data = model._data.copy()
    place = model._places["embedding"]
    data[place.offset : place.offset + place.size] = embedding.view(np.uint8).reshape(-1)
    return data


def test_what_the_kernels_cannot_run_goes_to_torch_or_is_refused(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model", MODELS["llama"])
    config = WorkerConfig(model=str(path), precision="bfloat16", block_size=8)
    with pytest.raises(NotNative, match="block_size=8"):
        load_native_backend(config)
    with pytest.raises(NotNative, match="float32"):
        load_native_backend(replace(config, precision="float32", block_size=16))
    with pytest.raises(StartError, match="int8 needs the native CPU kernels"):
        load_native_backend(replace(config, precision="int8"))
    for precision in ("bfloat16", "float32"):
        with pytest.raises(StartError, match="kv_cache_dtype=int8 needs the native CPU kernels"):
            load_native_backend(replace(config, precision=precision, kv_cache_dtype=KvCacheDtype.INT8))


def test_without_the_library_bfloat16_is_torchs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_model(tmp_path / "model", MODELS["llama"])
    monkeypatch.setenv(LIBRARY_VARIABLE, str(tmp_path / "none.so"))
    config = WorkerConfig(model=str(path), precision="bfloat16", kv_cache_memory_bytes=4 << 20)
    _, ready = assemble(config)
    assert ready.computes_on.startswith("torch bfloat16: the native CPU kernels cannot: there is no none.so")
    monkeypatch.delenv(LIBRARY_VARIABLE)
    _, ready = assemble(config)
    assert ready.computes_on.startswith("native kernels, bfloat16")


# ---- the cache of packed models ----


def packed_files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "packed").glob("*.bin"))


def test_the_second_start_maps_the_first_ones_file_and_answers_the_same(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model", MODELS["llama"])
    known = prompt_of(20)
    first = run(native(path), piece(known, plan=LOGPROBS))
    (file,) = packed_files(tmp_path)
    changed_at = file.stat().st_mtime_ns
    assert run(native(path), piece(known, plan=LOGPROBS)) == first
    assert packed_files(tmp_path) == [file]
    assert file.stat().st_mtime_ns == changed_at


def test_the_second_start_needs_no_torch(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model", MODELS["llama"])
    native(path, "int8")
    program = (
        "import sys; from headrace.engine.worker.config import WorkerConfig;"
        "from headrace.engine.worker.assembly import assemble;"
        f"assemble(WorkerConfig(model={str(path)!r}, precision='int8', kv_cache_memory_bytes=4 << 20));"
        "assert 'torch' not in sys.modules"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr


def test_other_weights_and_precisions_are_other_files(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model", MODELS["llama"])
    known = prompt_of(20)
    before = run(native(path), piece(known, plan=LOGPROBS))
    native(path, "int8")
    write_model(path, MODELS["llama"], seed=9)
    assert run(native(path), piece(known, plan=LOGPROBS)) != before
    write_model(path, {**MODELS["llama"], "rope_theta": 99.0}, seed=9)
    native(path)
    assert len(packed_files(tmp_path)) == 4


@pytest.mark.parametrize("damage", [b"", b"hrpacked", b"x" * 9000])
def test_a_damaged_file_is_packed_again(tmp_path: Path, damage: bytes) -> None:
    path = write_model(tmp_path / "model", MODELS["llama"])
    known = prompt_of(20)
    first = run(native(path), piece(known, plan=LOGPROBS))
    (file,) = packed_files(tmp_path)
    file.unlink()
    file.write_bytes(damage)
    with pytest.raises(Damaged):
        open_file(file)
    assert run(native(path), piece(known, plan=LOGPROBS)) == first
    open_file(file)


def test_a_file_that_is_cut_off_is_damaged(tmp_path: Path) -> None:
    native(write_model(tmp_path / "model", MODELS["llama"]))
    (file,) = packed_files(tmp_path)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(Damaged, match="beyond the end"):
        open_file(file)


def test_engines_that_start_at_once_pack_once(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model", MODELS["llama"])
    library = Path(load_library()._name)  # not LIBRARY: the run under AddressSanitizer brings its own
    key = cache._key(path, "bfloat16", tmp_path / "cache", library)
    lock = tmp_path / "cache" / "packed" / f"{key}.lock"
    lock.parent.mkdir(parents=True)
    started: list[NativeBackend] = []
    with open(lock, "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        threads = [threading.Thread(target=lambda: started.append(native(path))) for _ in range(2)]
        for thread in threads:
            thread.start()
        threads[0].join(0.2)
        assert not started
        assert not packed_files(tmp_path)
    for thread in threads:
        thread.join(60)
    assert len(started) == 2
    assert len(list(lock.parent.iterdir())) == 2  # the file and its lock


def test_a_new_file_takes_the_room_of_idle_ones_but_not_of_a_running_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    path = write_model(tmp_path / "model", MODELS["llama"])
    idle = native(path, "int4")
    (idle_file,) = packed_files(tmp_path)
    del idle
    gc.collect()  # as if its process had ended
    running = native(path, "int8")
    (running_file,) = set(packed_files(tmp_path)) - {idle_file}
    monkeypatch.setenv(MOST_BYTES_VARIABLE, "1")
    native(path)
    assert idle_file not in packed_files(tmp_path)
    assert running_file in packed_files(tmp_path)
    assert len(packed_files(tmp_path)) == 2
    assert run(running, piece(prompt_of(5)))[0].token_id is not None


def test_where_nothing_can_be_kept_the_model_runs_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_model(tmp_path / "model", MODELS["llama"])
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv(cache.FOLDER_VARIABLE, str(tmp_path / "file"))
    assert run(native(path), piece(prompt_of(5)))[0].token_id is not None


def test_a_checkpoint_that_fails_leaves_no_file(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model", MODELS["llama"])
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 4}))
    with pytest.raises(StartError, match=r"no weight model\.layers\.3"):
        native(path)
    assert [file.suffix for file in (tmp_path / "cache" / "packed").iterdir()] == [".lock"]


def test_packed_files_of_other_code_are_never_read(tmp_path: Path) -> None:
    """A file of an older layout, read as one of the new, gives fluent nonsense instead of an error."""
    ours = tmp_path / "ours.so"
    ours.write_bytes(LIBRARY.read_bytes())
    rebuilt = tmp_path / "rebuilt.so"
    rebuilt.write_bytes(LIBRARY.read_bytes() + b"another build")
    assert cache.code_digest(ours) == cache.code_digest(LIBRARY)
    assert cache.code_digest(rebuilt) != cache.code_digest(LIBRARY)
