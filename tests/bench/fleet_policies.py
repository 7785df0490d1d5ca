"""Routing policies compared on simulated fleets, in virtual time: the same on every machine.

    .venv/bin/python tests/bench/fleet_policies.py [--quick] [--shape NAME] [--out docs/benchmarks]

Writes router-policies.json, .md and .svg into the folder. The full run takes about four minutes of one core; --quick
runs one seed of a quarter of the requests, and prints the table only.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import fleet_report
from fleet_shapes import SHAPES, Shape, chain_of
from fleet_simulation import Answered, Fleet, capacity

from headrace.router.core.rules import Policy

REPLICAS = 8
SEEDS = (1, 2, 3)
USUAL_LOAD, HIGH_LOAD = 0.65, 0.9
BOTH_LOADS = ("tenants-2x", "tenants-6x", "conversations", "siblings", "unique", "bimodal")
WARM_UP = 0.25
"""The part of the requests, the first to arrive, that only fills the caches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One run: times in virtual seconds; the spread is that of requests per replica, as shares of their mean."""

    shape: str
    load: float
    policy: str
    seed: int
    requests: int
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    completion_p50_s: float
    completion_p90_s: float
    hit_ratio: float
    least_per_replica: float
    most_per_replica: float
    output_tokens_per_s: float
    refusals: int


def measure(shape: Shape, load: float, policy: Policy, seed: int, rate: float, requests: int) -> Result:
    """One run of one policy."""
    answered = Fleet(REPLICAS, shape.model, policy, seed=seed).run(shape.workload(seed, rate, requests))
    answered.sort(key=lambda a: (a.arrived_at, a.request_id))
    return result(answered[int(WARM_UP * len(answered)) :], shape=shape.name, load=load, policy=policy.value, seed=seed)


def result(answered: list[Answered], **run: Any) -> Result:
    """What the clients of a run saw."""
    first, total = [a.first_token_s for a in answered], [a.total_s for a in answered]
    per_replica = [sum(a.engine == n for a in answered) * REPLICAS / len(answered) for n in range(REPLICAS)]
    lasted_s = max(a.arrived_at + a.total_s for a in answered) - min(a.arrived_at for a in answered)
    return Result(
        requests=len(answered),
        ttft_p50_s=quantile(first, 0.5),
        ttft_p90_s=quantile(first, 0.9),
        ttft_p99_s=quantile(first, 0.99),
        completion_p50_s=quantile(total, 0.5),
        completion_p90_s=quantile(total, 0.9),
        hit_ratio=round(sum(a.cached_tokens for a in answered) / sum(a.prompt_tokens for a in answered), 4),
        least_per_replica=round(min(per_replica), 3),
        most_per_replica=round(max(per_replica), 3),
        output_tokens_per_s=round(sum(a.output_tokens for a in answered) / lasted_s, 1),
        refusals=sum(a.refusals for a in answered),
        **run,
    )


def quantile(values: list[float], q: float) -> float:
    """The value that a share `q` of them does not exceed, to 0.1 ms."""
    return round(sorted(values)[min(len(values) - 1, int(q * len(values)))], 4)


def capacity_of(shape: Shape) -> float:
    """What one replica without a prefix cache takes of a shape, requests per second."""
    sample = [request for arrival in shape.workload(999, 1.0, 200) for request in chain_of(arrival.request)]
    return capacity(shape.model, sample)


def run(shapes: list[Shape], *, quick: bool) -> dict[str, Any]:
    """All runs, as the report's JSON."""
    capacities, results = {}, []
    for shape in shapes:
        started = time.thread_time()
        capacities[shape.name] = round(capacity_of(shape), 3)
        loads = (USUAL_LOAD, HIGH_LOAD) if shape.name in BOTH_LOADS and not quick else (USUAL_LOAD,)
        for load in loads:
            rate = load * REPLICAS * capacities[shape.name]
            for seed in SEEDS[:1] if quick else SEEDS:
                for policy in Policy:
                    requests = shape.requests // (4 if quick else 1)
                    results.append(asdict(measure(shape, load, policy, seed, rate, requests)))
        print(f"{shape.name}: {time.thread_time() - started:.0f} s of CPU time", flush=True)
    return {
        "replicas": REPLICAS,
        "seeds": list(SEEDS[:1] if quick else SEEDS),
        "models": {shape.name: asdict(shape.model) for shape in shapes},
        "about": {shape.name: shape.about for shape in shapes},
        "capacity_requests_per_s": capacities,
        "results": results,
    }


def main() -> None:
    """Run, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="a smoke run: one seed, a quarter of the requests")
    parser.add_argument("--shape", action="append", help="only this one; may be repeated")
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"), help="folder of the report")
    given = parser.parse_args()
    report = run([s for s in SHAPES if not given.shape or s.name in given.shape], quick=given.quick)
    print(fleet_report.tables(report))
    if not given.quick:
        fleet_report.write(report, given.out)


if __name__ == "__main__":
    main()
