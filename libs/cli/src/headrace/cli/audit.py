"""`headrace audit`: decisions that somebody may have to account for."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from headrace.api.telemetry.v1 import telemetry_service_pb2 as pb
from headrace.api.telemetry.v1 import telemetry_service_pb2_grpc as rpc
from headrace.base.deadline import Deadline
from headrace.cli import render
from headrace.cli.guard import run
from headrace.cli.home import Home
from headrace.cli.usage import json_of, local_time, row, table
from headrace.rpc.client import Peer


def command(
    tenant: Annotated[str, typer.Option(help="Only this tenant's (default: all).")] = "",
    request: Annotated[str, typer.Option(metavar="ID", help="Only this request's (default: all).")] = "",
    limit: Annotated[int, typer.Option(min=1, max=1000, help="The newest N.", metavar="N")] = 100,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show decisions on requests, such as refusals, newest first: who, what, why; never any of a prompt."""
    question = pb.ListAuditRequest(tenant=tenant, request_id=request, limit=limit)
    run("audit", audit(Home.default(), question, json=as_json))


async def audit(home: Home, request: pb.ListAuditRequest, *, json: bool) -> None:
    """Print the newest events, newest first."""
    async with Peer(home.running().addresses["telemetry"]) as peer:
        stub = rpc.TelemetryServiceStub(peer.channel)
        answer = await peer.unary(stub.ListAudit, request, deadline=Deadline.after(10))
    if json:
        print(json_of(answer))
    else:
        render.console().print(audit_table(answer))


def audit_table(answer: pb.ListAuditResponse) -> Table:
    """One line for each event."""
    columns = ("at", "service", "tenant", "credential", "request", "subject", "decision", "reason", "facts")
    made = table("audit", *columns)
    for event in answer.events:
        names = (event.service, event.tenant, event.credential, event.request_id, event.subject)
        facts = ", ".join(f"{key}={value}" for key, value in sorted(event.facts.items()))
        row(made, local_time(event.at_unix_ns), *names, event.decision, event.reason, facts)
    return made
