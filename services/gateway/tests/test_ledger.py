"""The ledger in one process: stored, delivered, bounded, and never in the way."""

import asyncio
import os
import resource
import sqlite3
import threading
from contextlib import asynccontextmanager
from itertools import count

import pytest
from prometheus_client import REGISTRY

from headrace.api.telemetry.v1 import telemetry_service_pb2 as pb
from headrace.base.errors import InvalidRequest, StartError, Unavailable
from headrace.gateway.core.account import Kind
from headrace.gateway.core.audit import Audit, Decision
from headrace.gateway.ledger import Ledger, LedgerSettings
from headrace.testkit.eventually import eventually

_TIMES = count(1)
QUICK = LedgerSettings(slots=256, longest_backoff_s=0.1)
FEW = LedgerSettings(slots=64, longest_backoff_s=0.1)


class Telemetry:
    """A sink in this process: takes records unless it is away, refuses those named `poison`."""

    def __init__(self):
        self.away = False
        self.usage, self.audit, self.batches = [], [], []

    async def send(self, kind, bodies):
        if self.away:
            raise Unavailable("away")
        message = pb.UsageRecord if kind is Kind.USAGE else pb.AuditEvent
        taken = [message.FromString(body) for body in bodies]
        if any(getattr(record, "request_id", "") == "poison" for record in taken):
            raise InvalidRequest("records[0]", "poison")
        self.batches.append(len(taken))
        (self.usage if kind is Kind.USAGE else self.audit).extend(taken)

    async def close(self):
        pass

    @property
    def ids(self):
        return [record.request_id for record in self.usage]


def refusal(**facts):
    """A decision as policy filters make them."""
    return Audit(
        subject="policy.denied_patterns",
        decision=Decision.REFUSED,
        reason="DENIED_PATTERN",
        tenant="acme",
        credential="laptop",
        request_id="r1",
        facts={"pattern": "3", **facts},
    )


@pytest.fixture
def telemetry():
    return Telemetry()


@asynccontextmanager
async def running(folder, sink, settings=QUICK):
    ledger = Ledger(str(folder) if folder else "", sink, "g1", settings)
    ledger.start()
    task = asyncio.create_task(ledger.run())
    try:
        yield ledger
    finally:
        task.cancel()
        await asyncio.wait({task})
        await ledger.close(1.0)


def opened(ledger, request_id="r1"):
    return ledger.open(
        request_id=request_id,
        tenant="acme",
        credential="laptop",
        model="smol",
        bundle_digest="ab" * 16,
        admitted_unix_ns=next(_TIMES),
    )


def used(ledger, request_id="r1", tokens=1):
    with opened(ledger, request_id) as account:
        account.prompt(10)
        account.attempt(1, "e1", 1)
        account.tokens(1, tokens)


def lost(kind, reason):
    return REGISTRY.get_sample_value("headrace_gateway_ledger_lost_total", {"kind": kind, "reason": reason}) or 0.0


@pytest.mark.parametrize("on_disk", [True, False], ids=["on disk", "in memory"])
async def test_a_request_is_delivered_soon_after_its_end_and_once(tmp_path, telemetry, on_disk):
    async with running(tmp_path if on_disk else None, telemetry) as ledger:
        account = opened(ledger)
        account.prompt(10)
        account.attempt(1, "e1", 5)
        account.tokens(1, 3)
        account.attempt_ended(1, "BROKEN")
        account.attempt(2, "e2", 6)
        account.tokens(2, 4)
        account.attempt_ended(2, "OK")
        account.close("OK")
        account.close("CANCELLED")
        account.tokens(2, 100)
        ledger.audit(refusal())
        await eventually(lambda: telemetry.usage and telemetry.audit)
        for other in range(300):
            used(ledger, f"other-{other}")
        await eventually(lambda: len(telemetry.usage) == 301)
    first = telemetry.usage[0]
    assert (first.outcome, first.prompt_tokens, first.output_tokens, first.recovered) == ("OK", 10, 7, False)
    assert [(a.engine_id, a.output_tokens, a.outcome) for a in first.attempts] == [("e1", 3, "BROKEN"), ("e2", 4, "OK")]
    assert sorted(telemetry.ids) == sorted(["r1", *(f"other-{n}" for n in range(300))])
    event = telemetry.audit[0]
    assert (event.subject, event.decision, event.reason) == ("policy.denied_patterns", "REFUSED", "DENIED_PATTERN")
    assert (dict(event.facts), event.service, event.request_id) == ({"pattern": "3"}, "gateway", "r1")


