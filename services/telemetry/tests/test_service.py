import asyncio
import time
from contextlib import asynccontextmanager

import pytest
from prometheus_client import REGISTRY

from headrace.base.deadline import Deadline
from headrace.base.errors import InvalidRequest, NotFound, StartError
from headrace.observe.tracing import Tracing, current_traceparent, get_tracer
from headrace.telemetry.app import FULL_NAME, OTLP_NAME, TelemetryApp
from headrace.telemetry.servicer import TraceIntake
from headrace.telemetry.settings import TelemetrySettings


@asynccontextmanager
async def serving(data_dir, **changes):
    values = {"data_dir": str(data_dir), "address": "127.0.0.1:0", "flush_period_s": 0.02}
    app = TelemetryApp(TelemetrySettings(**{**values, **changes}))
    await app.start()
    running = asyncio.ensure_future(app.run())
    try:
        yield app
    finally:
        running.cancel()
        await asyncio.wait({running})
        await app.drain()


@pytest.fixture
async def client(tmp_path, connect):
    async with serving(tmp_path) as app, connect(app.address) as client:
        yield client


def total(name, **labels):
    return REGISTRY.get_sample_value(f"headrace_telemetry_spans_{name}_total", labels) or 0.0


async def test_a_trace_can_be_asked_for_by_either_id_soon_after_it_was_sent(client, export_request, eventually):
    answer = await client.export(export_request((7, 2, {"a": "b"}), (7, 1, {"headrace.request_id": "req-7"})))
    sent = time.monotonic()
    assert not answer.HasField("partial_success")
    found = await eventually(lambda: client.find(trace_id=f"{7:032x}"))
    # 0.1 s on a quiet machine; the bound leaves room for a busy one.
    assert time.monotonic() - sent < 2.0
    assert [(s.span_id, s.name, s.service) for s in found.spans] == [
        (f"{1:016x}", "span 1", "gateway"),
        (f"{2:016x}", "span 2", "gateway"),
    ]
    assert (found.spans[0].start_unix_ns, found.spans[0].duration_ms) == (1_000_000, 0.5)
    assert dict(found.spans[1].attributes) == {"a": "b"}
    assert found.spans[1].status == "UNSET"
    assert await client.get(request_id="req-7") == found
    assert await client.get(trace_id=f"{7:032X}") == found


async def test_traces_are_listed_newest_first_and_as_many_as_asked_for(client, export_request, eventually):
    await client.export(export_request(*((n, n, {"headrace.request_id": f"req-{n}"}) for n in range(1, 31))))
    await eventually(lambda: client.find(trace_id=f"{30:032x}"))
    assert [t.request_id for t in await client.traces(limit=3)] == ["req-30", "req-29", "req-28"]
    listed = await client.traces()
    assert len(listed) == 20
    newest = listed[0]
    assert (newest.trace_id, newest.root, newest.spans) == (f"{30:032x}", "span 30", 1)
    assert (newest.start_unix_ns, newest.duration_ms) == (30_000_000, 0.5)


async def test_an_empty_database_lists_nothing(client):
    assert await client.traces() == []


@pytest.mark.parametrize("key", [{"trace_id": "f" * 32}, {"request_id": "nobody"}])
async def test_an_unknown_trace_is_not_found(client, key):
    with pytest.raises(NotFound, match="no span of"):
        await client.get(**key)


@pytest.mark.parametrize(
    ("key", "field"),
    [
        ({}, "key"),
        ({"trace_id": ""}, "trace_id"),
        ({"trace_id": "f" * 31}, "trace_id"),
        ({"trace_id": "g" * 32}, "trace_id"),
        ({"trace_id": "0" * 32}, "trace_id"),
        ({"request_id": ""}, "request_id"),
        ({"request_id": "a b"}, "request_id"),
        ({"request_id": "x" * 65}, "request_id"),
    ],
)
async def test_an_id_that_cannot_be_one_is_refused_by_field(client, key, field):
    with pytest.raises(InvalidRequest) as refused:
        await client.get(**key)
    assert refused.value.field == field


async def test_too_long_a_list_is_refused(client):
    with pytest.raises(InvalidRequest) as refused:
        await client.traces(limit=1001)
    assert refused.value.field == "limit"


