"""The two services of this process: spans in (OTLP); traces out, usage and audit in and out."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

from grpc.aio import ServicerContext
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import TraceServiceServicer

from headrace.api.telemetry.v1 import telemetry_service_pb2 as pb
from headrace.api.telemetry.v1.telemetry_service_pb2_grpc import TelemetryServiceServicer
from headrace.base.errors import InvalidRequest, NotFound
from headrace.observe.metrics import counter
from headrace.rpc.ids import is_request_id
from headrace.telemetry.core.span import Span, Summary, in_order, summarise
from headrace.telemetry.facts_wire import audit_message, read_audit, read_usage, sum_message, usage_message
from headrace.telemetry.ledger_writer import LedgerWriter
from headrace.telemetry.otlp import Malformed, read_spans
from headrace.telemetry.store import SpanStore
from headrace.telemetry.writer import DROPPED, SpanWriter

RECEIVED = counter("headrace_telemetry_spans_received_total", "Spans that arrived, whatever became of them.")

DEFAULT_TRACES = 20
MOST_TRACES = 1000
DEFAULT_AUDIT = 100
MOST_LISTED = 1000

# Decoding costs 18 µs a span (measured), and one message can hold tens of thousands.
_DECODED_AT_ONCE = 256
_TRACE_ID = re.compile(r"(?!0{32})[0-9a-f]{32}")

T = TypeVar("T")


class TraceIntake(TraceServiceServicer):
    """OTLP: queues well-formed spans, and tells the sender how many were not taken and why."""

    def __init__(self, writer: SpanWriter) -> None:
        self._writer = writer

    async def Export(
        self,
        request: ExportTraceServiceRequest,
        context: ServicerContext[ExportTraceServiceRequest, ExportTraceServiceResponse],
    ) -> ExportTraceServiceResponse:
        """Returns before the spans are on disk: they are after one flush period and one write."""
        spans: list[Span] = []
        malformed: list[Malformed] = []
        for count, item in enumerate(read_spans(request), start=1):
            if isinstance(item, Malformed):
                malformed.append(item)
            else:
                spans.append(item)
            if count % _DECODED_AT_ONCE == 0:
                await asyncio.sleep(0)
        RECEIVED.inc(len(spans) + len(malformed))
        DROPPED.labels("malformed").inc(len(malformed))
        refused = len(spans) - self._writer.offer(spans)
        return _export_answer(malformed, refused)


class TelemetryServicer(TelemetryServiceServicer):
    """Traces, usage and audit; queries run on `executor`, writes on the ledger's thread, nothing on the event loop."""

    def __init__(self, store: SpanStore, ledger: LedgerWriter, executor: Executor) -> None:
        self._store = store
        self._ledger = ledger
        self._executor = executor

    async def GetTrace(
        self, request: pb.GetTraceRequest, context: ServicerContext[pb.GetTraceRequest, pb.GetTraceResponse]
    ) -> pb.GetTraceResponse:
        """All spans of the trace that the key names; of the newest one when a request id was used twice."""
        find = self._finder(request)
        spans = await self._query(find)
        if not spans:
            key = request.trace_id or request.request_id
            raise NotFound(f"no span of {key} has arrived; the newest take two seconds, the oldest are deleted")
        return pb.GetTraceResponse(trace_id=spans[0].trace_id, spans=[_span_message(s) for s in in_order(spans)])

    async def ListTraces(
        self, request: pb.ListTracesRequest, context: ServicerContext[pb.ListTracesRequest, pb.ListTracesResponse]
    ) -> pb.ListTracesResponse:
        """The traces that started last, newest first."""
        limit = request.limit or DEFAULT_TRACES
        if limit > MOST_TRACES:
            raise InvalidRequest("limit", f"{limit} is more than {MOST_TRACES}")
        summaries = await self._query(lambda: summarise(self._store.newest(limit)))
        return pb.ListTracesResponse(traces=[_summary_message(summary) for summary in summaries])

    async def RecordUsage(
        self, request: pb.RecordUsageRequest, context: ServicerContext[pb.RecordUsageRequest, pb.RecordUsageResponse]
    ) -> pb.RecordUsageResponse:
        """Answers when the records are on disk; one that is known already is not new, and no error."""
        records = read_usage(request)
        new = await self._ledger.write("usage", len(records), lambda: self._ledger.store.add_usage(records))
        return pb.RecordUsageResponse(new_records=new)

    async def QueryUsage(
        self, request: pb.QueryUsageRequest, context: ServicerContext[pb.QueryUsageRequest, pb.QueryUsageResponse]
    ) -> pb.QueryUsageResponse:
        """Sums and the newest records of what ended in a span of time, or what is known of one request."""
        store, tenant = self._ledger.store, request.tenant
        if request.records > MOST_LISTED:
            raise InvalidRequest("records", f"{request.records} is more than {MOST_LISTED}")
        if request.request_id:
            _check_request_id(request.request_id)
            found = await self._query(lambda: store.usage_of(tenant, request.request_id))
            return pb.QueryUsageResponse(records=[usage_message(record) for record in found])
        since, until = request.since_unix_ns, request.until_unix_ns or time.time_ns()
        if max(since, until) >= 2**63:
            raise InvalidRequest("since_unix_ns" if since >= 2**63 else "until_unix_ns", "is beyond the year 2262")
        sums = await self._query(lambda: store.sums(tenant, since, until))
        listed = await self._query(lambda: store.newest_usage(tenant, since, until, request.records))
        return pb.QueryUsageResponse(
            sums=[sum_message(line) for line in sums], records=[usage_message(record) for record in listed]
        )

    async def RecordAudit(
        self, request: pb.RecordAuditRequest, context: ServicerContext[pb.RecordAuditRequest, pb.RecordAuditResponse]
    ) -> pb.RecordAuditResponse:
        """Answers when the events are on disk; one that is known already is not new, and no error."""
        events = read_audit(request)
        new = await self._ledger.write("audit", len(events), lambda: self._ledger.store.add_audit(events))
        return pb.RecordAuditResponse(new_events=new)

    async def ListAudit(
        self, request: pb.ListAuditRequest, context: ServicerContext[pb.ListAuditRequest, pb.ListAuditResponse]
    ) -> pb.ListAuditResponse:
        """The newest events, newest first."""
        limit = request.limit or DEFAULT_AUDIT
        if limit > MOST_LISTED:
            raise InvalidRequest("limit", f"{limit} is more than {MOST_LISTED}")
        if request.request_id:
            _check_request_id(request.request_id)
        events = await self._query(lambda: self._ledger.store.newest_audit(request.tenant, request.request_id, limit))
        return pb.ListAuditResponse(events=[audit_message(event) for event in events])

    def _finder(self, request: pb.GetTraceRequest) -> Callable[[], list[Span]]:
        """The query for the request's key; InvalidRequest when it is missing or cannot be one."""
        key = request.WhichOneof("key")
        if key is None:
            raise InvalidRequest("key", "set trace_id or request_id")
        if key == "trace_id":
            trace_id = request.trace_id.lower()
            if not _TRACE_ID.fullmatch(trace_id):
                raise InvalidRequest("trace_id", "must be 32 hex digits, not all zero")
            return lambda: self._store.trace(trace_id)
        request_id = request.request_id
        _check_request_id(request_id)
        return lambda: self._store.trace_of_request(request_id)

    async def _query(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)


