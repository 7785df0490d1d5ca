"""A noisy tenant beside a quiet one on a full fleet: the order in which they are served, not the time it takes."""

from __future__ import annotations

import asyncio
from collections import Counter

from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.testkit.books import tenant_key
from headrace.testkit.cluster import Client, Cluster
from headrace.testkit.eventually import eventually

NOISY, QUIET = 80, 8
WAITING = r"headrace_gateway_queue_waiting\{.*"
AT_THE_ENGINE = 4
"""Two run and two wait there; all others wait in the gateway, where the order is made."""


async def _served(client: Client, tenant: str, order: list[str]) -> None:
    await client.generate(text=f"a question of {tenant}", sampling={"max_tokens": 10, "ignore_eos": True})
    order.append(tenant)


async def test_a_quiet_tenant_is_served_in_turn_with_one_that_asks_ten_times_as_much(fleet: Cluster) -> None:
    noisy, quiet = await tenant_key(fleet, "noisy"), await tenant_key(fleet, "quiet")
    fleet.start_engine("a", simulate_itl_ms=4, max_num_seqs=2)
    await fleet.until_ready("a")
    order: list[str] = []
    async with fleet.client(api_key=noisy) as loud, fleet.client(api_key=quiet) as soft:
        crowd = [asyncio.create_task(_served(loud, "noisy", order)) for _ in range(NOISY)]
        await eventually(lambda: fleet.metric("gateway", WAITING) >= NOISY - 20)
        before = len(order)
        await asyncio.gather(*(_served(soft, "quiet", order) for _ in range(QUIET)))
        meanwhile = order[before:]
        await asyncio.gather(*crowd)
    # In turn, one of each; those that were at the engine already, and were being placed, are ahead of both.
    assert Counter(meanwhile)["quiet"] == QUIET
    assert Counter(meanwhile)["noisy"] <= QUIET + 2 * AT_THE_ENGINE + 4
    assert Counter(order) == {"noisy": NOISY, "quiet": QUIET}, "the noisy one is served as well"


async def test_interactive_requests_pass_batch_ones_and_batch_ones_are_not_starved(fleet: Cluster) -> None:
    key = await tenant_key(fleet, "both", priority="interactive")
    fleet.start_engine("a", simulate_itl_ms=4, max_num_seqs=2)
    await fleet.until_ready("a")
    order: list[str] = []

    async def ask(client: Client, name: str, priority: pb.Priority) -> None:
        await client.generate(text=name, sampling={"max_tokens": 10, "ignore_eos": True}, priority=priority)
        order.append(name)

    async with fleet.client(api_key=key) as client:
        batch = [asyncio.create_task(ask(client, "batch", pb.PRIORITY_BATCH)) for _ in range(40)]
        await eventually(lambda: fleet.metric("gateway", WAITING) >= 20)
        before = len(order)
        await asyncio.gather(*(ask(client, "interactive", pb.PRIORITY_INTERACTIVE) for _ in range(8)))
        assert Counter(order[before:])["batch"] <= 2 * AT_THE_ENGINE + 4
        await asyncio.gather(*batch)
    assert Counter(order) == {"batch": 40, "interactive": 8}