async def test_malformed_spans_are_rejected_alone_and_the_sender_is_told_why(client, export_request, eventually):
    received, malformed = total("received"), total("dropped", reason="malformed")
    message = export_request((9, 1, {}), (9, 2, {}), (9, 3, {}))
    message.resource_spans[0].scope_spans[0].spans[1].span_id = b"short"
    answer = await client.export(message)
    assert answer.partial_success.rejected_spans == 1
    assert "span_id" in answer.partial_success.error_message
    found = await eventually(lambda: client.find(trace_id=f"{9:032x}"))
    assert [s.name for s in found.spans] == ["span 1", "span 3"]
    assert total("received") - received == 3
    assert total("dropped", reason="malformed") - malformed == 1


async def test_a_full_queue_refuses_the_surplus_and_the_sender_is_told(tmp_path, connect, export_request, eventually):
    before = total("dropped", reason="queue_full")
    async with serving(tmp_path, queue_spans=10) as app, connect(app.address) as client:
        answer = await client.export(export_request(*((3, n, {}) for n in range(1, 31))))
        assert answer.partial_success.rejected_spans == 20
        assert "queue is full" in answer.partial_success.error_message
        found = await eventually(lambda: client.find(trace_id=f"{3:032x}"))
        assert len(found.spans) == 10
    assert total("dropped", reason="queue_full") - before == 20


async def test_a_batch_sent_twice_shows_each_span_once(client, export_request, eventually):
    stored = total("stored")
    for _ in range(2):
        await client.export(export_request((5, 1, {}), (5, 2, {})))
    await eventually(lambda: total("stored") - stored == 4)
    assert len((await client.get(trace_id=f"{5:032x}")).spans) == 2
    assert [t.spans for t in await client.traces()] == [2]


async def test_both_services_are_healthy_once_started(client):
    for name in ("", FULL_NAME, OTLP_NAME):
        assert await client.peer.healthy(name, deadline=Deadline.after(5))


async def test_spans_taken_just_before_the_drain_are_there_after_the_next_start(tmp_path, connect, export_request):
    async with serving(tmp_path, flush_period_s=0.2) as app, connect(app.address) as client:
        await client.export(export_request(*((4, n, {}) for n in range(1, 101))))
    async with serving(tmp_path) as app, connect(app.address) as client:
        assert len((await client.get(trace_id=f"{4:032x}")).spans) == 100


async def test_a_message_of_thousands_of_spans_is_read_in_slices_that_give_the_loop_back(tmp_path, export_request):
    async with serving(tmp_path) as app:
        message = export_request(*((1, n, {}) for n in range(1, 2561)))
        reading, turns = asyncio.ensure_future(TraceIntake(app.writer).Export(message, None)), 0
        while not reading.done():
            await asyncio.sleep(0)
            turns += 1
    assert turns >= 10
    assert not (await reading).HasField("partial_success")


async def test_a_taken_port_is_a_start_error(tmp_path):
    async with serving(tmp_path / "a") as app:
        second = TelemetryApp(TelemetrySettings(data_dir=str(tmp_path / "b"), address=app.address))
        with pytest.raises(StartError, match=app.address):
            await second.start()
        await second.drain()


async def test_a_writer_that_ends_ends_the_process(tmp_path):
    async with serving(tmp_path) as app:
        app.writer.close(5)
        await asyncio.wait_for(app.run(), 5)


async def test_spans_of_a_service_travel_from_its_tracer_to_the_answer(tmp_path, connect, eventually):
    async with serving(tmp_path) as app, connect(app.address) as client:
        tracing = Tracing("router", "router-1", app.address)
        await tracing.start()
        with get_tracer().start_as_current_span("router.Place", attributes={"headrace.request_id": "e2e"}):
            trace_id = current_traceparent().split("-")[1]
            with pytest.raises(ValueError, match="boom"), get_tracer().start_as_current_span("score"):
                raise ValueError("boom")
        ended = time.monotonic()
        found = await eventually(lambda: client.find(request_id="e2e"))
        assert time.monotonic() - ended < 2.0
        await tracing.shutdown()
        assert found.trace_id == trace_id
        place, score = found.spans
        assert (place.service, place.name, place.parent_span_id) == ("router", "router.Place", "")
        assert (score.name, score.parent_span_id, score.status) == ("score", place.span_id, "ERROR")
        assert score.attributes["service.instance.id"] == "router-1"
        assert score.attributes["otel.status_description"] == "ValueError: boom"
