"""What the router promises of a fleet that works: prefixes met again, reasons told, a full house in order."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace.api.control.v1 import control_service_pb2 as control_pb
from headrace.api.control.v1 import control_service_pb2_grpc as control_rpc
from headrace.api.routing.v1 import routing_service_pb2 as pb
from headrace.base.deadline import Deadline
from headrace.cli.intent import Wanted, apply, etcd_client
from headrace.coord.redis.store import open_redis
from headrace.rpc.client import Peer
from headrace.testkit.books import tenant_key
from headrace.testkit.cluster import Answer, Client, Cluster
from headrace.testkit.command import HEADRACE, environ
from headrace.testkit.eventually import eventually
from headrace.testkit.freezing import frozen
from headrace.testkit.load import prompt, with_fleet
from headrace.testkit.routing import Routing, explained, routing, set_routing


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Four replicas, then two routers, then a gateway; for tests that leave it as they found it."""
    made = Cluster(tmp_path_factory.mktemp("router"))

    async def start() -> None:
        await made.start_stores()
        await with_fleet(made, engines=4, routers=2, simulate_itl_ms=5)

    killed: list[str] = []
    try:
        asyncio.run(start())
        yield made
    finally:
        killed = asyncio.run(made.close())
    assert killed == [], "every process drains within its time"


# --- Prefixes ---------------------------------------------------------------------------------------------------------


async def test_an_equal_prompt_is_a_hit_on_the_same_replica_by_routers_younger_than_the_cache_and_for_its_tenant_only(
    standing: Cluster,
) -> None:
    token_ids = prompt(320)
    others = await tenant_key(standing, "others")
    async with standing.client() as mine, standing.client(api_key=others) as theirs:

        async def ask(client: Client) -> tuple[str, int]:
            answer = await client.generate(token_ids=token_ids, sampling={"max_tokens": 4})
            return answer.end.engine_id, answer.end.usage.cached_tokens

        holder, cached = await ask(mine)
        assert cached == 0
        for router in ("router-0", "router-1"):
            standing.children[router].kill()
            standing.children[router].start()
        await standing.until_serving("router-0", "router-1")
        for router in ("router-0", "router-1"):
            async with routing(standing, router) as young:
                await eventually(lambda young=young: knows_blocks(young, holder))
        assert await ask(mine) == (holder, 304), "all but the block of the last token"
        assert (await ask(theirs))[1] == 0


async def knows_blocks(router: Routing, engine_id: str) -> bool:
    return (await router.replicas())[engine_id].indexed_blocks >= 20


async def test_sixteen_siblings_at_once_through_two_routers_compute_their_prefix_on_two_replicas_at_most(
    standing: Cluster,
) -> None:
    standing.start_service("gateway", name="gateway-b")
    await standing.until_serving("gateway-b")
    async with standing.client() as one, standing.client("gateway-b") as other:
        for clients in ([one], [one, other]):
            shared = prompt(1024)
            answers = await asyncio.gather(
                *(
                    clients[n % len(clients)].generate(token_ids=shared + prompt(32), sampling={"max_tokens": 8})
                    for n in range(16)
                )
            )
            computed = {a.end.engine_id for a in answers if a.end.usage.cached_tokens < 1024}
            assert len(computed) <= 2
    assert standing.children["gateway-b"].stop()


# --- Explained, saturated, without Redis, by another policy -----------------------------------------------------------


