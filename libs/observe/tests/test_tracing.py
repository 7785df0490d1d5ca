import asyncio
import socket
import time
from contextlib import asynccontextmanager

import grpc
import pytest
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace import TracerProvider
from prometheus_client import REGISTRY

from headrace.observe.export import ExportSettings, encode
from headrace.observe.tracing import Tracing, current_span, current_traceparent, get_tracer, record_span

EARLY = get_tracer()
PARENT = "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """A real OTLP server whose answers a test can choose."""

    def __init__(self):
        self.requests = []
        self.calls = 0
        self.failure = None
        self.rejected = 0
        self.stall_s = 0.0

    async def Export(self, request, context):
        self.calls += 1
        await asyncio.sleep(self.stall_s)
        if self.failure is not None:
            await context.abort(self.failure, "as the test wishes")
        self.requests.append(request)
        answer = trace_service_pb2.ExportTraceServiceResponse()
        answer.partial_success.rejected_spans = self.rejected
        return answer

    @property
    def spans(self):
        return [s for r in self.requests for rs in r.resource_spans for ss in rs.scope_spans for s in ss.spans]

    @property
    def names(self):
        return [s.name for s in self.spans]


@asynccontextmanager
async def serve(collector, port=0):
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield f"127.0.0.1:{bound}"
    finally:
        await server.stop(0)


@asynccontextmanager
async def traced(endpoint, **export):
    tracing = Tracing("router", "r1", endpoint, export=ExportSettings(**{"period_s": 0.02, **export}))
    await tracing.start()
    try:
        yield tracing
    finally:
        await tracing.shutdown()


async def eventually(condition, within_s=10.0):
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "did not become true in time"
        await asyncio.sleep(0.01)


def value(reason):
    """The drop counter for one reason, as a scraper would read it."""
    return REGISTRY.get_sample_value("headrace_spans_dropped_total", {"reason": reason}) or 0.0


def unused_port():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


async def test_spans_arrive_with_service_instance_and_attributes_soon_after_they_end():
    collector = Collector()
    async with serve(collector) as endpoint, traced(endpoint):
        with get_tracer().start_as_current_span("router.place", attributes={"headrace.request_id": "abc"}):
            pass
        await eventually(lambda: collector.names == ["router.place"])
    resource = {a.key: a.value.string_value for a in collector.requests[0].resource_spans[0].resource.attributes}
    assert resource["service.name"] == "router"
    assert resource["service.instance.id"] == "r1"
    assert collector.spans[0].attributes[0].key == "headrace.request_id"


async def test_shutdown_sends_what_ended_just_before():
    collector = Collector()
    async with serve(collector) as endpoint:
        async with traced(endpoint, period_s=60.0):
            for n in range(1500):
                record_span(f"s{n}", 1, 2, "", {})
        assert collector.names == [f"s{n}" for n in range(1500)]
        assert (
            max(sum(len(ss.spans) for rs in r.resource_spans for ss in rs.scope_spans) for r in collector.requests)
            <= 512
        )


async def test_without_an_endpoint_spans_have_ids_and_go_nowhere():
    async with traced(None):
        with get_tracer().start_as_current_span("a"):
            outer = current_traceparent()
            with get_tracer().start_as_current_span("b"):
                assert current_traceparent()[:35] == outer[:35]
                assert current_traceparent() != outer
    assert len(outer) == 55
    assert int(outer[-2:], 16) & 1
    assert current_traceparent() == ""


async def test_a_tracer_kept_from_before_the_start_and_opentelemetrys_own_use_the_started_tracing():
    collector = Collector()
    async with serve(collector) as endpoint, traced(endpoint):
        with EARLY.start_as_current_span("early"), trace.get_tracer("other").start_as_current_span("late"):
            pass
    assert collector.names == ["late", "early"]
    assert collector.spans[0].parent_span_id == collector.spans[1].span_id


async def test_a_recorded_span_has_the_given_times_parent_attributes_and_status():
    collector = Collector()
    async with serve(collector) as endpoint, traced(endpoint):
        with get_tracer().start_as_current_span("unrelated"):
            made = record_span("engine.prefill", 1_000, 5_000, PARENT, {"gen_ai.usage.input_tokens": 7}, "full")
            root = record_span("alone", 1, 2, "", {})
    span = next(s for s in collector.spans if s.name == "engine.prefill")
    assert (span.start_time_unix_nano, span.end_time_unix_nano) == (1_000, 5_000)
    assert span.trace_id == bytes.fromhex("ab" * 16)
    assert span.parent_span_id == bytes.fromhex("cd" * 8)
    assert span.attributes[0].value.int_value == 7
    assert (span.status.code, span.status.message) == (2, "full")
    assert made == f"00-{'ab' * 16}-{span.span_id.hex()}-01"
    alone = next(s for s in collector.spans if s.name == "alone")
    assert alone.parent_span_id == b""
    assert root[3:35] == alone.trace_id.hex()


async def test_a_caller_that_does_not_sample_its_trace_is_obeyed():
    collector = Collector()
    async with serve(collector) as endpoint, traced(endpoint):
        made = record_span("quiet", 1, 2, PARENT[:-2] + "00", {})
        record_span("loud", 1, 2, PARENT, {})
    assert collector.names == ["loud"]
    assert made.endswith("-00")


async def test_while_telemetry_is_away_the_newest_spans_wait_and_the_rest_are_counted_and_it_recovers():
    port, before = unused_port(), value("queue_full")
    async with traced(f"127.0.0.1:{port}", queue_spans=100):
        started = time.perf_counter()
        for n in range(1000):
            record_span(f"s{n}", 1, 2, "", {})
        assert time.perf_counter() - started < 1.0, "making spans waited for telemetry"
        await eventually(lambda: value("queue_full") - before == 900)
        collector = Collector()
        async with serve(collector, port):
            await eventually(lambda: len(collector.spans) == 100)
            assert collector.names == [f"s{n}" for n in range(900, 1000)]
            record_span("afterwards", 1, 2, "", {})
            await eventually(lambda: collector.names[-1] == "afterwards")


async def test_telemetry_that_restarts_gets_the_spans_made_meanwhile():
    port, collector = unused_port(), Collector()
    async with traced(f"127.0.0.1:{port}", longest_backoff_s=0.1):
        for life in ("first", "second"):
            async with serve(collector, port):
                record_span(life, 1, 2, "", {})
                await eventually(lambda life=life: life in collector.names)
            record_span(f"after {life}", 1, 2, "", {})
        async with serve(collector, port):
            await eventually(lambda: collector.names == ["first", "after first", "second", "after second"])


async def test_a_stalled_telemetry_costs_one_deadline_and_its_spans_are_sent_again_in_their_order():
    collector = Collector()
    collector.stall_s = 30.0
    async with serve(collector) as endpoint, traced(endpoint, deadline_s=0.1):
        record_span("one", 1, 2, "", {})
        record_span("two", 1, 2, "", {})
        await eventually(lambda: collector.calls == 1)
        collector.stall_s = 0.0
        await eventually(lambda: collector.names == ["one", "two"])


async def test_a_refusal_for_good_and_rejected_spans_are_counted_and_not_sent_again():
    collector, before = Collector(), value("refused")
    async with serve(collector) as endpoint, traced(endpoint):
        collector.failure = grpc.StatusCode.UNIMPLEMENTED
        record_span("refused", 1, 2, "", {})
        await eventually(lambda: value("refused") - before == 1)
        collector.failure, collector.rejected = None, 1
        record_span("rejected", 1, 2, "", {})
        await eventually(lambda: value("refused") - before == 2)
    assert collector.names == ["rejected"]


@pytest.mark.parametrize("away", ["refusing", "stalled"])
async def test_shutdown_is_bounded_and_counts_what_it_could_not_send(away):
    collector, before = Collector(), value("closed")
    collector.stall_s = 60.0
    async with serve(collector) as endpoint:
        tracing = Tracing("x", "x", endpoint if away == "stalled" else f"127.0.0.1:{unused_port()}")
        await tracing.start()
        record_span("lost", 1, 2, "", {})
        started = time.perf_counter()
        await tracing.shutdown(timeout_s=0.3)
        await tracing.shutdown(timeout_s=0.3)
        assert time.perf_counter() - started < 1.0
    assert value("closed") - before == 1


async def test_a_full_batch_is_encoded_in_slices_that_give_the_loop_back():
    provider, ended = TracerProvider(shutdown_on_exit=False), []
    for n in range(640):
        span = provider.get_tracer("test").start_span(f"s{n}")
        span.end()
        ended.append(span)
    encoding, turns = asyncio.ensure_future(encode(ended)), 0
    while not encoding.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns >= 10
    spans = [s.name for rs in (await encoding).resource_spans for ss in rs.scope_spans for s in ss.spans]
    assert spans == [f"s{n}" for n in range(640)]


async def test_a_current_span_is_the_parent_of_what_begins_inside_it_and_fails_with_its_block():
    collector = Collector()
    async with serve(collector) as endpoint, traced(endpoint):
        with current_span("outer", {"headrace.attempt": 1}) as outer:
            record_span("inner", 1, 2, current_traceparent(), {})
            outer.set_attribute("headrace.engine_id", "e1")
        assert current_traceparent() == ""
        with pytest.raises(ValueError, match="of no use"), current_span("failed"):
            raise ValueError("of no use")
        assert current_traceparent() == ""
    spans = {span.name: span for span in collector.spans}
    assert spans["inner"].parent_span_id == spans["outer"].span_id
    assert [a.key for a in spans["outer"].attributes] == ["headrace.attempt", "headrace.engine_id"]
    assert (spans["outer"].status.code, spans["failed"].status.code) == (0, 2)
    assert spans["failed"].status.message == "ValueError"
