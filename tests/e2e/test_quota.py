"""A tenant's limits over three real gateways, while fifty clients ask at once and parts are taken away."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack

import psutil
import pytest

from headrace.api.common.v1 import sampling_pb2
from headrace.api.control.v1.intent_pb2 import Limits
from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.base.deadline import Deadline
from headrace.base.errors import Exhausted, HeadraceError
from headrace.testkit.books import tenant_key
from headrace.testkit.cluster import DEPLOYMENT, Client, Cluster
from headrace.testkit.eventually import eventually

GATEWAYS = ("gateway-0", "gateway-1", "gateway-2")
CLIENTS = 50
LEASE_S = 3
OK, REFUSED = "OK", "RATE_LIMITED"
LIMITS = {
    "by-requests": Limits(requests_per_minute=60),
    "by-tokens": Limits(tokens_per_minute=1000),
    "by-both": Limits(requests_per_minute=10, tokens_per_minute=100),
    "held": Limits(tokens_per_minute=1200),
    "shared": Limits(requests_per_minute=60),
}


@pytest.fixture
async def keys(cluster: Cluster) -> dict[str, str]:
    """A key of each tenant, known before the first gateway starts."""
    await cluster.start_stores()
    return {tenant: await tenant_key(cluster, tenant, limits) for tenant, limits in LIMITS.items()}


@pytest.fixture
async def doors(cluster: Cluster, keys: dict[str, str]) -> AsyncIterator[Sequence[Client]]:
    """A client of each of three gateways on one Redis, with one router and one fast engine."""
    # Redis is also where heartbeats are: here only the quotas are to miss it.
    cluster.start_service("router", environ={"HEADRACE_ROUTER_FRESHNESS_S": "120"})
    for gateway in GATEWAYS:
        cluster.start_service("gateway", name=gateway, environ={"HEADRACE_GATEWAY_QUOTA_LEASE_S": str(LEASE_S)})
    cluster.start_engine("a", simulate_itl_ms=1, max_num_seqs=256, worker_stall_s=300, worker_lost_s=300)
    await cluster.until_serving("router", *GATEWAYS)
    await cluster.until_ready("a")
    await eventually(lambda: [cluster.metric(each, "headrace_gateway_quota_gateways") for each in GATEWAYS] == [3] * 3)
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(cluster.client(gateway)) for gateway in GATEWAYS]


async def asked(door: Client, key: str, cost: int) -> str:
    """One request of `cost` tokens, its prompt's one included; how it ended."""
    request = pb.GenerateRequest(
        model=DEPLOYMENT,
        token_ids=pb.TokenIds(ids=[338]),
        sampling=sampling_pb2.SamplingParams(max_tokens=cost - 1, ignore_eos=True),
    )
    metadata = {"authorization": f"Bearer {key}"}
    try:
        async with door.peer.stream(
            door.stub.Generate, request, deadline=Deadline.after(90), metadata=metadata
        ) as events:
            async for _ in events:
                pass
    except Exhausted as refusal:
        return refusal.reason if refusal.retry_after_s else "a refusal that does not say when to come back"
    except HeadraceError as error:
        return error.reason
    return OK


async def crowd(doors: Sequence[Client], key: str, costs: Sequence[int]) -> list[tuple[int, str]]:
    """Fifty clients in parallel, over all gateways, until each of `costs` was asked for once: (cost, end)."""
    wanted = iter(costs)
    ends: list[tuple[int, str]] = []

    async def one(number: int) -> None:
        for turn, cost in zip(itertools.count(number), wanted, strict=False):
            ends.append((cost, await asked(doors[turn % len(doors)], key, cost)))

    await asyncio.gather(*(one(number) for number in range(CLIENTS)))
    assert {end for _, end in ends} <= {OK, REFUSED}, "nothing else happens to anybody"
    return ends


def spent(ends: Sequence[tuple[int, str]]) -> int:
    """Tokens of those that were let in."""
    return sum(cost for cost, end in ends if end == OK)


