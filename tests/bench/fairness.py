"""A quiet tenant's time to first token, alone and beside one at ten times its load: ``python tests/bench/fairness.py``

One simulated engine that could serve two and a half times the quiet tenant's load, and is asked for eleven times as
much beside the noisy one. Both rounds take turns; printed are medians, 99th percentiles and their ratio.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from pathlib import Path

from headrace.api.control.v1.intent_pb2 import Deployment
from headrace.bundle import intent, keys
from headrace.coord.etcd.client import EtcdClient
from headrace.testkit.books import tenant_key
from headrace.testkit.cluster import DEPLOYMENT, Client, Cluster

TOKENS, RUNNING = 20, 8


async def quiet_round(client: Client, requests: int, pause_s: float) -> list[float]:
    """Milliseconds to the first token of requests that come one after the other at a fixed pace."""

    async def one() -> float:
        answer = await client.generate(text="a quiet question", sampling={"max_tokens": TOKENS, "ignore_eos": True})
        return float(answer.end.timings.first_token_ms)

    asked = []
    for _ in range(requests):
        asked.append(asyncio.create_task(one()))
        await asyncio.sleep(pause_s)
    return list(await asyncio.gather(*asked))


async def noise(client: Client, pause_s: float) -> None:
    """Ten times as many, until cancelled."""
    async with asyncio.TaskGroup() as tasks:
        while True:
            tasks.create_task(_one_of_many(client))
            await asyncio.sleep(pause_s / 10)


async def _one_of_many(client: Client) -> None:
    try:
        await client.generate(text="a noisy question", sampling={"max_tokens": TOKENS, "ignore_eos": True})
    except Exception as refused:
        if "RESOURCE_EXHAUSTED" not in str(getattr(refused, "code", "")):
            raise


async def measure(rounds: int, requests: int, pause_s: float, waiting: float, running: int) -> None:
    """Alone and beside, in turns."""
    with tempfile.TemporaryDirectory() as folder:
        cluster = Cluster(Path(folder))
        try:
            await cluster.start_stores()
            await saturated_at(cluster, waiting)
            held = {tenant: await tenant_key(cluster, tenant) for tenant in ("quiet", "noisy")}
            for kind in ("telemetry", "router", "gateway"):
                cluster.start_service(kind)
            cluster.start_engine("a", simulate_itl_ms=20, simulate_step_ms=0, max_num_seqs=running)
            await cluster.until_serving("telemetry", "router", "gateway")
            await cluster.until_ready("a")
            alone: list[float] = []
            beside: list[float] = []
            async with cluster.client(api_key=held["quiet"]) as soft, cluster.client(api_key=held["noisy"]) as loud:
                for _ in range(rounds):
                    alone += await quiet_round(soft, requests, pause_s)
                    crowd = asyncio.create_task(noise(loud, pause_s))
                    await asyncio.sleep(2)
                    beside += await quiet_round(soft, requests, pause_s)
                    crowd.cancel()
                    await asyncio.wait({crowd})
                    await asyncio.sleep(2)
        finally:
            await cluster.close()
    for name, values in (("alone", alone), ("beside 10x", beside)):
        print(f"{name:12} TTFT p50 {rank(values, 0.5):7.1f} ms, p99 {rank(values, 0.99):7.1f} ms, n {len(values)}")
    print(
        f"ratio        p50 {rank(beside, 0.5) / rank(alone, 0.5):.2f}, p99 {rank(beside, 0.99) / rank(alone, 0.99):.2f}"
    )


async def saturated_at(cluster: Cluster, waiting: float) -> None:
    """Let no more than this share of its places wait at an engine; what waits there is served as it came."""
    etcd = EtcdClient([cluster.etcd.endpoint])
    try:
        found = await etcd.get(keys.deployment_key(DEPLOYMENT))
        assert found is not None
        deployment = intent.decode(Deployment, found.value)
        deployment.routing.saturation.waiting = waiting
        await etcd.put(keys.deployment_key(DEPLOYMENT), intent.encode(deployment))
    finally:
        await etcd.close()


def rank(values: list[float], share: float) -> float:
    """Nearest rank."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def main() -> None:
    """Parse and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=40, help="of the quiet tenant, per round")
    parser.add_argument("--pause", type=float, default=0.15, help="seconds between two of its requests")
    parser.add_argument("--waiting", type=float, default=0.0, help="routing.saturation.waiting of the deployment")
    parser.add_argument("--running", type=int, default=RUNNING, help="sequences that the engine runs at once")
    given = parser.parse_args()
    asyncio.run(measure(given.rounds, given.requests, given.pause, given.waiting, given.running))


if __name__ == "__main__":
    main()
