import asyncio
import inspect
import time
from contextlib import asynccontextmanager

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import TraceServiceStub

from headrace.api.telemetry.v1 import telemetry_service_pb2 as pb
from headrace.api.telemetry.v1.telemetry_service_pb2_grpc import TelemetryServiceStub
from headrace.base.deadline import Deadline
from headrace.base.errors import NotFound
from headrace.rpc.client import Peer
from headrace.telemetry.core.span import Span, Status


@pytest.fixture
def eventually():
    """Wait until a condition (a function, async or not) is true and return its value."""

    async def wait(condition, within_s=20.0):
        deadline = time.monotonic() + within_s
        while True:
            value = condition()
            if inspect.isawaitable(value):
                value = await value
            if value:
                return value
            assert time.monotonic() < deadline, "did not become true in time"
            await asyncio.sleep(0.01)

    return wait


@pytest.fixture
def make_span():
    """Build a span of trace `trace` (a number) with readable defaults."""

    def make(trace=1, span=1, *, parent=0, **fields):
        values = {
            "trace_id": f"{trace:032x}",
            "span_id": f"{span:016x}",
            "parent_span_id": f"{parent:016x}" if parent else "",
            "request_id": "",
            "service": "gateway",
            "name": f"span {span}",
            "start_ns": 1_000 * span,
            "end_ns": 1_000 * span + 500,
            "status": Status.OK,
            "attributes": {},
        }
        return Span(**{**values, **fields})

    return make


@pytest.fixture
def export_request():
    """Build an OTLP request from (trace, span, attributes) triples of numbers and a dict."""

    def build(*spans):
        message = ExportTraceServiceRequest()
        resource = message.resource_spans.add()
        resource.resource.attributes.add(key="service.name").value.string_value = "gateway"
        scope = resource.scope_spans.add()
        for trace, span, attributes in spans:
            made = scope.spans.add(
                trace_id=trace.to_bytes(16, "big"),
                span_id=span.to_bytes(8, "big"),
                name=f"span {span}",
                start_time_unix_nano=1_000_000 * span,
                end_time_unix_nano=1_000_000 * span + 500_000,
            )
            for key, text in attributes.items():
                made.attributes.add(key=key).value.string_value = text
        return message

    return build


@pytest.fixture
def connect():
    """Open a client to a telemetry service: an async context manager over an address."""
    return Client.connect


class Client:
    """The calls of the service, with a deadline each."""

    def __init__(self, peer):
        self.peer = peer
        self._spans = TraceServiceStub(peer.channel)
        self._traces = TelemetryServiceStub(peer.channel)

    @classmethod
    @asynccontextmanager
    async def connect(cls, address):
        async with Peer(address) as peer:
            yield cls(peer)

    async def export(self, request):
        return await self.peer.unary(self._spans.Export, request, deadline=Deadline.after(10))

    async def get(self, **key):
        return await self.peer.unary(self._traces.GetTrace, pb.GetTraceRequest(**key), deadline=Deadline.after(10))

    async def find(self, **key):
        """Like `get`, but None when the trace has not arrived."""
        try:
            return await self.get(**key)
        except NotFound:
            return None

    async def traces(self, limit=0):
        answer = await self.peer.unary(
            self._traces.ListTraces, pb.ListTracesRequest(limit=limit), deadline=Deadline.after(10)
        )
        return list(answer.traces)

    async def record_usage(self, request_ids):
        """Send a record for each; returns how many were new."""
        records = [
            pb.UsageRecord(request_id=name, tenant="acme", admitted_unix_ns=1, ended_unix_ns=2) for name in request_ids
        ]
        request = pb.RecordUsageRequest(records=records)
        answer = await self.peer.unary(self._traces.RecordUsage, request, deadline=Deadline.after(10))
        return answer.new_records

    async def requests(self):
        """How many requests have a record."""
        answer = await self.peer.unary(self._traces.QueryUsage, pb.QueryUsageRequest(), deadline=Deadline.after(10))
        return sum(line.requests for line in answer.sums)