async def test_headrace_explain_prints_the_placement_of_a_request_with_numbers_and_its_outcome(
    standing: Cluster, tmp_path: Path
) -> None:
    async with standing.client() as client:
        answer = await client.generate(token_ids=prompt(64), sampling={"max_tokens": 8})
    assert answer.started is not None
    routers = ",".join(standing.addresses[name] for name in ("router-0", "router-1"))

    async def printed() -> str:
        process = await asyncio.create_subprocess_exec(
            HEADRACE,
            "explain",
            answer.started.request_id,
            env=environ(tmp_path) | {"HEADRACE_ROUTER_ADDRESSES": routers},
            stdout=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(30):
            out, _ = await process.communicate()
        assert process.returncode == 0
        assert b"not reported" not in out
        return out.decode()

    text = await eventually(printed)
    rows = {words[0]: words for line in text.splitlines() if (words := line.split())}
    assert f"placed on {answer.end.engine_id} by least_completion_time" in text
    assert {f"e-{n}" for n in range(4)} <= set(rows)
    assert {rows[f"e-{n}"][1] for n in range(4)} == {"chosen", "slower"}
    assert rows[answer.end.engine_id][1] == "chosen"
    age_s, queue_s, prefill_s, decode_s, total_s = map(float, rows[answer.end.engine_id][2:7])
    assert 0 <= age_s < 10
    assert prefill_s > 0
    assert total_s == pytest.approx(queue_s + prefill_s + decode_s, abs=0.002)
    assert "outcome: ok, first token after" in text
    assert "8 tokens in" in text


async def test_a_full_fleet_makes_requests_wait_in_turn_and_refuses_none_and_the_controller_says_saturated(
    standing: Cluster,
) -> None:
    async with etcd_client([standing.etcd.endpoint]) as etcd:
        await apply(etcd, Wanted(deployment="small", replicas=0))
    standing.start_engine("s-0", deployment="small", max_num_seqs=2, simulate_itl_ms=10)
    standing.start_service("controller", environ={"HEADRACE_CONTROLLER_PROVISIONER": "external"})
    await standing.until_serving("controller")
    await standing.until_ready("s-0")
    ended: list[int] = []
    async with standing.client() as client, controller(standing) as fullness:
        await eventually(lambda: fullness("small", saturated=0, said=False))

        async def ask(number: int) -> Answer:
            answer = await client.generate(model="small", token_ids=prompt(32), sampling={"max_tokens": 30})
            ended.append(number)
            return answer

        asked = []
        for number in range(20):
            asked.append(asyncio.create_task(ask(number)))
            await asyncio.sleep(0.01)  # they come one after the other
        waiting = await eventually(lambda: standing.metric("gateway", r"headrace_gateway_queue_waiting\{.*"))
        await eventually(lambda: fullness("small", saturated=1, said=True))
        answers = await asyncio.gather(*asked)
        await eventually(lambda: fullness("small", saturated=0, said=False))
    assert {len(a.token_ids) for a in answers} == {30}
    assert waiting >= 8, "two run and about two wait at the replica; the others wait at the gateway"
    assert max(abs(number - place) for place, number in enumerate(ended)) <= 4
    assert standing.children["s-0"].stop()
    assert standing.children["controller"].stop()


@asynccontextmanager
async def controller(cluster: Cluster) -> AsyncIterator[Callable[..., Awaitable[bool]]]:
    """Asks whether the controller counts so many saturated replicas of a deployment, and says so in its reason."""
    async with Peer(cluster.addresses["controller"]) as peer:
        stub: Any = control_rpc.ControlServiceStub(peer.channel)

        async def so(deployment: str, *, saturated: int, said: bool) -> bool:
            status = await peer.unary(stub.GetStatus, control_pb.GetStatusRequest(), deadline=Deadline.after(5))
            (found,) = [d for d in status.deployments if d.name == deployment]
            return bool(found.saturated == saturated and found.HasField("saturated")) and said == (
                "SATURATED: " in found.reason
            )

        yield so


async def test_without_redis_placements_go_on_degraded_and_are_normal_again_afterwards(standing: Cluster) -> None:
    async with standing.client() as client, routing(standing, "router-0") as router:
        await eventually(lambda: idle_and_shared(router))
        with frozen(standing.redis.pid):
            placed = await router.place()
            assert placed.degraded
            assert placed.engine_id
            answers = await asyncio.gather(
                *(client.generate(token_ids=prompt(64), sampling={"max_tokens": 40}) for _ in range(16))
            )
            assert {len(a.token_ids) for a in answers} == {40}
        placements = [(await explained(standing, answer))[0].placed for answer in answers]
        assert all(placed.degraded for placed in placements)
        most = max(sum(c.bookings for c in placed.considered) for placed in placements)
        assert most >= 4, "it spreads load by the router's own bookings"
        await eventually(lambda: idle_and_shared(router))


async def idle_and_shared(router: Routing) -> bool:
    beats = [replica.heartbeat for replica in (await router.replicas()).values()]
    idle = not any(beat.running + beat.waiting + beat.waiting_prefill_tokens for beat in beats)
    return idle and not (await router.place()).degraded


async def test_bookings_that_cannot_be_read_cost_a_request_no_second_and_pass(standing: Cluster) -> None:
    redis = open_redis(standing.redis.url)
    async with redis, standing.client() as client, routing(standing, "router-0") as router:
        await eventually(lambda: idle_and_shared(router))
        for engine_id in ("e-0", "e-1", "e-2", "e-3"):
            await redis.set(f"headrace:v1:ledger:{engine_id}", b"\xc1 what a newer version wrote", px=1500)
        assert (await router.place()).degraded
        for _ in range(5):
            began = time.monotonic()
            answer = await client.generate(token_ids=prompt(64), sampling={"max_tokens": 4})
            assert time.monotonic() - began < 1.0
            assert len(answer.token_ids) == 4
        await eventually(lambda: idle_and_shared(router))


async def test_the_policy_in_etcd_rules_the_next_placements_and_a_client_cannot_name_one(standing: Cluster) -> None:
    async with standing.client() as client:
        for name in ("x-headrace-policy", "x-headrace-routing", "policy", "routing-policy"):
            client.metadata[name] = "least_loaded"

        async def placed_by() -> pb.PlaceResponse:
            answer = await client.generate(token_ids=prompt(64), sampling={"max_tokens": 4})
            return (await explained(standing, answer))[0].placed

        assert (await placed_by()).policy == pb.POLICY_LEAST_COMPLETION_TIME
        await set_routing(standing, policy="round_robin")
        try:

            async def turned() -> bool:
                return (await placed_by()).policy == pb.POLICY_ROUND_ROBIN

            await eventually(turned)
            engines = [(await placed_by()).engine_id for _ in range(8)]
            assert sorted(engines[:4]) == [f"e-{n}" for n in range(4)]
            assert engines[4:] == engines[:4], "one after the other, whatever the client says"
        finally:
            await set_routing(standing)
