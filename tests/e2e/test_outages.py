"""The failure table: what clients see when a part is lost."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from headrace.base.errors import Unavailable
from headrace.cli.intent import Wanted
from headrace.testkit.cluster import DEPLOYMENT, Cluster
from headrace.testkit.eventually import eventually


async def test_controller_and_etcd_killed_requests_go_on(cluster: Cluster) -> None:
    await cluster.start_stores(Wanted(deployment=DEPLOYMENT, backend="simulated", replicas=1))
    for kind in ("telemetry", "router", "controller", "gateway"):
        cluster.start_service(kind)
    await cluster.until_serving("telemetry", "router", "controller", "gateway")
    beats = await cluster.until_ready(f"{DEPLOYMENT}-1")
    async with cluster.client() as client:
        before = await client.generate(text="still there?", sampling={"max_tokens": 12})
        cluster.children["controller"].kill()
        os.kill(cluster.etcd.pid, signal.SIGKILL)
        for _ in range(5):
            after = await client.generate(text="still there?", sampling={"max_tokens": 12})
            assert after.token_ids == before.token_ids
            await asyncio.sleep(0.3)
        models = await client.peer.unary(
            client.stub.ListModels, _list_models(), deadline=_soon(), metadata=client.metadata
        )
        assert [m.name for m in models.models] == [DEPLOYMENT]
    os.kill(beats[f"{DEPLOYMENT}-1"].pid, 0)  # the engine outlived its controller
    os.kill(beats[f"{DEPLOYMENT}-1"].pid, signal.SIGTERM)


async def test_telemetry_killed_requests_go_on(fleet: Cluster) -> None:
    fleet.start_engine("a", simulate_itl_ms=1)
    await fleet.until_ready("a")
    fleet.children["telemetry"].kill()
    async with fleet.client() as client:
        for _ in range(3):
            answer = await client.generate(text="hello", sampling={"max_tokens": 8})
            assert len(answer.token_ids) == 8


async def test_redis_killed_places_from_the_last_view_until_the_bound_then_unavailable(cluster: Cluster) -> None:
    await cluster.start_stores()
    cluster.start_service("router", environ={"HEADRACE_ROUTER_FRESHNESS_S": "3"})
    cluster.start_service("gateway")
    await cluster.until_serving("router", "gateway")
    cluster.start_engine("a", simulate_itl_ms=1)
    await cluster.until_ready("a")
    async with cluster.client() as client:
        await client.generate(text="hello", sampling={"max_tokens": 4})
        os.kill(cluster.redis.pid, signal.SIGKILL)
        answer = await client.generate(text="hello", sampling={"max_tokens": 4})
        assert len(answer.token_ids) == 4

        async def refused() -> Unavailable | None:
            try:
                await client.generate(text="hello", sampling={"max_tokens": 4})
            except Unavailable as away:
                return away
            return None

        away = await eventually(refused, within_s=15, every_s=0.2)
        assert away.retry_after_s is not None


async def test_a_router_killed_another_places(cluster: Cluster) -> None:
    await cluster.start_stores()
    cluster.start_service("router", name="router-0")
    cluster.start_service("router", name="router-1")
    cluster.start_service("gateway")
    await cluster.until_serving("router-0", "router-1", "gateway")
    cluster.start_engine("a", simulate_itl_ms=1)
    await cluster.until_ready("a")
    async with cluster.client() as client:
        for victim in (None, "router-0"):
            if victim:
                cluster.children[victim].kill()
            for _ in range(4):
                answer = await client.generate(text="hello", sampling={"max_tokens": 4})
                assert len(answer.token_ids) == 4
        cluster.children["router-1"].kill()
        with pytest.raises(Unavailable):
            await client.generate(text="hello", sampling={"max_tokens": 4})


async def test_a_gateway_killed_its_sequences_are_freed(cluster: Cluster) -> None:
    await cluster.start_stores()
    cluster.start_service("router")
    cluster.start_service("gateway")
    await cluster.until_serving("router", "gateway")
    cluster.start_engine("a", simulate_itl_ms=20)
    await cluster.until_ready("a")
    async with cluster.client() as client:
        answers = [
            asyncio.ensure_future(client.generate(text=f"n {n}", sampling={"max_tokens": 2000})) for n in range(8)
        ]
        await eventually(lambda: cluster.metric("a", "headrace_engine_sequences_open") == 8)
        cluster.children["gateway"].kill()
        outcomes = await asyncio.gather(*answers, return_exceptions=True)
    assert all(isinstance(o, Unavailable) for o in outcomes)
    await eventually(lambda: cluster.metric("a", "headrace_engine_sequences_open") == 0, within_s=5)
    await eventually(lambda: cluster.metric("a", "headrace_engine_kv_blocks_used") == 0, within_s=5)


async def test_a_draining_engine_finishes_its_answers_and_gets_no_new_ones(fleet: Cluster) -> None:
    fleet.start_engine("a", simulate_itl_ms=20)
    await fleet.until_ready("a")
    async with fleet.client() as client:
        running = asyncio.ensure_future(client.generate(text="long", sampling={"max_tokens": 60}))
        await eventually(lambda: fleet.metric("a", "headrace_engine_tokens_total") >= 3)
        fleet.start_engine("b", simulate_itl_ms=1)
        await fleet.until_ready("b")
        fleet.children["a"].terminate()
        fresh = await client.generate(text="new", sampling={"max_tokens": 8})
        assert fresh.end.engine_id == "b"
        finished = await running
        assert finished.end.engine_id == "a"
        assert finished.end.attempts == 1
        assert len(finished.token_ids) == 60
    await eventually(lambda: fleet.children["a"].exit_status == 0, within_s=10)


def _list_models() -> object:
    from headrace.api.inference.v1 import inference_service_pb2 as pb

    return pb.ListModelsRequest()


def _soon() -> object:
    from headrace.base.deadline import Deadline

    return Deadline.after(5)
