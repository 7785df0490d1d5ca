"""The prefix index alone: what a look-up costs, what a block costs, how fast events go in.

    .venv/bin/python tests/bench/router_index.py [--json FILE] [--quick]

Look-ups ask for a prompt of 250 blocks (4,000 tokens) over fleets of replicas that hold different beginnings of the
prompts asked for: all have the first 16 blocks (a system prompt), a quarter has half, one has all of it. The rest of
the index are other prompts' blocks, each with one holder. Each row is a process of its own, so that its memory is its
own. Times are this thread's CPU time: what else the machine does is not in them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from headrace.router.core.prefix_index import PrefixIndex
from headrace.router.core.replica import EngineId

REPLICAS = (16, 64, 256, 1024)
BLOCKS = (10_000, 100_000, 1_000_000)
PROMPT_BLOCKS = 250
SYSTEM_BLOCKS = 16
PROMPTS = 20


class Fleet:
    """An index and the engines that feed it."""

    def __init__(self, replicas: int, max_blocks: int) -> None:
        self.random = random.Random(1)
        self.engines = [EngineId(f"engine-{n:04}") for n in range(replicas)]
        self.index = PrefixIndex(max_blocks)
        self._sequence = 0
        for engine in self.engines:
            self.index.begin(engine, 1)
            self.index.snapshot(engine, 1, [], 0)
        self._sequences = dict.fromkeys(self.engines, 0)

    def hashes(self, blocks: int) -> list[bytes]:
        """Blocks of nobody else."""
        return [self.random.randbytes(16) for _ in range(blocks)]

    def store(self, engine: EngineId, hashes: list[bytes]) -> None:
        """One event."""
        self._sequences[engine] += 1
        self.index.stored(engine, 1, hashes, self._sequences[engine])

    def remove(self, engine: EngineId, hashes: list[bytes]) -> None:
        """One event."""
        self._sequences[engine] += 1
        self.index.removed(engine, 1, hashes, self._sequences[engine])

    def fill(self, blocks: int) -> None:
        """Other prompts' blocks, each with one holder, until the index has so many."""
        while len(self.index) < blocks:
            self.store(self.random.choice(self.engines), self.hashes(min(100, blocks - len(self.index))))


def look_up(replicas: int, blocks: int, calls: int) -> dict[str, Any]:
    """Milliseconds for one overlap, for one with the 8 best engines' numbers read, and for one prediction."""
    fleet = Fleet(replicas, 2 * blocks)
    system = fleet.hashes(SYSTEM_BLOCKS)
    prompts = [system + fleet.hashes(PROMPT_BLOCKS - SYSTEM_BLOCKS) for _ in range(PROMPTS)]
    for n, prompt in enumerate(prompts):
        for at, engine in enumerate(fleet.engines):
            depth = PROMPT_BLOCKS // 2 if (at + n) % 4 == 0 else SYSTEM_BLOCKS
            fleet.store(engine, prompt[: PROMPT_BLOCKS if at == n % replicas else depth])
    fleet.fill(blocks)
    overlaps, best, predictions = [], [], []
    for n in range(calls):
        # Its own bytes, as they come out of a message: nothing is cached in them.
        prompt = [bytes(bytearray(h)) for h in prompts[n % PROMPTS]]
        now = n / 1000
        started = time.thread_time()
        found = fleet.index.overlap(prompt, now)
        looked = time.thread_time()
        assert len([found.of(engine) for engine, _ in zip(found, range(8), strict=False)]) == 8
        read = time.thread_time()
        fresh = fleet.hashes(PROMPT_BLOCKS)
        placed = time.thread_time()
        fleet.index.predict(fleet.engines[n % replicas], 1, fresh, now)
        predictions.append(time.thread_time() - placed)
        overlaps.append(looked - started)
        best.append(read - started)
    rows = {"overlap": overlaps, "overlap_and_8_best": best, "predict": predictions}
    return {"replicas": replicas, "blocks": blocks, **{f"{k}_ms": quantiles_ms(v) for k, v in rows.items()}}


