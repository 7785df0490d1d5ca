"""What clients see of routers and replicas that are killed, frozen and started under load: nothing, if that can be."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest

from headrace.base.deadline import Deadline
from headrace.base.errors import Unavailable
from headrace.testkit.cluster import Answer, Client, Cluster
from headrace.testkit.eventually import eventually
from headrace.testkit.freezing import frozen
from headrace.testkit.load import load, prompt, with_fleet
from headrace.testkit.routing import Routing, explained, routing, set_routing

NO_ROUTER = "NO_ROUTER"


# --- Routers lost -----------------------------------------------------------------------------------------------------


async def test_a_router_restarted_or_frozen_under_load_costs_no_error_and_knows_all_eight_replicas_at_once(
    cluster: Cluster,
) -> None:
    await cluster.start_stores()
    names = await with_fleet(cluster, engines=8, routers=2, simulate_itl_ms=5)
    async with cluster.client() as client, load(client, 8) as sent:
        await sent.more(20)
        for router in ("router-0", "router-1"):  # one of them is the one that the gateway uses
            child = cluster.children[router]
            child.kill()
            await sent.more(10)
            child.start()
            await eventually(lambda router=router: listens(cluster, router), within_s=30)
            listening = time.monotonic()
            async with routing(cluster, router) as restarted:
                seen = await eventually(restarted.eligible)
            now = time.monotonic()
            assert seen == set(names), "the first answer of all knows everybody"
            assert now - listening <= 2.0, "whatever else this machine has to do while it starts"
            await sent.more(10)
            with frozen(child.pid):
                await sent.more(10)
    assert sent.errors == []
    assert {a.end.attempts for a in sent.answers} == {1}


async def listens(cluster: Cluster, name: str) -> bool:
    host, port = cluster.addresses[name].split(":")
    try:
        _, writer = await asyncio.open_connection(host, int(port))
    except OSError:
        return False
    writer.close()
    return True


async def test_the_only_router_killed_and_started_again_costs_clients_a_wait_or_a_hint_when_to_come_back(
    cluster: Cluster,
) -> None:
    await cluster.start_stores()
    patient = {"HEADRACE_GATEWAY_PLACE_WAIT_S": "20"}  # so that it holds on a machine where a start takes long
    await with_fleet(cluster, engines=2, routers=1, environ=patient, simulate_itl_ms=5)
    router = cluster.children["router-0"]
    async with cluster.client() as client:
        running = asyncio.create_task(client.generate(token_ids=prompt(64), sampling={"max_tokens": 300}))
        async with load(client, 4) as sent:
            await sent.more(8)
            router.kill()
            router.start()
            await sent.more(16)
        assert sent.errors == [], "the gateway waits for it"
        router.kill()
        with pytest.raises(Unavailable) as refused:
            await client.generate(token_ids=prompt(64), sampling={"max_tokens": 4}, deadline=Deadline.after(1.5))
        assert refused.value.reason == NO_ROUTER
        assert refused.value.retry_after_s is not None
        router.start()
        again = await eventually(lambda: answered(client))
        assert len(again.token_ids) == 4
        assert len((await running).token_ids) == 300, "answers under way need no router"


async def answered(client: Client) -> Answer | None:
    try:
        return await client.generate(token_ids=prompt(64), sampling={"max_tokens": 4})
    except Unavailable:
        return None


# --- Replicas lost ----------------------------------------------------------------------------------------------------


async def test_nothing_is_placed_on_a_frozen_replica_once_noticed_and_its_answers_go_on_elsewhere_unchanged(
    cluster: Cluster,
) -> None:
    await cluster.start_stores()
    keepalive = {"HEADRACE_GATEWAY_KEEPALIVE_S": "0.5"}
    names = await with_fleet(cluster, engines=3, routers=1, environ=keepalive, simulate_itl_ms=5)
    await set_routing(cluster, freshness_s=2.0)
    beats = await cluster.until_ready(*names)
    async with cluster.client() as client, routing(cluster, "router-0") as router:
        async with load(client, 9, max_tokens=60) as sent:
            await sent.more(20)
            await eventually(lambda: cluster.metric("e-0", "headrace_engine_running") >= 2)
            with frozen(beats["e-0"].pid):
                frozen_ns = time.time_ns()
                await asyncio.sleep(4.0)  # the fault itself: it lasts that long
                thawed_ns = time.time_ns()
            await eventually(lambda: back_in_service(router))
            await sent.more(5)
        assert sent.errors == []
        placed_s = []
        for answer in sent.answers:
            for decision in await explained(cluster, answer):
                if decision.placed.engine_id == "e-0" and frozen_ns < decision.decided_unix_ns < thawed_ns:
                    placed_s.append((decision.decided_unix_ns - frozen_ns) / 1e9)
        moved = [s for s in sent.sent if s.answer is not None and s.answer.end.attempts > 1]
        assert max(placed_s, default=0.0) <= 2.5
        assert moved, "it had answers under way"
        for one in moved:
            assert one.answer is not None
            unbroken = await client.generate(token_ids=one.token_ids, sampling={"max_tokens": 60})
            assert one.answer.token_ids == unbroken.token_ids
            assert one.answer.text == unbroken.text


async def back_in_service(router: Routing) -> bool:
    return "e-0" in await router.eligible()


async def test_the_replica_with_the_hot_prefix_is_killed_and_no_client_hears_of_it(cluster: Cluster) -> None:
    await cluster.start_stores()
    names = await with_fleet(cluster, engines=3, routers=1, simulate_itl_ms=5)
    beats = await cluster.until_ready(*names)
    hot = prompt(512)

    async def ask(client: Client) -> Answer:
        return await client.generate(token_ids=hot + prompt(16), sampling={"max_tokens": 4})

    async with cluster.client() as client:
        first = await ask(client)
        holder = first.end.engine_id
        second = await ask(client)
        assert (second.end.engine_id, second.end.usage.cached_tokens) == (holder, 512)
        os.kill(beats[holder].pid, signal.SIGKILL)
        after = [await ask(client) for _ in range(6)]
        assert holder not in {a.end.engine_id for a in after}
        assert after[0].end.usage.cached_tokens == 0
        assert {(a.end.engine_id, a.end.usage.cached_tokens) for a in after[1:]} == {(after[0].end.engine_id, 512)}


async def test_while_replicas_come_and_go_every_request_ends_within_its_deadline(cluster: Cluster) -> None:
    await cluster.start_stores()
    names = await with_fleet(cluster, engines=3, routers=2, simulate_itl_ms=5)
    lives = dict(await cluster.until_ready(*names))
    deadline_s = 15.0
    async with cluster.client() as client, load(client, 8, max_tokens=40, deadline_s=deadline_s) as sent:
        await sent.more(10)
        for n in range(5):
            added = f"e-{len(names) + n}"
            cluster.start_engine(added, simulate_itl_ms=5)
            os.kill(lives.pop(min(lives)).pid, signal.SIGKILL)
            lives |= await cluster.until_ready(added)
            await sent.more(10)
    slowest = max(s.took_s for s in sent.sent)
    assert slowest <= deadline_s + 0.5
    assert sent.errors == []
    assert all(len(a.token_ids) == 40 for a in sent.answers)
