"""Place latency: a real router process, real Redis, heartbeats at their real rate, placements over gRPC.

    .venv/bin/python tests/bench/router_place.py [--replicas 16] [--blocks 100000] [--calls 5000] [--concurrency 64]

Each prompt has 4,000 tokens, 250 blocks, the first half of them one of the prefixes that a replica has cached. Prints
one JSON object: milliseconds as the client sees them, with one call at a time and with several, the router's own time
per decision, and what the look at the fleet alone takes, for growing fleets and indexes.
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
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import grpc
import psutil

from headrace.api.engine.v1 import engine_service_pb2 as engine_pb
from headrace.api.engine.v1 import engine_service_pb2_grpc as engine_grpc
from headrace.api.routing.v1 import routing_service_pb2 as pb
from headrace.api.routing.v1.routing_service_pb2_grpc import RoutingServiceStub
from headrace.base.deadline import Deadline
from headrace.coord.embedded import EmbeddedRedis
from headrace.coord.redis.replica_board import Record as BoardRecord
from headrace.coord.redis.replica_board import ReplicaBoard
from headrace.coord.redis.store import open_redis
from headrace.router.adapters.heartbeat import seen_in
from headrace.router.core.placement import Refused
from headrace.router.core.preference import ranked
from headrace.router.core.prefix_index import PrefixIndex
from headrace.router.core.replica import Attempt, AttemptKey
from headrace.router.core.router import Router
from headrace.router.core.rules import Rules
from headrace.router.core.view import Reading, Record
from headrace.rpc.client import Peer

HEARTBEAT_PERIOD_S = 0.25
PROMPT_TOKENS, BLOCK_SIZE = 4000, 16
BLOCKS = PROMPT_TOKENS // BLOCK_SIZE
SHARED = BLOCKS // 2


def heartbeat(i: int, sequence: int, address: str) -> engine_pb.Heartbeat:
    """A replica in use, one and the same address for all."""
    return engine_pb.Heartbeat(
        engine_id=f"engine-{i:04}",
        epoch=1,
        sequence=sequence,
        address=address,
        deployment="chat",
        bundle_digest="sb-27",
        phase=engine_pb.PHASE_READY,
        waiting=i % 3,
        waiting_prefill_tokens=100 * (i % 7),
        running=i % 20,
        free_blocks=400_000,
        total_blocks=819_200,
        block_size=BLOCK_SIZE,
        max_model_len=8192,
        max_num_seqs=1024,
        prefill_tokens_per_s=4000.0,
        itl_ms=20.0 + i % 4,
        prefill_rates=[engine_pb.PrefillRate(tokens=4**n * 64, tokens_per_s=3000 + 500 * n) for n in range(4)],
        batch_latencies=[engine_pb.BatchLatency(sequences=2**n, itl_ms=18 + n) for n in range(5)],
    )


async def beat(board: ReplicaBoard, replicas: int, address: str) -> None:
    """Write every replica's heartbeat each period."""
    sequence = 0
    while True:
        sequence += 1
        for i in range(replicas):
            await board.write(f"engine-{i:04}", 1, sequence, heartbeat(i, sequence, address).SerializeToString())
        await asyncio.sleep(HEARTBEAT_PERIOD_S)