def memory(blocks: int) -> dict[str, Any]:
    """Resident megabytes of so many blocks with one holder each: just filled, and after twice as many went by."""
    fleet = Fleet(64, blocks)
    process = psutil.Process(os.getpid())
    before = process.memory_info().rss
    fleet.fill(blocks)
    filled = process.memory_info().rss - before
    for _ in range(2 * blocks // 100):
        fleet.store(fleet.random.choice(fleet.engines), fleet.hashes(100))
    churned = process.memory_info().rss - before
    return {"blocks": blocks, "filled_mb": round(filled / 1e6, 1), "churned_mb": round(churned / 1e6, 1)}


def ingest(blocks: int) -> dict[str, Any]:
    """Blocks per second, into an index of that size which is full, in events of 32; then out again; longest pause."""
    fleet = Fleet(64, blocks)
    fleet.fill(blocks)
    events = [(fleet.random.choice(fleet.engines), fleet.hashes(32)) for _ in range(5000)]
    rates: dict[str, float] = {}
    for name, do in (("stored", fleet.store), ("removed", fleet.remove)):
        longest = 0.0
        began = time.thread_time()
        for engine, hashes in events:
            started = time.thread_time()
            do(engine, hashes)
            longest = max(longest, time.thread_time() - started)
        rates[f"{name}_blocks_per_s"] = round(32 * len(events) / (time.thread_time() - began))
        rates[f"{name}_longest_ms"] = round(longest * 1e3, 2)
    return {"blocks": blocks, **rates}


def quantiles_ms(seconds: list[float]) -> dict[str, float]:
    """p50 and p99, in milliseconds."""
    ordered = sorted(seconds)
    return {name: round(ordered[int(q * len(ordered))] * 1e3, 4) for name, q in (("p50", 0.5), ("p99", 0.99))}


def in_a_process(*row: object) -> dict[str, Any]:
    """One measurement in a fresh interpreter."""
    done = subprocess.run([sys.executable, __file__, "--row", *map(str, row)], stdout=subprocess.PIPE, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def show(report: dict[str, list[dict[str, Any]]]) -> None:
    """The report as tables."""
    print(f"{'replicas':>8} {'blocks':>9} {'overlap p50':>12} {'p99 ms':>8} {'+ 8 best p50':>13} {'predict p50':>12}")
    for row in report["look_up"]:
        overlap, best, predict = row["overlap_ms"], row["overlap_and_8_best_ms"], row["predict_ms"]
        numbers = f"{overlap['p50']:>12.3f} {overlap['p99']:>8.3f} {best['p50']:>13.3f} {predict['p50']:>12.3f}"
        print(f"{row['replicas']:>8} {row['blocks']:>9} {numbers}")
    for row in report["memory"]:
        print(f"memory, {row['blocks']} blocks with one holder: {row['filled_mb']} MB, churned {row['churned_mb']} MB")
    for row in report["ingest"]:
        print(f"ingest, full at {row['blocks']} blocks: {json.dumps({k: v for k, v in row.items() if k != 'blocks'})}")


def main() -> None:
    """All measurements, or one row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", type=Path, help="write the report here, too")
    parser.add_argument("--quick", action="store_true", help="small sizes only")
    parser.add_argument("--row", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.row:
        name, *sizes = given.row
        rows: dict[str, Callable[..., dict[str, Any]]] = {"look_up": look_up, "memory": memory, "ingest": ingest}
        print(json.dumps(rows[name](*map(int, sizes))))
        return
    sizes, replicas = (BLOCKS[:1], REPLICAS[:2]) if given.quick else (BLOCKS, REPLICAS)
    calls = 300 if given.quick else 3000
    report = {
        "look_up": [in_a_process("look_up", r, b, calls) for r in replicas for b in sizes],
        "memory": [in_a_process("memory", b) for b in sizes],
        "ingest": [in_a_process("ingest", b) for b in sizes],
    }
    show(report)
    if given.json:
        given.json.write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
