"""Place latency: a real router process, real Redis, heartbeats at their real rate, placements over gRPC.

    .venv/bin/python tests/bench/router_place.py [--replicas 16] [--calls 5000] [--concurrency 16]

Prints one JSON object: milliseconds as the client sees them, with one call at a time and with several, and what the
decision alone takes inside the router.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headrace.api.engine.v1 import engine_service_pb2 as engine_pb
from headrace.api.routing.v1 import routing_service_pb2 as pb
from headrace.api.routing.v1.routing_service_pb2_grpc import RoutingServiceStub
from headrace.base.deadline import Deadline
from headrace.coord.embedded import EmbeddedRedis
from headrace.coord.redis.replica_board import Record as BoardRecord
from headrace.coord.redis.replica_board import ReplicaBoard
from headrace.coord.redis.store import open_redis
from headrace.router.adapters.heartbeat import seen_in
from headrace.router.core.replica import Attempt, AttemptKey
from headrace.router.core.router import Router
from headrace.router.core.view import Reading, Record
from headrace.rpc.client import Peer

HEARTBEAT_PERIOD_S = 0.25


def heartbeat(i: int, sequence: int) -> engine_pb.Heartbeat:
    """A replica in use."""
    return engine_pb.Heartbeat(
        engine_id=f"engine-{i:03}",
        epoch=1,
        sequence=sequence,
        address=f"10.0.0.{i}:7000",
        deployment="chat",
        bundle_digest="sb-27",
        phase=engine_pb.PHASE_READY,
        waiting=i % 3,
        waiting_prefill_tokens=100 * (i % 7),
        running=i % 20,
        free_blocks=4000,
        total_blocks=8192,
        block_size=16,
        max_model_len=8192,
        max_num_seqs=32,
        prefill_tokens_per_s=4000.0,
        itl_ms=20.0 + i % 4,
    )


async def beat(board: ReplicaBoard, replicas: int) -> None:
    """Write every replica's heartbeat each period."""
    sequence = 0
    while True:
        sequence += 1
        for i in range(replicas):
            await board.write(f"engine-{i:03}", 1, sequence, heartbeat(i, sequence).SerializeToString())
        await asyncio.sleep(HEARTBEAT_PERIOD_S)


@contextmanager
def router_process(redis_url: str) -> Iterator[str]:
    """A router; yields its address."""
    command = [sys.executable, "-m", "headrace.router", "--redis-url", redis_url]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            lines = (json.loads(line) for line in process.stderr)
            yield next(line["address"] for line in lines if line["event"] == "server_started")
        finally:
            process.terminate()
            process.communicate(timeout=20)


async def measure(address: str, *, calls: int, concurrency: int, name: str) -> dict[str, float]:
    """Latencies of `calls` placements, `concurrency` at a time; each is released afterwards, as a gateway would."""
    taken: list[float] = []
    async with Peer(address) as peer:
        stub: Any = RoutingServiceStub(peer.channel)

        async def worker(w: int) -> None:
            for n in range(calls // concurrency):
                request = pb.PlaceRequest(
                    request_id=f"{name}-{w}-{n}",
                    attempt=1,
                    deployment="chat",
                    bundle_digest="sb-27",
                    prompt_tokens=512,
                    max_tokens=128,
                )
                started = time.perf_counter()
                await peer.unary(stub.Place, request, deadline=Deadline.after(5))
                taken.append(time.perf_counter() - started)
                release = pb.ReleaseRequest(request_id=request.request_id, attempt=1)
                await peer.unary(stub.Release, release, deadline=Deadline.after(5))

        started = time.perf_counter()
        await asyncio.gather(*(worker(w) for w in range(concurrency)))
        elapsed_s = time.perf_counter() - started
    return {**quantiles_ms(taken), "placements_per_s": round(len(taken) / elapsed_s)}


def decision_alone(replicas: int, calls: int, *, booked: int) -> dict[str, float]:
    """The pure decision with `booked` live bookings, in this process."""
    router = Router(freshness_s=10.0, pick=random.Random(1).randrange)
    records = []
    for i in range(replicas):
        message = heartbeat(i, 1)
        payload = message.SerializeToString()
        packed = BoardRecord(engine_id=message.engine_id, epoch=1, sequence=1, at_us=0, payload=payload)
        records.append(Record(seen=seen_in(packed), age_s=0.1, payload=payload))
    router.observed(Reading(asked_at=0.0, records=tuple(records)), 0.0)
    taken = []
    for n in range(booked + calls):
        attempt = Attempt(
            key=AttemptKey(f"r{n}", 1),
            deployment="chat",
            bundle_digest="sb-27",
            adapter=None,
            prompt_tokens=512,
            max_tokens=128,
            excluded=frozenset(),
        )
        started = time.perf_counter()
        router.place(attempt, 0.0)
        if n >= booked:
            taken.append(time.perf_counter() - started)
            router.release(AttemptKey(f"r{n - booked}", 1))
    return quantiles_ms(taken)


def quantiles_ms(seconds: list[float]) -> dict[str, float]:
    """p50, p99 and the largest, in milliseconds."""
    ordered = sorted(seconds)
    at = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {k: round(ordered[min(int(q * len(ordered)), len(ordered) - 1)] * 1e3, 3) for k, q in at.items()}


async def main(replicas: int, calls: int, concurrency: int) -> dict[str, Any]:
    """All measurements."""
    with tempfile.TemporaryDirectory() as folder, EmbeddedRedis.start(Path(folder)) as server:
        redis = open_redis(server.url)
        beating = asyncio.create_task(beat(ReplicaBoard(redis), replicas))
        try:
            with router_process(server.url) as address:
                async with Peer(address) as peer:
                    while not await peer.healthy(deadline=Deadline.after(5)):
                        await asyncio.sleep(0.05)
                await asyncio.sleep(2 * HEARTBEAT_PERIOD_S)
                await measure(address, calls=200, concurrency=1, name="warm-up")
                one = await measure(address, calls=calls, concurrency=1, name="one")
                many = await measure(address, calls=calls, concurrency=concurrency, name="many")
        finally:
            beating.cancel()
            await asyncio.wait({beating})
            await redis.aclose()
    return {
        "replicas": replicas,
        "one_at_a_time_ms": one,
        f"{concurrency}_at_a_time_ms": many,
        "decision_alone_ms": decision_alone(replicas, calls, booked=0),
        "decision_with_300_bookings_ms": decision_alone(replicas, calls, booked=300),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--replicas", type=int, default=16)
    parser.add_argument("--calls", type=int, default=5000)
    parser.add_argument("--concurrency", type=int, default=16)
    given = parser.parse_args()
    print(json.dumps(asyncio.run(main(given.replicas, given.calls, given.concurrency)), indent=2))
