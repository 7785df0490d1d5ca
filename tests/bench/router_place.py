"""What a placement takes: a real router process, real Redis, heartbeats, placements over gRPC.

    .venv/bin/python tests/bench/router_place.py [--quick] [--calls 4000] [--json docs/benchmarks/router-place.json]

Each prompt has 4,000 tokens, 250 blocks, the first half of them one of the prefixes that a replica has cached. For
fleets of 16 to 1,024 replicas and indexes of 10^4 to 10^6 blocks it shows milliseconds as the client sees them with
1, 8 and 64 calls at a time, placements a second, the processor time of router and Redis for each, and what the router's
look at the fleet alone takes. Client, router and Redis share the machine with whatever else runs: the load average
stands beside each number, and on a busy machine processor time says more than latency.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import grpc
import psutil
from redis.asyncio import Redis

from headrace.api.engine.v1 import engine_service_pb2 as engine_pb
from headrace.api.engine.v1 import engine_service_pb2_grpc as engine_grpc
from headrace.api.routing.v1 import routing_service_pb2 as pb
from headrace.api.routing.v1.routing_service_pb2_grpc import RoutingServiceStub
from headrace.base.channel import Keepalive, server_options
from headrace.base.deadline import Deadline
from headrace.base.errors import Unavailable
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

BEATS_PER_S = 256
"""All replicas' heartbeats together: four a second each up to 64 replicas. More would measure this client."""
PROMPT_TOKENS, BLOCK_SIZE = 4000, 16
BLOCKS = PROMPT_TOKENS // BLOCK_SIZE
SHARED = BLOCKS // 2
CONCURRENCIES = (1, 8, 64)
SHAPES = ((16, 10**5), (64, 10**5), (256, 10**5), (1024, 10**5), (16, 10**4), (16, 10**6))
QUICK_SHAPES = ((16, 10**4), (64, 10**4))


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
    """Write heartbeats, each replica's in its turn."""
    sequence = 0
    period_s = max(0.25, replicas / BEATS_PER_S)
    while True:
        sequence += 1
        ends_at = time.monotonic() + period_s
        for i in range(replicas):
            try:
                await board.write(f"engine-{i:04}", 1, sequence, heartbeat(i, sequence, address).SerializeToString())
            except Unavailable:  # the machine was busy elsewhere: an engine writes its next one, too
                continue
            if i % 16 == 15:
                await asyncio.sleep(period_s * 16 / replicas / 2)
        await asyncio.sleep(max(0.0, ends_at - time.monotonic()))


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
    server = grpc.aio.server(options=server_options(Keepalive(), max_message_bytes=64 << 20))
    engine_grpc.add_EngineServiceServicer_to_server(Caches(shares), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


@contextmanager
def router_process(redis_url: str, blocks: int) -> Iterator[tuple[str, psutil.Process]]:
    """A router; yields its address and its process."""
    command = [sys.executable, "-m", "headrace.router", "--etcd-endpoints", "", "--index-blocks", str(blocks)]
    # The URL holds a password: a command line is everybody's to read.
    environ = dict(os.environ) | {"HEADRACE_REDIS_URL": redis_url}
    with subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        # Read to the end: a thousand replicas are more lines than a pipe holds, and the router would wait for its log.
        reader = threading.Thread(target=deque, args=(process.stderr, 0))
        try:
            lines = (json.loads(line) for line in process.stderr)
            address = next(line["address"] for line in lines if line["event"] == "server_started")
            reader.start()
            yield address, psutil.Process(process.pid)
        finally:
            process.terminate()
            process.wait(timeout=20)
            if reader.ident:
                reader.join()


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
        brief=True,  # as a gateway asks
    )


class Machine:
    """What router and Redis have used of the processors."""

    def __init__(self, router: psutil.Process, redis: Redis) -> None:
        self._router = router
        self._redis = redis

    async def used_s(self) -> tuple[float, float]:
        """Seconds of processor time, the router's and Redis's."""
        info = await self._redis.info("cpu")
        times = self._router.cpu_times()
        return times.user + times.system, info["used_cpu_user"] + info["used_cpu_sys"]

    async def idle_ms_per_s(self, seconds: float) -> float:
        """What the router uses when nobody asks: reading the board, mostly."""
        before, _ = await self.used_s()
        await asyncio.sleep(seconds)
        after, _ = await self.used_s()
        return round((after - before) / seconds * 1e3, 1)


