"""Usage and audit: kept once, whatever is sent, in whatever order, however often."""

import asyncio
import threading
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise

import duckdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.api.telemetry.v1 import telemetry_service_pb2 as pb
from headrace.api.telemetry.v1.telemetry_service_pb2_grpc import TelemetryServiceStub
from headrace.base.deadline import Deadline
from headrace.base.errors import InvalidRequest, Unavailable
from headrace.rpc.client import Peer
from headrace.telemetry.app import TelemetryApp
from headrace.telemetry.core.facts import AuditFact, Sum, Usage, UsageAttempt, once_each
from headrace.telemetry.database import Database
from headrace.telemetry.ledger import LedgerStore
from headrace.telemetry.ledger_writer import LedgerWriter
from headrace.telemetry.settings import TelemetrySettings
from headrace.telemetry.store import SpanStore

FOREVER = 2**62


def usage(request_id="r1", **changes):
    values = {
        "request_id": request_id,
        "gateway_id": "g1",
        "admitted_ns": 1_000,
        "ended_ns": 2_000,
        "tenant": "acme",
        "credential": "laptop",
        "model": "smol",
        "bundle_digest": "ab" * 16,
        "prompt_tokens": 10,
        "cached_tokens": 4,
        "output_tokens": 5,
        "outcome": "OK",
        "recovered": False,
        "attempts": (UsageAttempt(attempt=1, engine_id="e1", epoch=2**64 - 1, output_tokens=5, outcome="OK"),),
    }
    return Usage(**{**values, **changes})


def audit(event_id="e1", **changes):
    values = {
        "event_id": event_id,
        "at_ns": 1_000,
        "service": "gateway",
        "tenant": "acme",
        "credential": "laptop",
        "request_id": "r1",
        "subject": "quota",
        "decision": "REFUSED",
        "reason": "RATE",
        "facts": {"limit": "3"},
    }
    return AuditFact(**{**values, **changes})


@pytest.fixture
def database(tmp_path):
    database = Database.open(str(tmp_path))
    yield database
    database.close()


@pytest.fixture
def store(database):
    return LedgerStore(database)


def newest(store, tenant="", limit=1000):
    return store.newest_usage(tenant, 0, FOREVER, limit)


RECORDS = st.lists(
    st.builds(
        usage,
        st.sampled_from(["r1", "r2"]),
        gateway_id=st.sampled_from(["g1", "g2"]),
        admitted_ns=st.integers(1, 2),
        recovered=st.booleans(),
        output_tokens=st.integers(0, 3),
    ),
    max_size=12,
)


@settings(max_examples=200, deadline=None)
@given(records=RECORDS)
def test_of_the_records_of_one_request_the_gateways_own_first_one_stays_else_the_fullest(records):
    kept = once_each(records)
    assert set(kept) == {record.key for record in records}
    for key, record in kept.items():
        rivals = [rival for rival in records if rival.key == key]
        finals = [rival for rival in rivals if not rival.recovered]
        assert record == (finals[0] if finals else max(rivals, key=lambda rival: rival.output_tokens))


@settings(max_examples=15, deadline=None)
@given(records=RECORDS, cuts=st.lists(st.integers(0, 12), max_size=3))
def test_however_records_are_cut_into_batches_the_table_keeps_the_same_ones(tmp_path_factory, records, cuts):
    database = Database.open(str(tmp_path_factory.mktemp("data")))
    try:
        store, new, edges = LedgerStore(database), 0, [0, *sorted(cuts), 12]
        for first, last in pairwise(edges):
            new += store.add_usage(records[first:last])
        assert {record.key: record for record in newest(store)} == once_each(records)
        assert len(newest(store)) == new
    finally:
        database.close()


def test_a_record_reads_back_as_it_was_written_and_again_is_not_new(store):
    assert store.add_usage([usage(), usage(), usage("r2")]) == 2
    assert store.add_usage([usage(), usage("r3", credential="quote ' NUL \0 🦦")]) == 1
    assert store.usage_of("", "r1") == [usage()]
    assert store.usage_of("", "r3") == [usage("r3", credential="quote ' NUL \0 🦦")]
    assert store.usage_of("other", "r1") == []


def test_an_id_that_a_client_uses_again_is_paid_again_and_another_tenants_record_stays(store):
    again = usage(admitted_ns=5_000, ended_ns=6_000)
    foreign = usage(tenant="other", gateway_id="g2", admitted_ns=7_000, ended_ns=8_000)
    assert store.add_usage([usage()]) == 1
    assert store.add_usage([again, foreign]) == 2
    assert store.usage_of("", "r1") == [foreign, again, usage()]
    assert store.usage_of("acme", "r1") == [again, usage()]


