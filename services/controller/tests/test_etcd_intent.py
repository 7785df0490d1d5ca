"""Against a real etcd."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

import pytest

from headrace.api.control.v1.intent_pb2 import Bundle, Deployment, Routing
from headrace.api.control.v1.intent_pb2 import Saturation as Bounds
from headrace.base.saturation import Saturation
from headrace.bundle.bundle import digest
from headrace.bundle.intent import encode
from headrace.bundle.keys import bundle_key, deployment_key
from headrace.controller.adapters.etcd_intent import EtcdIntent
from headrace.controller.core.fleet import Intent, Unreadable, Wanted
from headrace.coord.embedded import EmbeddedEtcd
from headrace.coord.etcd.client import EtcdClient

Eventually = Callable[[Callable[[], Awaitable[bool]]], Awaitable[None]]

BUNDLE = Bundle(
    model_path="/m.gguf",
    weights_digest="1" * 32,
    tokenizer_digest="2" * 32,
    display_name="m",
    precision="float32",
    max_model_len=64,
    engine_version="1",
)
DIGEST = digest(BUNDLE)


def deployment(**changes: object) -> Deployment:
    given = {"name": "chat", "bundle_digest": DIGEST, "replicas": 2, "backend": "simulated"} | changes
    return Deployment(**given)  # type: ignore[arg-type]


@pytest.fixture
async def client(etcd: EmbeddedEtcd) -> AsyncIterator[EtcdClient]:
    opened = EtcdClient([etcd.endpoint])
    await opened.put(bundle_key(DIGEST), encode(BUNDLE))
    yield opened
    await opened.close()


@pytest.fixture
async def intent(client: EtcdClient) -> AsyncIterator[EtcdIntent]:
    built = EtcdIntent(client)
    following = asyncio.create_task(built.run())
    yield built
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


@pytest.fixture
def read_until(intent: EtcdIntent, eventually: Eventually) -> Callable[..., Awaitable[Mapping[str, Intent]]]:
    async def wait(condition: Callable[[Mapping[str, Intent]], bool]) -> Mapping[str, Intent]:
        async def holds() -> bool:
            return (intents := intent.read()) is not None and condition(intents)

        await eventually(holds)
        intents = intent.read()
        assert intents is not None
        return intents

    return wait


ReadUntil = Callable[[Callable[[Mapping[str, Intent]], bool]], Awaitable[Mapping[str, Intent]]]


def test_nothing_is_known_before_the_first_read() -> None:
    async def unread() -> Mapping[str, Intent] | None:
        client = EtcdClient(["127.0.0.1:1"])
        intents = EtcdIntent(client).read()
        await client.close()
        return intents

    assert asyncio.run(unread()) is None


async def test_a_deployment_is_read_with_its_bundle_and_settings(
    client: EtcdClient, intent: EtcdIntent, read_until: ReadUntil, eventually: Eventually
) -> None:
    await client.put(deployment_key("chat"), encode(deployment(engine_settings={"max_num_seqs": "4"})))
    wanted = (await read_until(lambda i: "chat" in i and not i["chat"].problem))["chat"]
    assert isinstance(wanted, Wanted)
    assert (wanted.replicas, wanted.spec.bundle_digest, wanted.problem) == (2, DIGEST, "")
    assert wanted.spec.settings == (("max_num_seqs", "4"),)
    assert intent.bundle(DIGEST) == encode(BUNDLE)

    async def connected() -> bool:  # the watch follows the list
        return intent.connected

    await eventually(connected)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (b"{not json", "cannot be read"),
        (b'{"name": "chat", "replicas": "many"}', "replicas"),
        (encode(deployment(name="other")), "under the key of 'chat'"),
        (encode(deployment(bundle_digest="f" * 32)), "there is no bundle"),
        (encode(deployment(engine_settings={"engine_id": "x"})), "engine_settings['engine_id']"),
        (encode(deployment(engine_settings={"redis_url": "x"})), "engine_settings['redis_url']"),
    ],
)
async def test_a_value_that_cannot_be_used_leaves_the_last_good_one_in_force(
    client: EtcdClient, read_until: ReadUntil, value: bytes, problem: str
) -> None:
    await client.put(deployment_key("chat"), encode(deployment()))
    await read_until(lambda i: "chat" in i and not i["chat"].problem)
    await client.put(deployment_key("chat"), value)
    kept = (await read_until(lambda i: bool(i["chat"].problem)))["chat"]
    assert isinstance(kept, Wanted)
    assert kept.replicas == 2
    assert problem in kept.problem
    await client.put(deployment_key("chat"), encode(deployment(replicas=3)))
    mended = (await read_until(lambda i: not i["chat"].problem))["chat"]
    assert isinstance(mended, Wanted)
    assert mended.replicas == 3


async def test_the_threshold_is_read_with_zero_as_a_value_and_kept_when_the_next_one_has_no_sense(
    client: EtcdClient, read_until: ReadUntil
) -> None:
    await client.put(deployment_key("chat"), encode(deployment()))
    usual = (await read_until(lambda i: "chat" in i and not i["chat"].problem))["chat"]
    assert isinstance(usual, Wanted)
    assert usual.saturation == Saturation()
    routing = Routing(saturation=Bounds(waiting=0.0))
    await client.put(deployment_key("chat"), encode(deployment(routing=routing)))
    strict = Saturation(waiting=0.0)
    await read_until(lambda i: getattr(i["chat"], "saturation", None) == strict)
    senseless = encode(deployment(routing=routing)).replace(b'"waiting": 0', b'"waiting": -1')
    assert b"-1" in senseless
    await client.put(deployment_key("chat"), senseless)
    kept = (await read_until(lambda i: bool(i["chat"].problem)))["chat"]
    assert isinstance(kept, Wanted)
    assert kept.saturation == strict


async def test_a_value_that_was_never_good_is_unreadable_and_not_absent(
    client: EtcdClient, read_until: ReadUntil
) -> None:
    await client.put(deployment_key("chat"), b"{}")
    assert isinstance((await read_until(lambda i: "chat" in i))["chat"], Unreadable)
    await client.delete(deployment_key("chat"))
    assert await read_until(lambda i: "chat" not in i) == {}


async def test_a_deployment_deleted_and_made_again_badly_has_no_last_good_value(
    client: EtcdClient, read_until: ReadUntil
) -> None:
    await client.put(deployment_key("chat"), encode(deployment()))
    await read_until(lambda i: "chat" in i and not i["chat"].problem)
    await client.delete(deployment_key("chat"))
    await read_until(lambda i: "chat" not in i)
    await client.put(deployment_key("chat"), b"{}")
    assert isinstance((await read_until(lambda i: "chat" in i))["chat"], Unreadable)


async def test_a_bundle_whose_content_is_not_its_digest_is_refused(client: EtcdClient, read_until: ReadUntil) -> None:
    await client.put(bundle_key("e" * 32), encode(BUNDLE))
    await client.put(deployment_key("chat"), encode(deployment(bundle_digest="e" * 32)))
    # Bundles and deployments are watched apart: until the bundle has come, it is missing.
    await read_until(lambda i: "other content" in getattr(i.get("chat"), "problem", ""))


async def test_a_change_wakes_whoever_waits_for_one(
    client: EtcdClient, intent: EtcdIntent, read_until: ReadUntil
) -> None:
    await read_until(lambda i: True)
    waiting = asyncio.create_task(intent.changed())
    await client.put(deployment_key("chat"), encode(deployment()))
    await asyncio.wait_for(waiting, 10)
    assert intent.read() is not None


async def test_intent_outlives_etcd(
    etcd: EmbeddedEtcd, client: EtcdClient, intent: EtcdIntent, read_until: ReadUntil, eventually: Eventually
) -> None:
    await client.put(deployment_key("chat"), encode(deployment()))
    await read_until(lambda i: "chat" in i and intent.connected)
    await asyncio.to_thread(etcd.stop)

    async def lost() -> bool:
        return not intent.connected

    await eventually(lost)
    intents = intent.read()
    assert intents is not None
    assert isinstance(intents["chat"], Wanted)
