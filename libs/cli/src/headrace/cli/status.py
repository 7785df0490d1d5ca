"""`headrace status`: what runs, what is wanted, what is ready."""

from __future__ import annotations

import asyncio
from typing import Any

from headrace.api.control.v1 import control_service_pb2 as control_pb
from headrace.api.control.v1 import control_service_pb2_grpc as control_grpc
from headrace.api.routing.v1 import routing_service_pb2 as routing_pb
from headrace.api.routing.v1 import routing_service_pb2_grpc as routing_grpc
from headrace.api.telemetry.v1 import telemetry_service_pb2 as telemetry_pb
from headrace.api.telemetry.v1 import telemetry_service_pb2_grpc as telemetry_grpc
from headrace.base.deadline import Deadline
from headrace.base.errors import HeadraceError
from headrace.base.tls import TlsSettings
from headrace.cli import render
from headrace.cli.home import Home, StackRecord, same_process
from headrace.rpc.client import Peer

SERVICES = ("gateway", "router", "controller", "telemetry")


async def status(home: Home) -> int:
    """Print the tables; 0 when every service serves, 1 otherwise."""
    record = home.running()
    console = render.console()
    rows = await asyncio.gather(*(_service_row(record, name) for name in (*SERVICES, "etcd", "redis")))
    console.print(render.services_table(rows))
    wanted = await _ask(
        record, "controller", control_grpc.ControlServiceStub, "GetStatus", control_pb.GetStatusRequest()
    )
    if wanted is not None:
        console.print(render.deployments_table(wanted))
    view = await _ask(
        record, "router", routing_grpc.RoutingServiceStub, "ListReplicas", routing_pb.ListReplicasRequest()
    )
    if view is not None:
        console.print(render.replicas_table(view))
    return 0 if all(row[3] in ("serving", "running") for row in rows) else 1


async def _service_row(record: StackRecord, name: str) -> tuple[str, int, str, str]:
    pid = record.processes.get(name, 0)
    address = record.addresses.get(name, "")
    if not same_process(pid, record.create_times.get(name, 0.0)):
        return name, pid, address, "not running"
    if name not in SERVICES:
        return name, pid, address, "running"
    tls = TlsSettings.edge_from_environ() if name == "gateway" else None
    async with Peer(address, tls=tls) as peer:
        serving = await peer.healthy(deadline=Deadline.after(2))
    return name, pid, address, "serving" if serving else "not serving"


async def _ask(record: StackRecord, name: str, stub: Any, method: str, request: Any) -> Any:
    """The service's answer; None (and a line that says so) when it gives none."""
    async with Peer(record.addresses[name]) as peer:
        try:
            return await peer.unary(getattr(stub(peer.channel), method), request, deadline=Deadline.after(3))
        except HeadraceError as error:
            render.console(stderr=True).print(f"{name} does not answer: {error.message}", markup=False)
            return None


async def show_trace(home: Home, key: str | None) -> None:
    """Print one trace, or the newest ones when `key` is None."""
    record = home.running()
    async with Peer(record.addresses["telemetry"]) as peer:
        stub = telemetry_grpc.TelemetryServiceStub(peer.channel)
        if key is None:
            listed = await peer.unary(
                stub.ListTraces, telemetry_pb.ListTracesRequest(limit=20), deadline=Deadline.after(5)
            )
            for t in listed.traces:
                render.console().print(
                    f"{t.trace_id}  {t.request_id or '-':26}  {t.duration_ms:9.1f} ms  {t.spans:3} spans  {t.root}",
                    markup=False,
                )
            return
        is_trace_id = len(key) == 32 and all(c in "0123456789abcdef" for c in key)
        request = telemetry_pb.GetTraceRequest(**{"trace_id" if is_trace_id else "request_id": key})
        trace = await peer.unary(stub.GetTrace, request, deadline=Deadline.after(5))
    render.console().print(render.trace_table(trace))