def test_a_recovered_record_gives_way_to_the_gateways_own_which_stays(store):
    recovered = usage(recovered=True, outcome="GATEWAY_LOST", output_tokens=3, ended_ns=9_000)
    assert store.add_usage([recovered]) == 1
    assert store.add_usage([replace(recovered, output_tokens=2)]) == 0
    assert newest(store) == [recovered]
    assert store.add_usage([usage()]) == 0
    assert store.add_usage([replace(recovered, output_tokens=9), usage(output_tokens=8)]) == 0
    assert newest(store) == [usage()]


def test_sums_are_by_tenant_model_and_bundle_over_what_ended_in_the_span(store):
    store.add_usage([usage(f"r{n}", ended_ns=n) for n in range(10)])
    store.add_usage([usage("big", model="large", output_tokens=2**32 - 1), usage("theirs", tenant="other")])
    assert store.sums("acme", 3, 7) == [
        Sum(
            tenant="acme",
            model="smol",
            bundle_digest="ab" * 16,
            requests=4,
            prompt_tokens=40,
            cached_tokens=16,
            output_tokens=20,
        )
    ]
    assert [(s.tenant, s.model, s.output_tokens) for s in store.sums("", 0, FOREVER)] == [
        ("acme", "large", 2**32 - 1),
        ("acme", "smol", 50),
        ("other", "smol", 5),
    ]
    assert [record.request_id for record in store.newest_usage("acme", 0, 10, 3)] == ["r9", "r8", "r7"]


def test_audit_events_are_kept_once_and_listed_newest_first(store):
    events = [audit(f"e{n}", at_ns=n + 1, request_id=f"r{n % 2}") for n in range(6)]
    assert store.add_audit([*events, *events]) == 6
    assert store.add_audit(events[2:4]) == 0
    assert store.newest_audit("", "", 2) == [events[5], events[4]]
    assert store.newest_audit("acme", "r0", 10) == [events[4], events[2], events[0]]
    assert store.newest_audit("other", "", 10) == []


def test_usage_outlives_the_spans_and_goes_when_its_own_time_has_come(tmp_path, make_span):
    spans = SpanStore.open(str(tmp_path))
    store = LedgerStore(spans.database)
    store.add_usage([usage()])
    store.add_audit([audit()])
    spans.append([make_span()])
    assert spans.trim(keep_spans=0, keep_s=0) == 1
    assert store.trim(usage_s=3600, audit_s=3600) == 0
    assert len(newest(store)) == 1
    assert store.trim(usage_s=3600, audit_s=0) == 1
    assert store.newest_audit("", "", 10) == []
    assert store.trim(usage_s=0, audit_s=0) == 1
    spans.close()