class Caches(engine_grpc.EngineServiceServicer):
    """All replicas' caches: each subscriber is told the next share of the blocks."""

    def __init__(self, shares: Sequence[Sequence[bytes]]) -> None:
        self._shares = shares
        self._next = 0

    async def SubscribeCacheEvents(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """A snapshot, and nothing more."""
        share = self._shares[self._next % len(self._shares)]
        self._next += 1
        yield engine_pb.SubscribeCacheEventsResponse(
            epoch=1, sequence=1, snapshot=engine_pb.CacheSnapshot(block_hashes=share)
        )
        await asyncio.Event().wait()


@asynccontextmanager
async def caches(shares: Sequence[Sequence[bytes]]) -> AsyncIterator[str]:
    """The caches' address."""
    server = grpc.aio.server(options=[("grpc.max_send_message_length", -1)])
    engine_grpc.add_EngineServiceServicer_to_server(Caches(shares), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


@contextmanager
def router_process(redis_url: str, blocks: int) -> Iterator[tuple[str, str, psutil.Process]]:
    """A router; yields its address, that of its metrics, and its process."""
    command = [sys.executable, "-m", "headrace.router", "--redis-url", redis_url, "--etcd-endpoints", ""]
    command += ["--metrics-address", "127.0.0.1:0", "--index-blocks", str(max(1, blocks))]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            lines = (json.loads(line) for line in process.stderr)
            metrics = next(line["address"] for line in lines if line["event"] == "metrics_served")
            address = next(line["address"] for line in lines if line["event"] == "server_started")
            yield address, metrics, psutil.Process(process.pid)
        finally:
            process.terminate()
            process.communicate(timeout=20)


def question(request_id: str, shares: Sequence[Sequence[bytes]], chance: random.Random) -> pb.PlaceRequest:
    """A prompt whose first half somebody has cached."""
    share = chance.choice(shares)
    start = SHARED * chance.randrange(max(1, len(share) // SHARED))
    own = chance.randbytes(16 * (BLOCKS - SHARED))
    return pb.PlaceRequest(
        request_id=request_id,
        attempt=1,
        deployment="chat",
        bundle_digest="sb-27",
        prompt_tokens=PROMPT_TOKENS,
        max_tokens=128,
        block_hashes=b"".join(share[start : start + SHARED]) + own,
        block_size=BLOCK_SIZE,
    )


async def measure(
    address: str, process: psutil.Process, shares: Sequence[Sequence[bytes]], *, calls: int, concurrency: int, name: str
) -> dict[str, float]:
    """Latencies of `calls` placements, `concurrency` at a time, and the router's CPU time for each."""
    chance = random.Random(name)
    questions = [question(f"{name}-{n}", shares, chance) for n in range(calls)]
    taken: list[float] = []
    async with Peer(address) as peer:
        place: Any = RoutingServiceStub(peer.channel).Place

        async def worker() -> None:
            while questions:
                request = questions.pop()
                started = time.perf_counter()
                await peer.unary(place, request, deadline=Deadline.after(5))
                taken.append(time.perf_counter() - started)

        started, cpu_s = time.perf_counter(), sum(process.cpu_times()[:2])
        await asyncio.gather(*(worker() for _ in range(concurrency)))
        elapsed_s = time.perf_counter() - started
        cpu_s = sum(process.cpu_times()[:2]) - cpu_s
    return {
        **quantiles_ms(taken),
        "placements_per_s": round(len(taken) / elapsed_s),
        "router_cpu_ms_per_placement": round(cpu_s / len(taken) * 1e3, 3),
    }


def look_alone(replicas: int, blocks: int, calls: int) -> dict[str, float]:
    """The router's own part, without Redis and gRPC: the look at the fleet and the order of the candidates."""
    chance = random.Random(1)
    index = PrefixIndex(blocks * 2, 5.0)
    rules = Rules(freshness_s=10.0)
    router = Router(rules_of=lambda name: rules, index=index, chance=chance.random, longest_s=10.0)
    records, shares = [], []
    for i in range(replicas):
        message = heartbeat(i, 1, "127.0.0.1:1")
        payload = message.SerializeToString()
        packed = BoardRecord(engine_id=message.engine_id, epoch=1, sequence=1, at_us=0, payload=payload)
        seen = seen_in(packed)
        records.append(Record(seen=seen, age_s=0.1, payload=payload))
        shares.append([chance.randbytes(16) for _ in range(blocks // replicas)])
        index.begin(seen.engine_id, 1)
        index.snapshot(seen.engine_id, 1, shares[-1], 1)
    router.observed(Reading(asked_at=0.0, records=tuple(records)), 0.0)
    taken = []
    for n in range(calls):
        asked = question(f"r{n}", shares, chance).block_hashes
        attempt = Attempt(
            key=AttemptKey(f"r{n}", 1),
            deployment="chat",
            bundle_digest="sb-27",
            adapter=None,
            prompt_tokens=PROMPT_TOKENS,
            max_tokens=128,
            hashes=[asked[i : i + 16] for i in range(0, len(asked), 16)],
            block_size=BLOCK_SIZE,
        )
        started = time.perf_counter()
        found = router.look(attempt, 0.0)
        assert not isinstance(found, Refused)
        ranked(found.candidates, rules.policy, 0.5)
        taken.append(time.perf_counter() - started)
    return quantiles_ms(taken)


def quantiles_ms(seconds: list[float]) -> dict[str, float]:
    """p50, p99 and the largest, in milliseconds."""
    ordered = sorted(seconds)
    at = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {k: round(ordered[min(int(q * len(ordered)), len(ordered) - 1)] * 1e3, 3) for k, q in at.items()}


def own_time(metrics_address: str) -> dict[str, float]:
    """The router's own histogram of the time per decision, Redis included: share of decisions within each bound."""
    with urllib.request.urlopen(f"http://{metrics_address}/metrics", timeout=5) as response:
        lines = response.read().decode().splitlines()
    name = "headrace_router_place_seconds"
    counts = {
        line.split('le="')[1].split('"')[0]: float(line.split()[-1])
        for line in lines
        if line.startswith(f"{name}_bucket")
    }
    return {f"within {float(le) * 1e3:g} ms": round(n / counts["+Inf"], 4) for le, n in counts.items() if le != "+Inf"}


async def main(replicas: int, blocks: int, calls: int, concurrency: int) -> dict[str, Any]:
    """All measurements."""
    chance = random.Random(0)
    shares = [[chance.randbytes(16) for _ in range(max(SHARED, blocks // replicas))] for _ in range(replicas)]
    with tempfile.TemporaryDirectory() as folder, EmbeddedRedis.start(Path(folder)) as server:
        redis = open_redis(server.url)
        async with caches(shares) as engines:
            beating = asyncio.create_task(beat(ReplicaBoard(redis), replicas, engines))
            try:
                with router_process(server.url, 2 * blocks) as (address, metrics_address, process):
                    async with Peer(address) as peer:
                        while not await peer.healthy(deadline=Deadline.after(5)):
                            await asyncio.sleep(0.05)
                    await asyncio.sleep(8 * HEARTBEAT_PERIOD_S)
                    await measure(address, process, shares, calls=300, concurrency=1, name="warm-up")
                    one = await measure(address, process, shares, calls=calls, concurrency=1, name="one")
                    own = own_time(metrics_address)
                    many = await measure(
                        address, process, shares, calls=2 * calls, concurrency=concurrency, name="many"
                    )
            finally:
                beating.cancel()
                await asyncio.wait({beating})
                await redis.aclose()
    return {
        "replicas": replicas,
        "blocks": blocks,
        "one_at_a_time_ms": one,
        "own_time_one_at_a_time": own,
        f"{concurrency}_at_a_time_ms": many,
        "look_alone_ms": {
            f"{r} replicas, {b} blocks": look_alone(r, b, 500)
            for r, b in ((16, 10_000), (64, 10_000), (256, 100_000), (1024, 100_000), (16, 100_000), (16, 1_000_000))
        },
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--replicas", type=int, default=16)
    parser.add_argument("--blocks", type=int, default=100_000)
    parser.add_argument("--calls", type=int, default=5000)
    parser.add_argument("--concurrency", type=int, default=64)
    given = parser.parse_args()
    print(json.dumps(asyncio.run(main(given.replicas, given.blocks, given.calls, given.concurrency)), indent=2))
