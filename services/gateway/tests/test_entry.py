"""Who may enter, and how what cannot be served is refused: over the wire, with etcd's intent behind it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headrace.api.common.v1.sampling_pb2 import SamplingParams
from headrace.api.control.v1.intent_pb2 import ApiKey, Deployment
from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.base.errors import Forbidden, InvalidRequest, NotFound, Unauthenticated, Unavailable
from headrace.bundle import intent, keys

MODEL = "bytes"
ONLY_OTHER_KEY = "hr_" + "o" * 43


@pytest.mark.parametrize(
    ("key", "reason"),
    [("hr_" + "x" * 43, "BAD_CREDENTIAL"), ("", "NO_CREDENTIAL"), ("kein schlüssel".encode().hex(), "BAD_CREDENTIAL")],
)
async def test_without_a_known_key_nothing_is_answered(world: Any, key: str, reason: str) -> None:
    engine = await world.engine("e-1")
    client = await world.gateway()

    with pytest.raises(Unauthenticated) as refused:
        await client.generate(key=key)
    with pytest.raises(Unauthenticated):
        await client.unary(client.stub.ListModels, pb.ListModelsRequest(), key=key)
    with pytest.raises(Unauthenticated):
        await client.unary(client.stub.CountTokens, pb.CountTokensRequest(model=MODEL, text="x"), key=key)

    assert refused.value.reason == reason
    assert world.router.asked == []
    assert engine.submits == []


async def test_a_restricted_key_sees_and_uses_its_own_deployments_only(world: Any) -> None:
    client = await world.gateway()

    with pytest.raises(Forbidden):
        await client.generate(key=ONLY_OTHER_KEY)
    seen = await client.unary(client.stub.ListModels, pb.ListModelsRequest(), key=ONLY_OTHER_KEY)

    assert list(seen.models) == []


async def test_models_are_listed_with_bundle_and_context(world: Any) -> None:
    client = await world.gateway()

    models = (await client.unary(client.stub.ListModels, pb.ListModelsRequest())).models

    assert [(m.name, m.bundle_digest, m.max_model_len) for m in models] == [(MODEL, world.bundle_digest, 32768)]


async def test_a_key_and_a_deployment_work_as_soon_as_etcd_has_them_and_no_longer(world: Any, eventually: Any) -> None:
    await world.engine("e-1")
    client = await world.gateway()
    key = "hr_" + "n" * 43
    record = ApiKey(tenant="t", name="new", created_at="2026-01-01T00:00:00Z")
    served = Deployment(
        name="new", bundle_digest=world.bundle_digest, backend="simulated", engine_settings={"max_model_len": "100"}
    )

    async def listed() -> list[tuple[str, int]]:
        try:
            answer = await client.unary(client.stub.ListModels, pb.ListModelsRequest(), key=key)
        except Unauthenticated:
            return []
        return [(m.name, m.max_model_len) for m in answer.models]

    assert await listed() == []
    await world.etcd.put(keys.api_key_key(intent.hash_api_key(key)), intent.encode(record))
    await world.etcd.put(keys.deployment_key("new"), intent.encode(served))
    await until(listed, [(MODEL, 32768), ("new", 100)])

    await world.etcd.delete(keys.deployment_key("new"))
    await until(listed, [(MODEL, 32768)])
    await world.etcd.delete(keys.api_key_key(intent.hash_api_key(key)))
    await until(listed, [])


async def until(ask: Any, expected: Any) -> None:
    async with asyncio.timeout(10):
        while await ask() != expected:
            await asyncio.sleep(0.01)


async def test_a_deployment_record_that_cannot_be_read_leaves_the_last_good_one_in_force(world: Any) -> None:
    await world.engine("e-1")
    client = await world.gateway()

    await world.etcd.put(keys.deployment_key(MODEL), b"{not json")
    await world.etcd.put(keys.deployment_key("later"), intent.encode(deployment("later", world.bundle_digest)))

    async def names() -> list[str]:
        return [m.name for m in (await client.unary(client.stub.ListModels, pb.ListModelsRequest())).models]

    await until(names, [MODEL, "later"])
    assert (await client.generate()).reason == "STOP"
    await world.etcd.delete(keys.deployment_key("later"))


def deployment(name: str, bundle_digest: str) -> Deployment:
    return Deployment(name=name, bundle_digest=bundle_digest, backend="simulated")


async def test_a_deployment_whose_bundle_is_missing_is_unavailable_not_unknown(world: Any) -> None:
    await world.etcd.put(keys.deployment_key("hollow"), intent.encode(deployment("hollow", "a" * 32)))
    client = await world.gateway()

    with pytest.raises(Unavailable) as refused:
        await ask(client, pb.GenerateRequest(model="hollow", text="x"))

    assert (refused.value.reason, refused.value.retry_after_s) == ("MODEL_NOT_LOADED", 1.0)
    await world.etcd.delete(keys.deployment_key("hollow"))


async def test_a_bundle_whose_tokenizer_has_changed_on_disk_is_not_served(world: Any, bundle: Any) -> None:
    changed = type(bundle)()
    changed.CopyFrom(bundle)
    changed.tokenizer_digest = "b" * 32
    await world.etcd.put(keys.bundle_key("b" * 32), intent.encode(changed))
    await world.etcd.put(keys.deployment_key("changed"), intent.encode(deployment("changed", "b" * 32)))
    client = await world.gateway()

    with pytest.raises(Unavailable):
        await ask(client, pb.GenerateRequest(model="changed", text="x"))

    await world.etcd.delete(keys.deployment_key("changed"))


async def test_a_bundles_sampling_defaults_fill_what_a_client_leaves_out(world: Any, bundle: Any) -> None:
    tuned = type(bundle)()
    tuned.CopyFrom(bundle)
    tuned.sampling_defaults.update({"temperature": "0.75", "stop": '["mill"]'})
    await world.etcd.put(keys.bundle_key("c" * 32), intent.encode(tuned))
    await world.etcd.put(keys.deployment_key("tuned"), intent.encode(deployment("tuned", "c" * 32)))
    engine = await world.engine("e-1")
    engine.bundle_digest = "c" * 32
    client = await world.gateway()

    heard = await ask(client, pb.GenerateRequest(model="tuned", text="x"))

    assert heard.text == "The headrace brings steady water to the "
    assert engine.submits[0].sampling.temperature == 0.75
    await world.etcd.delete(keys.deployment_key("tuned"))


async def ask(client: Any, request: Any) -> Any:
    method = client.stub.Chat if isinstance(request, pb.ChatRequest) else client.stub.Generate
    return await client.hear(client.open(method, request))


@pytest.mark.parametrize(
    ("request_", "field", "reason"),
    [
        (pb.GenerateRequest(text="x"), "model", "INVALID_FIELD"),
        (pb.GenerateRequest(model=MODEL), "prompt", "INVALID_FIELD"),
        (pb.GenerateRequest(model=MODEL, text=""), "prompt", "INVALID_FIELD"),
        (pb.GenerateRequest(model=MODEL, token_ids=pb.TokenIds()), "prompt", "INVALID_FIELD"),
        (pb.GenerateRequest(model=MODEL, token_ids=pb.TokenIds(ids=[1, 300])), "token_ids.ids[1]", "INVALID_FIELD"),
        (pb.GenerateRequest(model=MODEL, text="x" * 32768), "prompt", "CONTEXT_EXCEEDED"),
        (
            pb.GenerateRequest(model=MODEL, text="x", sampling=SamplingParams(max_tokens=0)),
            "sampling.max_tokens",
            "INVALID_FIELD",
        ),
        (
            pb.GenerateRequest(model=MODEL, text="x", sampling=SamplingParams(stop=["a", ""])),
            "sampling.stop[1]",
            "INVALID_FIELD",
        ),
        (pb.ChatRequest(model=MODEL), "messages", "INVALID_FIELD"),
        (
            pb.ChatRequest(model=MODEL, messages=[pb.ChatMessage(role="robot", content="x")]),
            "messages[0].role",
            "INVALID_FIELD",
        ),
        (
            pb.ChatRequest(model=MODEL, messages=[pb.ChatMessage(role="user", content="x" * 32768)]),
            "messages",
            "CONTEXT_EXCEEDED",
        ),
        (
            pb.ChatRequest(model=MODEL, messages=[pb.ChatMessage(role="user", content="refuse")]),
            "messages",
            "INVALID_FIELD",
        ),
    ],
)
async def test_a_bad_request_is_refused_with_its_field_before_any_router_is_asked(
    world: Any, request_: Any, field: str, reason: str
) -> None:
    await world.engine("e-1")
    client = await world.gateway()

    with pytest.raises(InvalidRequest) as refused:
        await ask(client, request_)

    assert (refused.value.field, refused.value.reason) == (field, reason)
    assert world.router.asked == []


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.CountTokensRequest(text="x"), "model"),
        (pb.CountTokensRequest(model=MODEL), "input"),
        (pb.CountTokensRequest(model=MODEL, text=""), "prompt"),
        (pb.CountTokensRequest(model=MODEL, conversation=pb.Conversation()), "conversation.messages"),
        (
            pb.CountTokensRequest(
                model=MODEL, conversation=pb.Conversation(messages=[pb.ChatMessage(role="user", content="refuse")])
            ),
            "conversation.messages",
        ),
    ],
)
async def test_a_count_of_nothing_is_refused_with_its_field(world: Any, request_: Any, field: str) -> None:
    client = await world.gateway()

    with pytest.raises(InvalidRequest) as refused:
        await client.unary(client.stub.CountTokens, request_)

    assert refused.value.field == field


async def test_an_unknown_model_is_not_found(world: Any) -> None:
    client = await world.gateway()

    with pytest.raises(NotFound) as refused:
        await ask(client, pb.GenerateRequest(model="nobody", text="x"))

    assert refused.value.metadata["model"] == "nobody"