async def test_what_telemetry_did_not_take_is_delivered_by_the_next_life(tmp_path, telemetry):
    telemetry.away = True
    async with running(tmp_path, telemetry) as ledger:
        for number in range(100):
            used(ledger, f"r{number}", tokens=number)
        ledger.audit(refusal())
        unfinished = opened(ledger, "unfinished")
        unfinished.tokens(1, 5)
    assert telemetry.usage == []
    telemetry.away = False
    async with running(tmp_path, telemetry):
        await eventually(lambda: len(telemetry.usage) == 101 and telemetry.audit)
    assert {r.request_id: r.output_tokens for r in telemetry.usage} == {
        **{f"r{number}": number for number in range(100)},
        "unfinished": 5,
    }
    assert [r.request_id for r in telemetry.usage if r.recovered] == ["unfinished"]
    async with running(tmp_path, telemetry) as ledger:
        used(ledger, "last")
        await eventually(lambda: "last" in telemetry.ids)
    assert len(telemetry.usage) == 102


async def test_a_batch_is_at_most_a_thousand_and_a_record_that_is_refused_holds_up_no_other(tmp_path, telemetry):
    before = lost("usage", "refused")
    telemetry.away = True
    async with running(tmp_path, telemetry) as ledger:
        for number in range(2500):
            used(ledger, "poison" if number == 1700 else f"r{number}")
        telemetry.away = False
        await eventually(lambda: len(telemetry.usage) == 2499)
    assert max(telemetry.batches) <= 1000
    assert len(set(telemetry.ids)) == 2499
    assert lost("usage", "refused") == before + 1


async def test_a_spool_that_is_full_loses_the_newest_counts_them_and_keeps_serving(tmp_path, telemetry):
    before = lost("usage", "spool_full")
    telemetry.away = True
    settings = LedgerSettings(slots=64, spool_usage_bytes=10_000, longest_backoff_s=0.1)
    async with running(tmp_path, telemetry, settings) as ledger:
        for number in range(500):
            used(ledger, f"r{number}")
        ledger.audit(refusal())
        await eventually(lambda: lost("usage", "spool_full") > before)
        await eventually(lambda: len(ledger._ended) == 0)
        kept = 500 - (lost("usage", "spool_full") - before)
        assert 20 < kept < 200
        telemetry.away = False
        await eventually(lambda: len(telemetry.usage) == kept and telemetry.audit)
        used(ledger, "afterwards")
        await eventually(lambda: "afterwards" in telemetry.ids)
    assert telemetry.ids[0] == "r0"


async def test_a_full_disk_stops_nobody_and_usage_goes_straight_to_telemetry(tmp_path, telemetry):
    async with running(tmp_path, telemetry) as ledger:
        used(ledger, "before")
        await eventually(lambda: telemetry.ids == ["before"])
        await asyncio.sleep(0)
        with full_disk():
            for number in range(200):
                used(ledger, f"r{number}")
            await eventually(lambda: len(telemetry.usage) == 201)
        used(ledger, "after")
        await eventually(lambda: "after" in telemetry.ids)
    assert len(set(telemetry.ids)) == len(telemetry.usage) == 202


async def test_with_a_full_disk_and_no_telemetry_the_slots_keep_what_ended(tmp_path, telemetry):
    telemetry.away = True
    async with running(tmp_path, telemetry) as ledger:
        with full_disk():
            for number in range(40):
                used(ledger, f"r{number}")
            await eventually(lambda: not ledger._disk_healthy)
            assert len(ledger._ended) == 40
            # As after kill -9: the folder is read by another ledger from a copy.
            slots = (tmp_path / "slots").read_bytes()
        telemetry.away = False
        await eventually(lambda: len(telemetry.usage) == 40)
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "slots").write_bytes(slots)
    again = Telemetry()
    async with running(tmp_path / "copy", again):
        await eventually(lambda: len(again.usage) == 40)
    assert sorted(again.ids) == sorted(telemetry.ids)
    assert not any(record.recovered for record in again.usage)


def full_disk():
    """A limit on file size fails writes at the same place as a full disk does; slots lie below it already."""

    class Full:
        def __enter__(self):
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))

        def __exit__(self, *_):
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    return Full()


async def test_more_requests_than_slots_are_served_and_recorded(tmp_path, telemetry):
    async with running(tmp_path, telemetry, FEW) as ledger:
        accounts = [opened(ledger, f"r{number}") for number in range(200)]
        for account in accounts:
            account.tokens(1, 2)
        for account in accounts:
            account.close("OK")
        await eventually(lambda: len(telemetry.usage) == 200)
        for number in range(200, 264):  # the slots are free again
            used(ledger, f"r{number}")
        await eventually(lambda: len(telemetry.usage) == 264)
        assert ledger._opened().table.free == 64
    assert len(set(telemetry.ids)) == 264


async def test_a_storm_of_refusals_leaves_slots_to_requests(tmp_path, telemetry):
    telemetry.away = True
    async with running(tmp_path, telemetry, FEW) as ledger:
        for _ in range(500):
            ledger.audit(refusal(**{f"f{n}": "y" * 150 for n in range(20)}))
        assert ledger._opened().table.free == 32
        used(ledger, "served")
        telemetry.away = False
        await eventually(lambda: len(telemetry.audit) == 500 and telemetry.usage)
    assert dict(telemetry.audit[0].facts) == {"left_out": "longer than a slot"}
    assert len({event.event_id for event in telemetry.audit}) == 500


