"""Clients that share no code with the services: Node.js with the files in protos/, and one that has only the server."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import json_format
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from headrace.testkit.cluster import DEPLOYMENT, Cluster
from headrace.testkit.eventually import eventually

ROOT = Path(__file__).parents[2]
NODE = Path(__file__).parent / "node"
SERVICE = "headrace.api.inference.v1.InferenceService"
INSTALL_WITHIN_S = 120.0


async def ran(*command: str, folder: Path, **environ: str) -> tuple[int, str, str]:
    """Run one command to its end."""
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=folder,
        env=os.environ | environ,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(INSTALL_WITHIN_S):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode or 0, out.decode(), err.decode()


@pytest.fixture
async def node_folder(tmp_path: Path) -> Path:
    """A folder with the client and what it needs, installed as its lock file says."""
    if not (shutil.which("node") and shutil.which("npm")):
        pytest.skip("node and npm are not installed")
    folder = tmp_path / "node"
    shutil.copytree(NODE, folder)
    status, _, err = await ran("npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", folder=folder)
    if status and ("ENOTFOUND" in err or "ECONNREFUSED" in err or "ETIMEDOUT" in err):
        pytest.skip("npm reaches no registry")
    assert status == 0, err
    return folder


@pytest.mark.timeout(240)
async def test_a_node_client_streams_with_nothing_but_the_protos(fleet: Cluster, node_folder: Path) -> None:
    fleet.start_engine("a", simulate_itl_ms=2)
    await fleet.until_ready("a")

    status, out, err = await ran(
        "node",
        "client.js",
        folder=node_folder,
        ADDRESS=fleet.addresses["gateway"],
        API_KEY=fleet.api_key,
        MODEL=DEPLOYMENT,
        PROTOS=str(ROOT / "protos"),
    )
    assert status == 0, err
    heard = json.loads(out)
    async with fleet.client() as client:
        same = await client.chat(
            messages=[("user", "Why is the sky blue?")], sampling={"max_tokens": 24, "temperature": 0.5, "seed": 7}
        )

    assert heard["models"] == [DEPLOYMENT]
    assert heard["chat"]["text"] == same.text
    assert heard["chat"]["token_ids"] == same.token_ids
    assert heard["chat"]["finished"]["finish_reason"] == "FINISH_REASON_LENGTH"
    assert heard["chat"]["finished"]["usage"]["completion_tokens"] == 24
    assert heard["chat"]["deltas"] > 6, "the answer streams, it does not come at once"
    assert heard["stranger"]["error"]["code"] == "UNAUTHENTICATED"
    assert heard["wrong"]["error"]["code"] == "INVALID_ARGUMENT"
    assert "sampling.top_p" in heard["wrong"]["error"]["details"]
    assert heard["left"]["error"]["code"] == "CANCELLED"
    await eventually(lambda: fleet.metric("gateway", "headrace_gateway_requests_in_flight") == 0)


def asked_by_reflection(address: str, api_key: str) -> dict[str, Any]:
    """What a client like grpcurl does: learns services and messages from the server, then calls with JSON."""
    metadata = (("authorization", f"Bearer {api_key}"),)
    with grpc.insecure_channel(address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        services = list(database.get_services())
        service = DescriptorPool(database).FindServiceByName(SERVICE)

        def call(method: str, request: dict[str, Any]) -> list[Any]:
            known = service.methods_by_name[method]
            message = json_format.ParseDict(request, GetMessageClass(known.input_type)())
            make = channel.unary_stream if known.server_streaming else channel.unary_unary
            stub = make(
                f"/{SERVICE}/{method}",
                request_serializer=lambda m: m.SerializeToString(),
                response_deserializer=GetMessageClass(known.output_type).FromString,
            )
            answer = stub(message, metadata=metadata, timeout=30)
            return list(answer) if known.server_streaming else [answer]

        (models,) = call("ListModels", {})
        chat = {"model": DEPLOYMENT, "messages": [{"role": "user", "content": "Hi"}], "sampling": {"maxTokens": 5}}
        events = [json_format.MessageToDict(event) for event in call("Chat", chat)]
    return {"services": services, "models": [model.name for model in models.models], "events": events}


async def test_a_client_that_asks_the_server_for_its_protos_can_chat(fleet: Cluster) -> None:
    fleet.start_engine("a", simulate_itl_ms=1)
    await fleet.until_ready("a")

    heard = await asyncio.to_thread(asked_by_reflection, fleet.addresses["gateway"], fleet.api_key)

    assert {SERVICE, "grpc.health.v1.Health"} <= set(heard["services"])
    assert heard["models"] == [DEPLOYMENT]
    assert set(heard["events"][0]) == {"started"}
    assert heard["events"][-1]["finished"]["usage"]["completionTokens"] == 5
    assert sum(len(event["delta"]["tokenIds"]) for event in heard["events"] if "delta" in event) == 5
