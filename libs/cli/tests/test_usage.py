"""`headrace usage` and `headrace audit`, against a telemetry that has facts."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from headrace.api.telemetry.v1 import telemetry_service_pb2 as pb
from headrace.api.telemetry.v1 import telemetry_service_pb2_grpc as rpc
from headrace.base.deadline import Deadline
from headrace.base.errors import NotFound, StartError
from headrace.cli.audit import audit
from headrace.cli.home import Home, StackRecord
from headrace.cli.usage import UsageQuestion, unix_ns, usage
from headrace.rpc.client import Peer
from headrace.telemetry.app import TelemetryApp
from headrace.telemetry.settings import TelemetrySettings

HOUR_NS = 3600 * 10**9
Capsys = pytest.CaptureFixture[str]


def record(request_id: str, hours_ago: float, **changes: object) -> pb.UsageRecord:
    now = time.time_ns()
    attempts = [pb.UsageAttempt(attempt=1, engine_id="smol-0", epoch=5, output_tokens=20, outcome="BROKEN")]
    values = {"tenant": "acme", "credential": "laptop", "model": "smol", "bundle_digest": "ab" * 16} | changes
    return pb.UsageRecord(
        request_id=request_id,
        prompt_tokens=100,
        cached_tokens=16,
        output_tokens=20,
        outcome="OK",
        admitted_unix_ns=now - HOUR_NS * 1000,
        ended_unix_ns=now - int(HOUR_NS * hours_ago),
        attempts=attempts,
        **values,  # type: ignore[arg-type]
    )


RECORDS = [record("new", 1), record("newer", 0.5), record("old", 30), record("theirs", 2, tenant="[b]other[/b]")]
EVENT = pb.AuditEvent(
    event_id="e1",
    at_unix_ns=time.time_ns(),
    service="gateway",
    tenant="acme",
    request_id="new",
    subject="policy.denied_patterns",
    decision="REFUSED",
    reason="DENIED_PATTERN",
    facts={"pattern": "3"},
)


@pytest.fixture
async def home(tmp_path: Path) -> AsyncIterator[Home]:
    """A stack's folder whose telemetry knows four requests and one refusal."""
    app = TelemetryApp(TelemetrySettings(data_dir=str(tmp_path / "data"), address="127.0.0.1:0"))
    await app.start()
    running = asyncio.ensure_future(app.run())
    async with Peer(app.address) as peer:
        stub = rpc.TelemetryServiceStub(peer.channel)  # type: ignore[no-untyped-call]
        soon = Deadline.after(10)
        await peer.unary(stub.RecordUsage, pb.RecordUsageRequest(records=RECORDS), deadline=soon)
        await peer.unary(stub.RecordAudit, pb.RecordAuditRequest(events=[EVENT]), deadline=soon)
    home = Home(tmp_path)
    home.write_record(
        StackRecord(
            pid=os.getpid(),
            create_time=psutil.Process().create_time(),
            addresses={"telemetry": app.address},
            metrics={},
            processes={},
            create_times={},
        )
    )
    yield home
    running.cancel()
    await asyncio.wait({running})
    await app.drain()


def words(text: str, first: str) -> list[str]:
    return next(line.split() for line in text.splitlines() if line.strip().startswith(first))


async def test_sums_are_of_one_tenant_and_one_span_of_time(home: Home, capsys: Capsys) -> None:
    await usage(home, UsageQuestion(tenant="acme", since="24h"))
    out = capsys.readouterr().out
    assert words(out, "acme") == ["acme", "smol", "abababababab", "2", "200", "32", "40"]
    assert "other" not in out
    await usage(home, UsageQuestion(since="2d", until="40m"))
    out = capsys.readouterr().out
    assert words(out, "acme")[3] == "2"
    assert words(out, "[b]other[/b]")[3] == "1"


async def test_one_request_is_shown_with_its_attempts(home: Home, capsys: Capsys) -> None:
    await usage(home, UsageQuestion(request="new"))
    out = capsys.readouterr().out
    assert words(out, "2")[2:] == ["new", "acme", "laptop", "smol", "100", "16", "20", "1", "OK"]
    assert words(out, "new") == ["new", "1", "smol-0", "20", "BROKEN"]
    with pytest.raises(NotFound, match="request never has no record"):
        await usage(home, UsageQuestion(request="never"))


async def test_records_are_listed_newest_first_and_as_json(home: Home, capsys: Capsys) -> None:
    await usage(home, UsageQuestion(tenant="acme", since="24h", records=1, as_json=True))
    told = json.loads(capsys.readouterr().out)
    assert [line["request_id"] for line in told["records"]] == ["newer"]
    assert told["records"][0]["recovered"] is False
    assert told["sums"][0]["output_tokens"] == "40"


async def test_audit_shows_who_what_and_why(home: Home, capsys: Capsys) -> None:
    await audit(home, pb.ListAuditRequest(tenant="acme"), json=False)
    out = capsys.readouterr().out
    assert words(out, "2")[2:] == [
        "gateway",
        "acme",
        "new",
        "policy.denied_patterns",
        "REFUSED",
        "DENIED_PATTERN",
        "pattern=3",
    ]
    await audit(home, pb.ListAuditRequest(tenant="other"), json=True)
    assert json.loads(capsys.readouterr().out) == {"events": []}


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("", None), ("90s", 10), ("1.5m", 10), ("1970-01-01T00:00:05+00:00", 5), ("9999d", 0), ("1960-01-01", 0)],
)
def test_a_time_is_ago_or_a_date(text: str, seconds: int | None) -> None:
    assert unix_ns(text, "--since", 100 * 10**9) == (0 if seconds is None else seconds * 10**9)


@pytest.mark.parametrize("text", ["yesterday", "24", "-3h", "2026-13-01", "h"])
def test_any_other_time_is_one_line_that_says_how_to_write_it(text: str) -> None:
    with pytest.raises(StartError, match=r"--until .* neither a time ago, such as 24h"):
        unix_ns(text, "--until", time.time_ns())