async def test_a_request_that_outlives_the_drain_fails_nowhere_and_is_found_by_the_next_life(tmp_path, telemetry):
    async with running(tmp_path, telemetry) as ledger:
        account = opened(ledger, "long")
        account.tokens(1, 3)
    account.tokens(1, 4)
    account.close("CANCELLED")
    used(ledger, "too late")
    ledger.audit(refusal())
    async with running(tmp_path, telemetry):
        await eventually(lambda: telemetry.usage)
    assert [(r.request_id, r.output_tokens, r.outcome, r.recovered) for r in telemetry.usage] == [
        ("long", 7, "CANCELLED", False)
    ]


async def test_two_lives_cannot_share_a_folder(tmp_path, telemetry):
    async with running(tmp_path, telemetry):
        with pytest.raises(StartError, match=f"is in use by process {os.getpid()}; give each gateway"):
            Ledger(str(tmp_path), telemetry, "g2", QUICK).start()
    async with running(tmp_path, telemetry) as ledger:
        used(ledger)
        await eventually(lambda: telemetry.usage)


async def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StartError, match=r"cannot keep the ledger in .*file"):
        Ledger(str(tmp_path / "file"), None, "g1", QUICK).start()
    with full_disk(), pytest.raises(StartError, match="free space"):
        Ledger(str(tmp_path / "full"), None, "g1", QUICK).start()


async def test_a_spool_that_is_no_database_is_set_aside(tmp_path, telemetry):
    (tmp_path / "spool.sqlite").write_bytes(b"no database at all" * 1000)
    async with running(tmp_path, telemetry) as ledger:
        used(ledger)
        await eventually(lambda: telemetry.usage)
    assert [path.read_bytes()[:11] for path in tmp_path.glob("spool.sqlite.damaged-*")] == [b"no database"]


async def test_slots_written_halfway_cost_no_other_slot(tmp_path, telemetry):
    async with running(tmp_path, None) as ledger:
        for number in range(3):
            opened(ledger, f"r{number}").tokens(1, 1)
    path = tmp_path / "slots"
    data = bytearray(path.read_bytes())
    data[4096 + 2048 + 130] ^= 255  # in the second slot's body
    path.write_bytes(bytes(data[:-700]))  # and the file's end is missing
    async with running(tmp_path, telemetry):
        await eventually(lambda: len(telemetry.usage) == 2)
    assert sorted(telemetry.ids) == ["r0", "r2"]


async def test_without_a_sink_the_folder_keeps_records_for_a_life_that_has_one(tmp_path, telemetry):
    async with running(tmp_path, None) as ledger:
        used(ledger)
        await eventually(lambda: not ledger._ended)
    async with running(tmp_path, telemetry):
        await eventually(lambda: telemetry.ids == ["r1"])


async def test_a_disk_that_hangs_holds_up_neither_requests_nor_the_end(tmp_path, telemetry, monkeypatch):
    hang = threading.Event()
    async with running(tmp_path, telemetry) as ledger:
        monkeypatch.setattr(ledger._opened().spool, "store", lambda _: hang.wait(30) and [])
        for number in range(50):
            used(ledger, f"r{number}")
        await asyncio.sleep(0.1)
        loop = asyncio.get_running_loop()
        began = loop.time()
        used(ledger, "meanwhile")
        assert loop.time() - began < 0.5
        began = loop.time()
    try:
        assert loop.time() - began < 5.0
    finally:
        hang.set()


async def test_the_backlog_is_shown_with_its_age(tmp_path, telemetry):
    def value(name, **labels):
        return REGISTRY.get_sample_value(f"headrace_gateway_ledger_{name}", labels)

    telemetry.away = True
    async with running(tmp_path, telemetry) as ledger:
        used(ledger)
        await eventually(lambda: value("backlog_records", kind="usage") == 1 and value("oldest_seconds") > 0.05)
        assert value("backlog_bytes", kind="usage") > 50
        telemetry.away = False
        await eventually(lambda: value("backlog_records", kind="usage") == 0 and value("oldest_seconds") == 0)


async def test_the_spool_gives_disk_space_back(tmp_path, telemetry):
    telemetry.away = True
    async with running(tmp_path, telemetry) as ledger:
        for number in range(3000):
            used(ledger, f"r{number}")
        await eventually(lambda: not ledger._ended)
        telemetry.away = False
        await eventually(lambda: len(telemetry.usage) == 3000)
        await eventually(lambda: ledger._opened().spool.records[Kind.USAGE] == 0)
    with sqlite3.connect(tmp_path / "spool.sqlite") as connection:
        pages, free = (connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count"))
    connection.close()
    assert pages - free < 10
    assert (tmp_path / "spool.sqlite").stat().st_size < 300_000