def _check_request_id(request_id: str) -> None:
    if not is_request_id(request_id):
        raise InvalidRequest("request_id", "must be 1 to 64 letters, digits or any of _ . : -")


def _export_answer(malformed: list[Malformed], refused: int) -> ExportTraceServiceResponse:
    answer = ExportTraceServiceResponse()
    reasons = [f"{len(malformed)} malformed, the first: {malformed[0].why}"] if malformed else []
    if refused:
        reasons.append(f"{refused} refused, the queue is full")
    if reasons:
        answer.partial_success.rejected_spans = len(malformed) + refused
        answer.partial_success.error_message = "; ".join(reasons)
    return answer


def _span_message(span: Span) -> pb.Span:
    return pb.Span(
        span_id=span.span_id,
        parent_span_id=span.parent_span_id,
        service=span.service,
        name=span.name,
        start_unix_ns=span.start_ns,
        duration_ms=(span.end_ns - span.start_ns) / 1e6,
        attributes=span.attributes,
        status=span.status.value,
    )


def _summary_message(summary: Summary) -> pb.TraceSummary:
    return pb.TraceSummary(
        trace_id=summary.trace_id,
        request_id=summary.request_id,
        root=summary.root,
        start_unix_ns=summary.start_ns,
        duration_ms=(summary.end_ns - summary.start_ns) / 1e6,
        spans=summary.spans,
    )
