"""CPU time of an engine step beside the model's own: what the worker does between two native calls.

    .venv/bin/python tests/bench/step_cost.py [--sequences 1,8,32] [--steps 1000] [--rounds 3] [--profile]

The step loop on the native backend of the shipped model (bfloat16), in this process, with a native call that computes
nothing but reads as much memory as the weights take, since that is what the Python beside it finds its caches full of.
Its events go through a real socket to a process that drops them. Prints microseconds per step for each number of
decoding sequences, the median step of the least disturbed round.
"""

from __future__ import annotations

import argparse
import cProfile
import ctypes
import json
import math
import multiprocessing
import pstats
import socket
import statistics
import time
from typing import Any

import numpy as np

from headrace.bundle.shipped import shipped_model_path
from headrace.engine.core.sampling_plan import SamplingPlan
from headrace.engine.worker.assembly import assemble
from headrace.engine.worker.config import WorkerConfig
from headrace.engine.worker.connection import Connection
from headrace.engine.worker.messages import Submit, encode

WARM_STEPS = 200
PROMPT = 40
WEIGHT_BYTES = 64 << 20


class Over(Exception):
    """Enough steps were counted."""


class Instant:
    """The kernel library with a step that computes nothing: every row's likeliest token is 0.

    It reads as much memory as a small model's weights are, which leaves Python's code and data where a real step leaves
    them: out of the caches. Only the time between its calls counts.
    """

    def __init__(self, library: Any, steps: int, profile: cProfile.Profile | None) -> None:
        self._library = library
        self._steps = steps
        self._profile = profile
        self._weights = np.ones(WEIGHT_BYTES // 8, dtype=np.int64)
        self._count = 0
        self._ended = math.inf
        self.cpu_s: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)

    def hr_step(self, handle: Any, batch: Any) -> None:
        """Count, and end the run after the last step."""
        began = time.thread_time()
        if self._profile is not None:
            self._profile.disable()
        self._count += 1
        if self._count > WARM_STEPS:
            self.cpu_s.append(began - self._ended)
        if len(self.cpu_s) == self._steps:
            raise Over
        given = batch._obj
        ctypes.memset(given.best, 0, 4 * given.head_count)
        self._weights.sum()
        if self._profile is not None and self._count > WARM_STEPS:
            self._profile.enable()
        self._ended = time.thread_time()


def worker_cost(sequences: int, steps: int, profile: cProfile.Profile | None = None) -> float:
    """CPU seconds of one decode step's Python."""
    config = WorkerConfig(
        model=str(shipped_model_path()), precision="bfloat16", kv_cache_memory_bytes=2 << 30, max_waiting=256
    )
    loop, _ = assemble(config)
    plan = SamplingPlan(max_tokens=WARM_STEPS + steps + 100, ignore_eos=True)
    ours, theirs = socket.socketpair()
    for id in range(1, sequences + 1):
        prompt = [id + at for at in range(PROMPT + id % 16)]  # no two end a block in the same step
        submit = Submit(sequence_id=id, token_ids=prompt, plan=plan, arrived_at=0.0, deadline_at=math.inf)
        theirs.sendall(encode(submit))
    sink = multiprocessing.get_context("spawn").Process(target=_drop, args=(theirs,), daemon=True)
    sink.start()
    theirs.close()
    backend: Any = loop.backend
    model = getattr(backend, "_inner", backend)._model
    model._library = instant = Instant(model._library, steps, profile)
    try:
        loop.serve(Connection(ours))
    except Over:
        return statistics.median(instant.cpu_s)
    finally:
        ours.close()
        sink.join()
    raise RuntimeError("the loop ended by itself")


def _drop(theirs: socket.socket) -> None:
    with theirs:
        while theirs.recv(1 << 20):
            pass


def measure(sequences: int, steps: int, rounds: int) -> float:
    """Microseconds per step, the least of the rounds."""
    return round(min(worker_cost(sequences, steps) for _ in range(rounds)) * 1e6, 1)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", default="1,8,32")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="show where the time goes instead")
    asked = parser.parse_args()
    counts = [int(count) for count in asked.sequences.split(",")]
    if asked.profile:
        for count in counts:
            profile = cProfile.Profile()
            worker_cost(count, asked.steps, profile)
            pstats.Stats(profile).sort_stats("tottime").print_stats(35)
        return
    print(json.dumps({str(count): measure(count, asked.steps, asked.rounds) for count in counts}, indent=2))


if __name__ == "__main__":
    main()
