"""TLS between all services, as their environment alone turns it on; nobody without the fleet's certificate is heard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.api.control.v1 import control_service_pb2 as control_pb
from headrace.api.control.v1 import control_service_pb2_grpc as control_grpc
from headrace.api.engine.v1 import engine_service_pb2 as engine_pb
from headrace.api.engine.v1 import engine_service_pb2_grpc as engine_grpc
from headrace.api.routing.v1 import routing_service_pb2 as routing_pb
from headrace.api.routing.v1 import routing_service_pb2_grpc as routing_grpc
from headrace.api.telemetry.v1 import telemetry_service_pb2 as telemetry_pb
from headrace.api.telemetry.v1 import telemetry_service_pb2_grpc as telemetry_grpc
from headrace.base.deadline import Deadline
from headrace.base.errors import Unavailable
from headrace.base.tls import INTERNAL_NAME, TlsSettings
from headrace.cli.certs import write_internal
from headrace.cli.intent import Wanted
from headrace.cli.internal_tls import internal_environ
from headrace.rpc.client import Peer
from headrace.testkit.cluster import DEPLOYMENT, Cluster
from headrace.testkit.eventually import eventually

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def certificates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TlsSettings:
    """Made, and in the environment of this process and its children."""
    for name, value in internal_environ(tmp_path / "tls").items():
        monkeypatch.setenv(name, value)
    return write_internal(tmp_path / "tls")


async def test_a_fleet_with_tls_answers_and_hears_nobody_else(certificates: TlsSettings, cluster: Cluster) -> None:
    """The engine is started by the controller, which hands its own environment on."""
    await cluster.start_stores(Wanted(deployment=DEPLOYMENT, replicas=1, backend="simulated"))
    for kind in ("telemetry", "controller", "router", "gateway"):
        cluster.start_service(kind)
    await cluster.until_serving("telemetry", "controller", "router", "gateway")
    engine_id = f"{DEPLOYMENT}-1"
    engine = (await cluster.until_ready(engine_id))[engine_id].address

    async with cluster.client() as client:
        answer = await client.generate(text="Say it.", sampling={"max_tokens": 8})
    assert answer.finished is not None
    await eventually(lambda: _traced(cluster))

    listing = (routing_grpc.RoutingServiceStub, "ListReplicas", routing_pb.ListReplicasRequest())
    calls = {
        cluster.addresses["router"]: listing,
        cluster.addresses["controller"]: (control_grpc.ControlServiceStub, "GetStatus", control_pb.GetStatusRequest()),
        cluster.addresses["telemetry"]: (
            telemetry_grpc.TelemetryServiceStub,
            "ListTraces",
            telemetry_pb.ListTracesRequest(),
        ),
        engine: (engine_grpc.EngineServiceStub, "Generate", engine_pb.GenerateRequest()),
    }
    bare = TlsSettings(ca_file=certificates.ca_file, server_name=INTERNAL_NAME)
    for address, call in calls.items():
        for outsider, said in ((TlsSettings(), "may speak TLS"), (bare, "certificate: none is shown")):
            with pytest.raises(Unavailable, match=said):
                await _called(address, outsider, *call)


async def _called(address: str, tls: TlsSettings, stub: Any, method: str, request: Any) -> None:
    async with Peer(address, tls=tls) as peer:
        call, deadline = getattr(stub(peer.channel), method), Deadline.after(10)
        if method != "Generate":
            await peer.unary(call, request, deadline=deadline)
            return
        async with peer.stream(call, request, deadline=deadline) as answers:
            async for _ in answers:
                pass


async def _traced(cluster: Cluster) -> bool:
    """Spans reach telemetry over TLS, too."""
    async with Peer(cluster.addresses["telemetry"]) as peer:
        stub = telemetry_grpc.TelemetryServiceStub(peer.channel)
        answer = await peer.unary(stub.ListTraces, telemetry_pb.ListTracesRequest(limit=20), deadline=Deadline.after(5))
    return any(trace.root == "gateway.Generate" for trace in answer.traces)