def test_writing_spans_usage_and_deleting_at_the_same_time_loses_nothing(tmp_path, make_span):
    spans = SpanStore.open(str(tmp_path))
    store, failures = LedgerStore(spans.database), []

    def guarded(work):
        try:
            work()
        except duckdb.Error as error:
            failures.append(error)

    def write_spans():
        for number in range(1, 40):
            spans.append([make_span(trace=number, span=number)])
            spans.trim(keep_spans=2, keep_s=3600)

    def write_usage(of):
        for number in range(40):
            # Both threads send the same requests, as a gateway does after an answer that came too late.
            store.add_usage([usage(f"r{number}"), usage(f"own-{of}-{number}")])

    threads = [threading.Thread(target=guarded, args=(write_spans,))]
    threads += [threading.Thread(target=guarded, args=(lambda of=of: write_usage(of),)) for of in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    assert len({record.key for record in newest(store)}) == len(newest(store)) == 120
    spans.close()


async def test_a_write_that_the_disk_refuses_is_unavailable_and_one_after_which_nothing_works_ends_the_process(
    database,
):
    writer = LedgerWriter(LedgerStore(database), usage_s=1e6, audit_s=1e6, trim_period_s=60)
    running = asyncio.create_task(writer.run())

    def fail(error):
        raise error

    with pytest.raises(Unavailable) as refusal:
        await writer.write("usage", 1, lambda: fail(duckdb.IOException("no space")))
    assert refusal.value.retry_after_s
    assert await writer.write("usage", 1, lambda: 1) == 1
    assert not running.done()
    with pytest.raises(Unavailable):
        await writer.write("usage", 1, lambda: fail(duckdb.FatalException("gone")))
    with pytest.raises(duckdb.FatalException):
        await running
    writer.close()


@asynccontextmanager
async def serving(data_dir):
    app = TelemetryApp(TelemetrySettings(data_dir=str(data_dir), address="127.0.0.1:0"))
    await app.start()
    running = asyncio.ensure_future(app.run())
    try:
        async with Peer(app.address) as peer:
            stub = TelemetryServiceStub(peer.channel)
            yield lambda method, request: peer.unary(getattr(stub, method), request, deadline=Deadline.after(10))
    finally:
        running.cancel()
        await asyncio.wait({running})
        await app.drain()


def message(request_id="r1", **changes):
    values = {"tenant": "acme", "admitted_unix_ns": 1_000, "ended_unix_ns": 2_000, "output_tokens": 5}
    return pb.UsageRecord(request_id=request_id, **{**values, **changes})


async def test_usage_and_audit_go_in_and_come_out_over_grpc(tmp_path):
    sent = message(
        credential="laptop",
        model="smol",
        bundle_digest="ab" * 16,
        prompt_tokens=9,
        cached_tokens=3,
        outcome="CANCELLED",
        gateway_id="g1",
        recovered=True,
        attempts=[pb.UsageAttempt(attempt=1, engine_id="e1", epoch=2**64 - 1, output_tokens=5, outcome="OK")],
    )
    event = pb.AuditEvent(event_id="e1", at_unix_ns=7, subject="quota", decision="REFUSED", facts={"limit": "3"})
    async with serving(tmp_path) as call:
        answer = await call("RecordUsage", pb.RecordUsageRequest(records=[sent, sent, message("r2")]))
        assert answer.new_records == 2
        assert (await call("RecordUsage", pb.RecordUsageRequest(records=[sent]))).new_records == 0
        assert (await call("RecordUsage", pb.RecordUsageRequest())).new_records == 0
        found = await call("QueryUsage", pb.QueryUsageRequest(request_id="r1"))
        assert (list(found.records), list(found.sums)) == ([sent], [])
        listed = await call("QueryUsage", pb.QueryUsageRequest(tenant="acme", records=5))
        assert [line.requests for line in listed.sums] == [1, 1]
        assert {record.request_id for record in listed.records} == {"r1", "r2"}
        assert not (await call("QueryUsage", pb.QueryUsageRequest(since_unix_ns=3_000))).sums
        assert not (await call("QueryUsage", pb.QueryUsageRequest(until_unix_ns=2_000))).sums
        assert (await call("RecordAudit", pb.RecordAuditRequest(events=[event, event]))).new_events == 1
        assert list((await call("ListAudit", pb.ListAuditRequest())).events) == [event]
    async with serving(tmp_path) as call:
        assert len((await call("QueryUsage", pb.QueryUsageRequest(records=9))).records) == 2
        assert list((await call("ListAudit", pb.ListAuditRequest(limit=1))).events) == [event]


@pytest.mark.parametrize(
    ("method", "request_message", "field"),
    [
        ("RecordUsage", pb.RecordUsageRequest(records=[message(), message("")]), "records[1].request_id"),
        ("RecordUsage", pb.RecordUsageRequest(records=[message(tenant="")]), "records[0].tenant"),
        ("RecordUsage", pb.RecordUsageRequest(records=[message(model="x" * 300)]), "records[0].model"),
        ("RecordUsage", pb.RecordUsageRequest(records=[message(ended_unix_ns=0)]), "records[0].ended_unix_ns"),
        ("RecordUsage", pb.RecordUsageRequest(records=[message(f"r{n}") for n in range(1001)]), "records"),
        ("RecordAudit", pb.RecordAuditRequest(events=[pb.AuditEvent(event_id="e", at_unix_ns=1)]), "events[0].subject"),
        (
            "RecordAudit",
            pb.RecordAuditRequest(events=[pb.AuditEvent(event_id="e", at_unix_ns=1, subject="s", decision="MAYBE")]),
            "events[0].decision",
        ),
        ("QueryUsage", pb.QueryUsageRequest(records=1001), "records"),
        ("QueryUsage", pb.QueryUsageRequest(request_id="no spaces"), "request_id"),
        ("QueryUsage", pb.QueryUsageRequest(since_unix_ns=2**63), "since_unix_ns"),
        ("ListAudit", pb.ListAuditRequest(limit=1001), "limit"),
    ],
)
async def test_what_cannot_be_kept_or_asked_is_refused_by_its_field(tmp_path, method, request_message, field):
    async with serving(tmp_path) as call:
        with pytest.raises(InvalidRequest) as refusal:
            await call(method, request_message)
        assert refusal.value.field == field
        assert not (await call("QueryUsage", pb.QueryUsageRequest(records=1))).records
