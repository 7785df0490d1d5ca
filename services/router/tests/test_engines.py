"""The router with real engine processes: a frozen one, ejection and the probe that ends it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from headrace.api.routing.v1 import routing_service_pb2 as pb
from headrace.api.routing.v1.routing_service_pb2_grpc import RoutingServiceStub
from headrace.base.deadline import Deadline
from headrace.cli.child import Child, Lifeline, kill_tree, python_module
from headrace.coord.embedded import EmbeddedRedis
from headrace.router.app import RouterApp
from headrace.router.settings import RouterSettings
from headrace.rpc.client import Peer
from headrace.testkit.eventually import eventually

FRESHNESS_S = 1.5


@contextmanager
def engines(folder: Path, redis_url: str, *engine_ids: str) -> Iterator[dict[str, Child]]:
    lifeline, children = Lifeline(), {}
    for engine_id in engine_ids:
        settings = {"ENGINE_ID": engine_id, "DEPLOYMENT": "chat", "BACKEND": "simulated", "SIMULATE_ITL_MS": "1"}
        children[engine_id] = Child(
            name=engine_id,
            command=python_module("headrace.engine"),
            environ={f"HEADRACE_ENGINE_{k}": v for k, v in settings.items()} | {"HEADRACE_REDIS_URL": redis_url},
            log_path=folder / f"{engine_id}.log",
            lifeline=lifeline,
        )
        children[engine_id].start()
    try:
        yield children
    finally:
        for child in children.values():
            os.kill(child.pid, signal.SIGCONT)
            kill_tree(child.pid)
            child.wait(5.0)
        lifeline.cut()


class Gateway:
    """What a gateway asks and reports."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._stub: Any = RoutingServiceStub(peer.channel)
        self.bundle_digest = ""
        self._number = 0

    async def place(self) -> pb.PlaceResponse:
        self._number += 1
        request = pb.PlaceRequest(
            request_id=f"r{self._number}",
            attempt=1,
            deployment="chat",
            bundle_digest=self.bundle_digest,
            prompt_tokens=20,
            max_tokens=8,
        )
        return await self._peer.unary(self._stub.Place, request, deadline=Deadline.after(5))

    async def report(self, placed: pb.PlaceResponse, outcome: pb.Outcome) -> None:
        request = pb.ReleaseRequest(
            request_id=f"r{self._number}", attempt=1, outcome=outcome, engine_id=placed.engine_id, epoch=placed.epoch
        )
        await self._peer.unary(self._stub.Release, request, deadline=Deadline.after(5))

    async def replicas(self) -> dict[str, pb.Replica]:
        view = await self._peer.unary(self._stub.ListReplicas, pb.ListReplicasRequest(), deadline=Deadline.after(5))
        return {r.heartbeat.engine_id: r for r in view.replicas}


@asynccontextmanager
async def a_gateway(redis_url: str, *engine_ids: str) -> AsyncIterator[Gateway]:
    app = RouterApp(RouterSettings(redis_url=redis_url, etcd_endpoints=(), freshness_s=FRESHNESS_S))
    await app.start()
    running = asyncio.create_task(app.run())
    try:
        async with Peer(app.address) as peer:
            gateway = Gateway(peer)

            async def ready() -> bool:
                found = [r.heartbeat for r in (await gateway.replicas()).values() if r.heartbeat.phase == 2]
                gateway.bundle_digest = found[0].bundle_digest if found else ""
                return {h.engine_id for h in found} == set(engine_ids)

            await eventually(ready, within_s=40)
            yield gateway
    finally:
        running.cancel()
        await asyncio.wait({running})
        await app.drain()


async def test_a_frozen_engine_gets_nothing_soon_and_one_that_failed_comes_back_by_a_real_generation(tmp_path: Path):
    with EmbeddedRedis.start(tmp_path) as redis, engines(tmp_path, redis.url, "a", "b") as children:
        async with a_gateway(redis.url, "a", "b") as gateway:
            # Three failures in a row, whatever else goes on: out, and back once it has made a token.
            a = (await gateway.replicas())["a"].heartbeat
            failed = pb.PlaceResponse(engine_id="a", epoch=a.epoch)
            for _ in range(3):
                await gateway.report(failed, pb.OUTCOME_TRANSPORT)
            assert (await gateway.replicas())["a"].ejected_s > 0
            assert {(await gateway.place()).engine_id for _ in range(10)} == {"b"}

            async def back() -> bool:
                return (await gateway.replicas())["a"].ejected_s == 0

            await eventually(back)

            os.kill(children["a"].pid, signal.SIGSTOP)
            frozen_at = time.monotonic()
            await asyncio.sleep(FRESHNESS_S + 0.3)
            placed = [await gateway.place() for _ in range(20)]
            assert time.monotonic() - frozen_at < 2.5 + FRESHNESS_S
            assert {p.engine_id for p in placed} == {"b"}
            verdicts = {c.engine_id: c.verdict for c in placed[-1].considered}
            assert verdicts == {"a": pb.VERDICT_STALE, "b": pb.VERDICT_CHOSEN}

            # Ejected while frozen: its probe is not answered, so it stays out for longer.
            for _ in range(3):
                await gateway.report(failed, pb.OUTCOME_ENGINE_FAULT)

            async def out_for_longer() -> bool:
                return (await gateway.replicas())["a"].ejected_s > 1.0

            await eventually(out_for_longer)
