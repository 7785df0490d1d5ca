"""Cost of the engine's scheduling alone: no model, no socket, one core.

    .venv/bin/python tests/bench/scheduler.py [--sequences 16,64,256,1024] [--steps 200] [--queue 256]

Prints one JSON object, in microseconds per step (median and p99) for each number of running sequences: deciding a step
(`plan`), accounting for its results (`update`), the load report, and `turnover`, a step in which every sixteenth
sequence ends and another is admitted. A queue of waiting sequences stands behind them all the time. Every sixteenth
step of each sequence takes a block and stores one in the prefix cache.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

from headrace.base.prefix import PrefixKey
from headrace.engine.core.block_pool import BlockPool
from headrace.engine.core.kv_memory import KvMemory
from headrace.engine.core.load import Rates, load
from headrace.engine.core.request import Sequence
from headrace.engine.core.sampling_plan import SamplingPlan
from headrace.engine.core.scheduler import BatchLimits, Scheduler
from headrace.engine.core.step import Computed

BLOCK_SIZE = 16
PROMPT = 200


class Engine:
    """A scheduler whose running sequences have computed their prompts and decode."""

    def __init__(self, running: int, queue: int) -> None:
        blocks = running * (-(-(PROMPT + 4000) // BLOCK_SIZE))
        limits = BatchLimits(
            max_num_seqs=running,
            max_num_batched_tokens=max(running, 8192),
            enable_chunked_prefill=True,
            max_waiting=running + queue + 1,
        )
        self.scheduler = Scheduler(limits, KvMemory(BlockPool(blocks, BLOCK_SIZE), PrefixKey.random()), frozenset())
        self._ids = 0
        for _ in range(running + queue):
            self.submit()
        while (
            any(not sequence.decoding for sequence in self.scheduler.running) or len(self.scheduler.running) < running
        ):
            self.step()

    def submit(self) -> None:
        """One more request, with a prompt of its own."""
        self._ids += 1
        tokens = [self._ids, *range(PROMPT - 1)]
        # Lengths spread over a block, so that block boundaries do not all come in the same step.
        tokens = tokens[: PROMPT - self._ids % BLOCK_SIZE]
        plan = SamplingPlan(max_tokens=4000, seed=self._ids)
        self.scheduler.submit(
            Sequence(id=self._ids, token_ids=tokens, prompt_length=len(tokens), plan=plan, arrived_at=0.0), 0.0
        )

    def step(self) -> tuple[float, float]:
        """Seconds for the plan and for the update of one step."""
        began = time.perf_counter()
        plan = self.scheduler.schedule(0.0)
        planned = time.perf_counter()
        results = [Computed(token_id=5 if piece.samples else None) for piece in plan.slices]
        computed = time.perf_counter()
        self.scheduler.update(plan, results, 0.0)
        return planned - began, time.perf_counter() - computed


def measure(running: int, queue: int, steps: int) -> dict[str, dict[str, float]]:
    """All figures for one number of running sequences."""
    engine = Engine(running, queue)
    plans, updates = zip(*(engine.step() for _ in range(steps)), strict=True)
    loads = []
    for _ in range(steps):
        began = time.perf_counter()
        load(engine.scheduler, Rates())
        loads.append(time.perf_counter() - began)
    turnovers = []
    for _ in range(steps):
        leaving = [s.id for s in list(engine.scheduler.running)[::BLOCK_SIZE]]
        for _ in leaving:
            engine.submit()
        began = time.perf_counter()
        for id in leaving:
            engine.scheduler.abort(id, 0.0)
        ended = time.perf_counter() - began
        plan_s, update_s = engine.step()
        turnovers.append(ended + plan_s + update_s)
    shown = {"plan": plans, "update": updates, "load": loads, "turnover": turnovers}
    return {name: figures(list(values)) for name, values in shown.items()}


def figures(seconds: list[float]) -> dict[str, float]:
    """Median and p99 in microseconds."""
    ordered = sorted(seconds)
    return {
        "median_us": round(statistics.median(ordered) * 1e6, 1),
        "p99_us": round(ordered[int(len(ordered) * 0.99)] * 1e6, 1),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", default="16,64,256,1024")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--queue", type=int, default=256)
    asked = parser.parse_args()
    counts = [int(count) for count in asked.sequences.split(",")]
    print(json.dumps({str(count): measure(count, asked.queue, asked.steps) for count in counts}, indent=2))


if __name__ == "__main__":
    main()
