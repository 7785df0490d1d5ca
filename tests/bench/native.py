"""The native CPU kernels against torch on the shipped model: ``python tests/bench/native.py``.

All backends live in one process and take turns (A B C … A B C …), so that whatever else the machine does hits all of
them. Printed are milliseconds per step, as median and spread over the rounds, and each round's ratio to torch float32.
A second pass runs beside one busy process. Nothing here decides a test.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from headrace.bundle.shipped import shipped_model_path
from headrace.engine.core.sampling_plan import SamplingPlan
from headrace.engine.core.step import SequenceSlice
from headrace.engine.worker.backend import Backend
from headrace.engine.worker.config import KvCacheDtype, WorkerConfig

CONTEXT, BLOCK = 200, 16
GREEDY = SamplingPlan(max_tokens=1)
NATIVE = ("bfloat16", "int8", "int4")
# Steps of each round, by streams (and the context they are at, if not CONTEXT).
STEPS = {
    "decode 1": 30,
    "decode 8": 15,
    "decode 32": 8,
    "decode 32 at 512": 4,
    "decode 1 at 4000": 10,
    "prefill 512": 1,
}


def load(path: Path) -> dict[str, Backend]:
    """Every way to compute the model, by name."""
    from headrace.engine.worker.backend_model import load_model_backend
    from headrace.engine.worker.backend_native import load_native_backend

    config = WorkerConfig(model=str(path), kv_cache_memory_bytes=1 << 30)
    backends: dict[str, Backend] = {}
    for precision in ("float32", "bfloat16"):
        backends[f"torch {precision}"] = load_model_backend(replace(config, precision=precision))
    for precision in NATIVE:
        backends[f"native {precision}"] = load_native_backend(replace(config, precision=precision))
    kept = replace(config, precision="bfloat16", kv_cache_dtype=KvCacheDtype.INT8)
    backends["native bfloat16, int8 KV"] = load_native_backend(kept)
    for backend in backends.values():
        backend.warm_up()
    return backends


def piece(sequence: int, start: int, count: int) -> SequenceSlice:
    blocks = -(-(start + count) // BLOCK)
    first = sequence * blocks
    tokens = [(17 * i + 31 * sequence) % 40_000 for i in range(start, start + count)]
    return SequenceSlice(
        sequence_id=sequence, token_ids=tokens, start=start, block_table=range(first, first + blocks), samples=True,
        plan=GREEDY,
    )  # fmt: skip


def step_of(kind: str) -> list[SequenceSlice]:
    """One step of `kind`. What older positions hold does not change how long it takes."""
    name, number, *place = kind.split()
    if name == "prefill":
        return [piece(0, 0, int(number))]
    context = int(place[1]) if place else CONTEXT
    return [piece(sequence, context, 1) for sequence in range(int(number))]


def milliseconds(backend: Backend, kind: str) -> float:
    slices = step_of(kind)
    started = time.perf_counter()
    for _ in range(STEPS[kind]):
        backend.execute(slices, {})
    return (time.perf_counter() - started) / STEPS[kind] * 1e3


def compare(backends: dict[str, Backend], rounds: int, title: str) -> dict[str, dict[str, list[float]]]:
    """Milliseconds per step of every round, by kind of step and backend."""
    found: dict[str, dict[str, list[float]]] = {}
    print(f"\n{title}: ms per step, median (least to most) and the ratio to torch float32 in the same round")
    for kind in STEPS:
        times: dict[str, list[float]] = {name: [] for name in backends}
        for _ in range(rounds):
            for name, backend in backends.items():
                times[name].append(milliseconds(backend, kind))
        found[kind] = times
        for name, values in times.items():
            ratios = [base / value for base, value in zip(times["torch float32"], values, strict=True)]
            spread = f"{statistics.median(values):8.2f} ({min(values):.2f} to {max(values):.2f})"
            ratio = f"{statistics.median(ratios):5.2f} x ({min(ratios):.2f} to {max(ratios):.2f})"
            print(f"  {kind:16} {name:24} {spread:32} {ratio}")
    return found


def step_times(backend: Backend, kind: str, count: int) -> list[float]:
    """Milliseconds of single steps, in ascending order."""
    slices, times = step_of(kind), []
    for _ in range(count):
        started = time.perf_counter()
        backend.execute(slices, {})
        times.append((time.perf_counter() - started) * 1e3)
    return sorted(times)


def tails(backends: dict[str, Backend], names: Sequence[str], count: int) -> dict[str, dict[str, float]]:
    """The median and 99th percentile of single decode steps with 8 streams."""
    found = {}
    for name in names:
        times = step_times(backends[name], "decode 8", count)
        found[name] = {"median": times[count // 2], "p99": times[count * 99 // 100]}
        print(f"  {name:16} decode 8: median {found[name]['median']:.2f}, p99 {found[name]['p99']:.2f} ms")
    return found


def beside_busy_process(work: Callable[[], Any]) -> Any:
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        return work()
    finally:
        busy.kill()
        busy.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the numbers here, too")
    options = parser.parse_args()
    backends = load(shipped_model_path())
    cores = len(os.sched_getaffinity(0))
    print(f"{platform.processor() or platform.machine()}, {cores} cores, load {os.getloadavg()[0]:.1f}")
    tailed = ("torch float32", "native bfloat16", "native int8")
    result = {
        "quiet": compare(backends, options.rounds, "as the machine is"),
        "quiet tails": tails(backends, tailed, 100),
        "busy": beside_busy_process(lambda: compare(backends, max(2, options.rounds // 2), "beside a busy process")),
        "busy tails": beside_busy_process(lambda: tails(backends, tailed, 100)),
    }
    print(f"peak memory of all together: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