async def measure(
    address: str, machine: Machine, shares: Sequence[Sequence[bytes]], *, calls: int, concurrency: int
) -> dict[str, float]:
    """Latencies of `calls` placements, `concurrency` at a time, and the processor time of each."""
    name = f"{concurrency}-{time.monotonic_ns()}"
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

        started, before = time.perf_counter(), await machine.used_s()
        await asyncio.gather(*(worker() for _ in range(concurrency)))
        elapsed_s, after = time.perf_counter() - started, await machine.used_s()
    router_s, redis_s = (b - a for a, b in zip(before, after, strict=True))
    return {
        "at_a_time": concurrency,
        **quantiles_ms(taken),
        "placements_per_s": round(len(taken) / elapsed_s),
        "router_cpu_ms": round(router_s / len(taken) * 1e3, 3),
        "redis_cpu_ms": round(redis_s / len(taken) * 1e3, 3),
        "load_average": round(os.getloadavg()[0], 1),
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
        shares.append([chance.randbytes(16) for _ in range(max(SHARED, blocks // replicas))])
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


async def ready(address: str, replicas: int, blocks: int) -> None:
    """Wait until the router knows all caches."""
    async with Peer(address) as peer:
        show: Any = RoutingServiceStub(peer.channel).ListReplicas
        async with asyncio.timeout(120):
            while True:
                # Slow while a thousand streams begin.
                view = await peer.unary(show, pb.ListReplicasRequest(), deadline=Deadline.after(60))
                if len(view.replicas) == replicas and sum(r.indexed_blocks for r in view.replicas) >= blocks:
                    return
                await asyncio.sleep(0.1)


async def fleet(replicas: int, blocks: int, calls: int) -> dict[str, Any]:
    """One fleet and index, at all concurrencies."""
    chance = random.Random(0)
    shares = [[chance.randbytes(16) for _ in range(max(SHARED, blocks // replicas))] for _ in range(replicas)]
    indexed = sum(map(len, shares))
    with tempfile.TemporaryDirectory() as folder, EmbeddedRedis.start(Path(folder)) as server:
        async with open_redis(server.url) as redis, caches(shares) as engines:
            beating = asyncio.create_task(beat(ReplicaBoard(redis), replicas, engines))
            try:
                with router_process(server.url, max(10**6, 2 * indexed)) as (address, process):
                    await ready(address, replicas, indexed)
                    machine = Machine(process, redis)
                    await measure(address, machine, shares, calls=300, concurrency=4)
                    idle = await machine.idle_ms_per_s(2.0)
                    placing = [
                        await measure(address, machine, shares, calls=calls, concurrency=n) for n in CONCURRENCIES
                    ]
                    memory = process.memory_info().rss
            finally:
                beating.cancel()
                await asyncio.wait({beating})
    return {
        "replicas": replicas,
        "blocks": indexed,
        "placing_ms": placing,
        "router_idle_cpu_ms_per_s": idle,
        "router_rss_mib": round(memory / 2**20),
        "look_alone_ms": look_alone(replicas, blocks, min(calls, 500)),
    }


def show(result: dict[str, Any]) -> None:
    """A line per concurrency."""
    for row in result["placing_ms"]:
        print(
            f"{result['replicas']:8} {result['blocks']:8} {row['at_a_time']:9} {row['p50']:8.2f} {row['p99']:8.2f}"
            f" {row['placements_per_s']:7} {row['router_cpu_ms']:8.3f} {row['redis_cpu_ms']:8.3f}"
            f" {result['look_alone_ms']['p50']:8.3f} {row['load_average']:6.1f}",
            flush=True,
        )


def main() -> None:
    """All fleets, printed as they are measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--calls", type=int, default=4000, help="placements for each number")
    parser.add_argument("--quick", action="store_true", help="two small fleets, a tenth of the calls")
    parser.add_argument("--json", type=Path, help="write the numbers to this file, too")
    given = parser.parse_args()
    calls = max(100, given.calls // 10) if given.quick else given.calls
    print("replicas   blocks at a time      p50      p99     /s  router cpu  redis cpu  look p50  load   (ms)")
    results = []
    for replicas, blocks in QUICK_SHAPES if given.quick else SHAPES:
        results.append(asyncio.run(fleet(replicas, blocks, calls)))
        show(results[-1])
    if given.json:
        found = {"cores": os.cpu_count(), "prompt_tokens": PROMPT_TOKENS, "calls": calls, "fleets": results}
        given.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
