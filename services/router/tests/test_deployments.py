"""Deployments' rules from a real etcd: followed while it is there, kept while it is not."""

from __future__ import annotations

import asyncio
from pathlib import Path

from headrace.api.control.v1.intent_pb2 import Deployment, Routing, Saturation
from headrace.bundle import intent, keys
from headrace.coord.embedded import EmbeddedEtcd
from headrace.coord.etcd.client import EtcdClient
from headrace.router.adapters.deployments import Deployments
from headrace.router.app import RouterApp
from headrace.router.core.rules import Policy, Rules
from headrace.router.settings import RouterSettings
from headrace.testkit.eventually import eventually

DEFAULTS = Rules(freshness_s=7.0)


def record(**changes) -> bytes:
    return intent.encode(Deployment(name="chat", bundle_digest="0" * 32, replicas=1, backend="simulated", **changes))


def test_what_a_record_leaves_out_takes_the_default():
    deployments = Deployments(freshness_s=7.0)
    assert deployments.rules_of("chat") == DEFAULTS
    deployments.update({keys.deployment_key("chat"): record()})
    assert deployments.rules_of("chat") == DEFAULTS
    routing = Routing(policy="least_loaded", slow_start_s=30, saturation=Saturation(pressure=0.5))
    deployments.update({keys.deployment_key("chat"): record(routing=routing, tenants=["acme"])})
    rules = deployments.rules_of("chat")
    assert (rules.policy, rules.freshness_s, rules.slow_start_s) == (Policy.LEAST_LOADED, 7.0, 30.0)
    assert (rules.saturation.waiting, rules.saturation.pressure) == (1.0, 0.5)
    assert rules.tenants == {"acme"}


def test_a_record_that_cannot_be_read_leaves_the_rules_as_they_were_and_its_neighbours_alone():
    deployments = Deployments(freshness_s=7.0)
    key, other = keys.deployment_key("chat"), keys.deployment_key("other")
    deployments.update({key: record(routing=Routing(policy="round_robin"))})
    deployments.update({key: b"{nonsense", other: record(routing=Routing(freshness_s=2.0))})
    assert deployments.rules_of("chat").policy is Policy.ROUND_ROBIN
    assert deployments.rules_of("other").freshness_s == 2.0


def test_a_deployment_that_is_gone_has_the_defaults_again():
    deployments = Deployments(freshness_s=7.0)
    deployments.update({keys.deployment_key("chat"): record(routing=Routing(policy="round_robin"))})
    deployments.update({})
    assert deployments.rules_of("chat") == DEFAULTS


async def test_a_change_in_etcd_arrives_and_outlives_etcd(tmp_path: Path):
    etcd = await asyncio.to_thread(EmbeddedEtcd.start, tmp_path)
    client = EtcdClient([etcd.endpoint])
    app = RouterApp(RouterSettings(redis_url="redis://127.0.0.1:1/0", etcd_endpoints=(etcd.endpoint,)))
    await app.start()
    running = asyncio.create_task(app.run())

    def policy() -> Policy:
        return app.router.rules_of("chat").policy

    async def has(wanted: Policy) -> None:
        async def arrived() -> bool:
            return policy() is wanted

        await eventually(arrived)

    try:
        assert policy() is Policy.LEAST_COMPLETION_TIME
        await client.put(keys.deployment_key("chat"), record(routing=Routing(policy="round_robin")))
        await has(Policy.ROUND_ROBIN)
        await client.put(keys.deployment_key("chat"), record(routing=Routing(policy="least_loaded")))
        await has(Policy.LEAST_LOADED)
        await asyncio.to_thread(etcd.stop)
        await asyncio.sleep(0.3)
        assert policy() is Policy.LEAST_LOADED
        assert not running.done()
    finally:
        running.cancel()
        await asyncio.wait({running})
        await app.drain()
        await client.close()
        await asyncio.to_thread(etcd.stop)
