"""`headrace usage`: what tenants used."""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated

import typer
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from rich import box
from rich.table import Table
from rich.text import Text

from headrace.api.telemetry.v1 import telemetry_service_pb2 as pb
from headrace.api.telemetry.v1 import telemetry_service_pb2_grpc as rpc
from headrace.base.deadline import Deadline
from headrace.base.errors import NotFound, StartError
from headrace.cli import render
from headrace.cli.guard import run
from headrace.cli.home import Home
from headrace.rpc.client import Peer

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_AGO = re.compile(r"(\d+(?:\.\d+)?)([smhdw])")
_DEADLINE_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageQuestion:
    """What is asked; times as they were typed, empty: none."""

    tenant: str = ""
    since: str = ""
    until: str = ""
    request: str = ""
    records: int = 0
    as_json: bool = False


def unix_ns(text: str, option: str, now_ns: int) -> int:
    """A time: `24h` ago, or `2026-05-01` or `2026-05-01T12:00:00+02:00` (local without an offset); 0 for nothing."""
    if not text:
        return 0
    if ago := _AGO.fullmatch(text):
        return max(now_ns - int(float(ago[1]) * _UNITS_S[ago[2]] * 1e9), 0)
    try:
        return max(int(datetime.fromisoformat(text).timestamp() * 1e9), 0)
    except (ValueError, OverflowError):
        raise StartError(
            f"{option} {text!r} is neither a time ago, such as 24h or 7d, nor a date, such as 2026-05-01"
        ) from None


def command(
    tenant: Annotated[str, typer.Option(help="Only this tenant's (default: all).")] = "",
    since: Annotated[str, typer.Option(help="From then on: a time ago (24h, 7d) or a date (2026-05-01).")] = "24h",
    until: Annotated[str, typer.Option(help="Up to then (default: now).")] = "",
    request: Annotated[str, typer.Option(metavar="ID", help="One request: its record and its attempts.")] = "",
    records: Annotated[int, typer.Option(min=0, max=1000, help="Also list the newest N records.", metavar="N")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show tokens used, by tenant, model and bundle, of requests that ended in a span of time.

    One record per request, whatever happened on its way: retries, a moved answer, a client that left, a killed gateway.
    """
    question = UsageQuestion(tenant=tenant, since=since, until=until, request=request, records=records, as_json=as_json)
    run("usage", usage(Home.default(), question))


async def usage(home: Home, question: UsageQuestion) -> None:
    """Print sums, and records where asked for."""
    now = time.time_ns()
    request = pb.QueryUsageRequest(
        tenant=question.tenant,
        since_unix_ns=unix_ns(question.since, "--since", now),
        until_unix_ns=unix_ns(question.until, "--until", now),
        request_id=question.request,
        records=question.records,
    )
    async with Peer(home.running().addresses["telemetry"]) as peer:
        stub = rpc.TelemetryServiceStub(peer.channel)
        answer = await peer.unary(stub.QueryUsage, request, deadline=Deadline.after(_DEADLINE_S))
    if question.request and not answer.records:
        raise NotFound(f"request {question.request} has no record; one comes within a second of its end")
    if question.as_json:
        print(json_of(answer))
        return
    console = render.console()
    if not question.request:
        console.print(sums_table(answer))
    if answer.records:
        console.print(records_table(answer))
    if question.request:
        console.print(attempts_table(answer))


def json_of(message: Message) -> str:
    """One JSON object, with every field, by the protocol's names; 64-bit numbers are text, as protobuf has them."""
    return json.dumps(
        MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True), indent=2
    )


def local_time(unix_ns: int) -> str:
    """For people: seconds, in the local time zone."""
    return datetime.fromtimestamp(unix_ns / 1e9).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def row(made: Table, *cells: str) -> None:
    """Add a row of plain text: brackets in a name are no markup."""
    made.add_row(*(Text(cell) for cell in cells))


def table(title: str, *columns: str, numbers: frozenset[str] = frozenset()) -> Table:
    """An empty table; columns in `numbers` are aligned to the right."""
    made = Table(title=title, box=box.SIMPLE, title_justify="left")
    for column in columns:
        made.add_column(column, justify="right" if column in numbers else "left")
    return made


_NUMBERS = frozenset({"requests", "prompt", "cached", "output", "attempt", "attempts"})


def sums_table(answer: pb.QueryUsageResponse) -> Table:
    """Tokens by tenant, model and bundle."""
    made = table("usage", "tenant", "model", "bundle", "requests", "prompt", "cached", "output", numbers=_NUMBERS)
    for line in answer.sums:
        counts = (line.requests, line.prompt_tokens, line.cached_tokens, line.output_tokens)
        row(made, line.tenant, line.model, line.bundle_digest[:12], *map(str, counts))
    return made


def records_table(answer: pb.QueryUsageResponse) -> Table:
    """One line for each request."""
    columns = ("ended", "request", "tenant", "credential", "model", "prompt", "cached", "output", "attempts", "outcome")
    made = table("requests", *columns, numbers=_NUMBERS)
    for record in answer.records:
        counts = (record.prompt_tokens, record.cached_tokens, record.output_tokens, len(record.attempts))
        names = (record.request_id, record.tenant, record.credential, record.model)
        outcome = f"{record.outcome} (recovered)" if record.recovered else record.outcome
        row(made, local_time(record.ended_unix_ns), *names, *map(str, counts), outcome)
    return made


def attempts_table(answer: pb.QueryUsageResponse) -> Table:
    """Each attempt of the requests."""
    made = table("attempts", "request", "attempt", "replica", "output", "outcome", numbers=_NUMBERS)
    for record in answer.records:
        for attempt in record.attempts:
            counts = str(attempt.attempt), attempt.engine_id, str(attempt.output_tokens), attempt.outcome
            row(made, record.request_id, *counts)
    return made
