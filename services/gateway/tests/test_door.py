"""The door as clients meet it: TLS at the edge, and what of a request goes no further than the gateway."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.base.deadline import Deadline
from headrace.base.errors import Unauthenticated, Unavailable
from headrace.base.tls import TlsSettings
from headrace.cli.certs import Authority
from headrace.rpc.client import Peer
from headrace.rpc.context import current_call

MODEL = "bytes"
KEY = "hr_" + "k" * 43
SAID = "The headrace brings steady water to the mill; the wheel turns evenly."
EDGE = "HEADRACE_GATEWAY_EDGE_TLS_"

FORGED = {
    "x-tenant": "rival",
    "x-smg-tenant-id": "rival",
    "user": "rival",
    "x-priority": "interactive",
    "x-gateway-destination-endpoint": "10.0.0.1:1",
    "routing-strategy": "random",
    "x-worker-id": "e-9",
}


async def test_forged_headers_change_nothing_and_neither_they_nor_the_key_reach_an_engine(world: Any) -> None:
    seen: list[dict[str, str]] = []

    async def noting(engine: Any, stream: Any, submit: Any) -> None:
        seen.append(dict(current_call().metadata))
        stream.step({submit.slot: 65}, stream.finish(submit.slot, "LENGTH"))

    engine = await world.engine("e-1", noting)
    client = await world.gateway()
    request = pb.GenerateRequest(model=MODEL, text="x")
    placed = []
    for more in ({}, FORGED):
        metadata = {"authorization": f"Bearer {KEY}"} | more
        stream = client.peer.stream(client.stub.Generate, request, deadline=Deadline.after(10), metadata=metadata)
        assert (await client.hear(stream)).text == "A"
        asked = world.router.asked[-1]
        submit = engine.submits[-1]
        placed.append((asked.tenant, asked.deployment, submit.isolation_domain, submit.priority))

    assert placed[0] == placed[1]
    assert placed[0][2] == "t"
    sent = {name: value for metadata in seen for name, value in metadata.items()}
    assert "authorization" not in sent
    assert not set(FORGED) & set(sent)
    assert KEY not in repr(seen)


@pytest.fixture
def edge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A certificate for the gateway's edge, in the environment; clients trust its authority."""
    authority = Authority.new("A company")
    pair, client = authority.issue("127.0.0.1"), authority.issue("client.example")
    files = {
        "ca.pem": authority.pem.cert,
        "cert.pem": pair.cert,
        "key.pem": pair.key,
        "client.pem": client.cert,
        "client-key.pem": client.key,
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    for name in ("CERT_FILE", "KEY_FILE", "CA_FILE"):
        file = name.removesuffix("_FILE").lower() + ".pem"
        monkeypatch.setenv(EDGE + name, str(tmp_path / file))
    return tmp_path


async def test_clients_of_a_tls_edge_show_an_api_key_and_no_certificate(world: Any, edge: Path) -> None:
    await world.engine("e-1")
    client = await world.gateway()
    assert (await client.generate()).text == SAID
    with pytest.raises(Unauthenticated):
        await client.generate(key="hr_" + "x" * 43)
    async with Peer(world.app.address, tls=TlsSettings()) as plain:
        with pytest.raises(Unavailable, match="it may speak TLS, and this side does not"):
            await plain.unary(client.stub.__class__(plain.channel).ListModels, pb.ListModelsRequest(), deadline=soon())


def soon() -> Deadline:
    return Deadline.after(10)


async def test_an_edge_with_an_authority_for_clients_demands_a_certificate_besides_the_key(
    world: Any, edge: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(EDGE + "CLIENT_CA_FILE", str(edge / "ca.pem"))
    await world.engine("e-1")
    client = await world.gateway()
    stub = client.stub.__class__
    metadata = {"authorization": f"Bearer {KEY}"}
    bare = TlsSettings(ca_file=str(edge / "ca.pem"))
    shown = TlsSettings(
        ca_file=str(edge / "ca.pem"), cert_file=str(edge / "client.pem"), key_file=str(edge / "client-key.pem")
    )
    async with Peer(world.app.address, tls=bare) as peer:
        with pytest.raises(Unavailable, match="none is shown"):
            await peer.unary(stub(peer.channel).ListModels, pb.ListModelsRequest(), deadline=soon(), metadata=metadata)
    async with Peer(world.app.address, tls=shown) as peer:
        answer = await peer.unary(
            stub(peer.channel).ListModels, pb.ListModelsRequest(), deadline=soon(), metadata=metadata
        )
        assert [model.name for model in answer.models] == [MODEL]
        with pytest.raises(Unauthenticated):
            await peer.unary(stub(peer.channel).ListModels, pb.ListModelsRequest(), deadline=soon())


async def test_a_deployment_for_other_tenants_does_not_exist_for_this_one(world: Any) -> None:
    from headrace.api.control.v1.intent_pb2 import Deployment
    from headrace.base.errors import NotFound
    from headrace.bundle import intent, keys

    for name, tenants in (("mine", ["t"]), ("theirs", ["rival"])):
        record = Deployment(name=name, bundle_digest=world.bundle_digest, backend="simulated", tenants=tenants)
        await world.etcd.put(keys.deployment_key(name), intent.encode(record))
    try:
        client = await world.gateway()
        models = (await client.unary(client.stub.ListModels, pb.ListModelsRequest())).models
        assert [model.name for model in models] == [MODEL, "mine"]
        said = []
        for name in ("theirs", "nobody"):
            with pytest.raises(NotFound) as refused:
                await client.unary(client.stub.CountTokens, pb.CountTokensRequest(model=name, text="x"))
            said.append(refused.value.message.replace(name, "…"))
        assert said[0] == said[1]
    finally:
        for name in ("mine", "theirs"):
            await world.etcd.delete(keys.deployment_key(name))