def let_in(ends: Sequence[tuple[int, str]]) -> int:
    """How many were let in."""
    return Counter(end for _, end in ends)[OK]


def let_in_alone(cluster: Cluster) -> float:
    """How many a gateway let in by itself, because Redis seemed to be away: 0 but on a machine that stood still."""
    pattern = r'headrace_gateway_quota_reservations_total\{outcome="DEGRADED"\}'
    return sum(cluster.metric(gateway, pattern) for gateway in GATEWAYS if cluster.children[gateway].alive)


async def test_limits_hold_exactly_over_three_gateways_and_a_refusal_costs_nothing(
    cluster: Cluster, keys: dict[str, str], doors: Sequence[Client]
) -> None:
    requests = let_in(await crowd(doors, keys["by-requests"], [2] * 150))
    tokens = spent(await crowd(doors, keys["by-tokens"], [8, 16, 32, 64] * 25))
    large = let_in(await crowd(doors, keys["by-both"], [60] * 12))
    small = let_in(await crowd(doors, keys["by-both"], [2] * 50))

    alone = let_in_alone(cluster)
    assert requests <= 60 + alone
    assert tokens <= 1000 + 64 * alone
    if not alone:
        assert requests == 60
        assert 1000 - 8 < tokens <= 1000, "never a token more, and as long as anything fits it is let in"
        assert (large, small) == (1, 9), "the eleven that had too many tokens have not cost a request"


async def test_a_killed_gateway_s_reservations_come_back_and_the_limit_holds_throughout(
    cluster: Cluster, keys: dict[str, str], doors: Sequence[Client]
) -> None:
    # Twelve of 100 tokens fill the limit; an engine whose worker stands still keeps them reserved.
    (worker,) = psutil.Process(cluster.children["a"].pid).children()
    worker.send_signal(signal.SIGSTOP)
    held = [asyncio.create_task(asked(doors[n % 3], keys["held"], 100)) for n in range(12)]
    try:
        await eventually(lambda: cluster.metric("a", "headrace_engine_sequences_open") == 12)
        assert let_in(await crowd(doors, keys["held"], [100] * 6)) == 0
        cluster.children["gateway-2"].kill()
        alive = doors[:2]

        def running() -> int:
            return sum(not task.done() for task in held)

        async def four_more() -> bool:
            held.append(asyncio.create_task(asked(alive[len(held) % 2], keys["held"], 100)))
            await asyncio.wait(held[-1:], timeout=0.5)
            return running() == 12

        await eventually(lambda: running() == 8)
        await eventually(four_more, within_s=40)
        assert let_in(await crowd(alive, keys["held"], [100] * 6)) == 0, "four came back, and not one more"
    finally:
        worker.send_signal(signal.SIGCONT)
    ends = Counter(await asyncio.gather(*held))
    assert ends[OK] == 12
    assert let_in_alone(cluster) == 0


async def test_with_redis_away_each_gateway_lets_in_its_share_and_nobody_hears_an_internal_error(
    cluster: Cluster, keys: dict[str, str], doors: Sequence[Client]
) -> None:
    degraded = "headrace_gateway_quota_degraded"
    for door in doors:
        assert let_in(await crowd([door], keys["shared"], [2] * 10)) == 10
    os.kill(cluster.redis.pid, signal.SIGSTOP)
    try:
        during = let_in(await crowd(doors, keys["shared"], [2] * 120))
        assert [cluster.metric(gateway, degraded) for gateway in GATEWAYS] == [1, 1, 1], "it shows"
    finally:
        os.kill(cluster.redis.pid, signal.SIGCONT)
    assert during == 30, "a third of the limit for each, of which each had let in ten"

    await eventually(lambda: not any(cluster.metric(gateway, degraded) for gateway in GATEWAYS), within_s=20)
    assert let_in(await crowd(doors, keys["shared"], [2] * 60)) == 0, "what was let in meanwhile counts"
