"""Sending spans: a bounded queue, and one task on the running loop that empties it over grpc.aio."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import TraceServiceStub
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor

from headrace.base.backoff import Backoff
from headrace.base.channel import Keepalive, channel_options
from headrace.base.tls import TlsFiles, TlsPem, TlsSettings, tls_files
from headrace.observe.log import get_logger
from headrace.observe.metrics import counter

log = get_logger(__name__)

EXPORTED = counter("headrace_spans_exported_total", "Spans that telemetry accepted.")
DROPPED = counter("headrace_spans_dropped_total", "Spans that were made and never stored, by reason.", ("reason",))

# Encoding costs 19 µs a span (measured), so a whole batch at once would hold the loop for 10 ms; this holds it for 1.
_ENCODED_AT_ONCE = 64
# Each export has its own deadline, so pings find nothing out; one per hour keeps other collectors from hanging up on
# us, which some do when pinged more than once in five minutes.
_KEEPALIVE = Keepalive(time_s=3600.0, timeout_s=20.0)
# Sending the same batch again can help after these, and not after RESOURCE_EXHAUSTED: too large stays too large.
_LATER = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportSettings:
    """How spans wait and leave: at most `queue_spans` wait, `batch_spans` go together, every `period_s`.

    An export costs each side about a millisecond of CPU beside a busy model, however few spans it holds.
    """

    queue_spans: int = 4096
    batch_spans: int = 512
    period_s: float = 1.0
    deadline_s: float = 2.0
    longest_backoff_s: float = 2.0


class SpanExport(SpanProcessor):
    """The queue between the code that ends spans and telemetry.

    While telemetry is away the newest `queue_spans` are kept and sent when it returns; older ones are dropped and
    counted, because the requests people ask about are the latest.
    """

    def __init__(self, endpoint: str, settings: ExportSettings) -> None:
        self._endpoint = endpoint
        self._settings = settings
        self._waiting: deque[ReadableSpan] = deque()
        self._closing = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self._reachable = True
        self._tls = TlsSettings()

    def on_end(self, span: ReadableSpan) -> None:
        """Queue a finished span; called wherever the span ends, never waits."""
        if span.context is None or not span.context.trace_flags.sampled:
            return
        if self._closed:
            DROPPED.labels("closed").inc()
            return
        self._waiting.append(span)
        self._trim()

    def start(self) -> None:
        """Begin to send; must be called inside the running loop. StartError when the TLS files are no good."""
        self._tls = TlsSettings.from_environ()
        tls_files(self._tls)
        self._task = asyncio.get_running_loop().create_task(self._run(), name="span-export")

    async def close(self, timeout_s: float) -> None:
        """Send what waits, for at most `timeout_s`; whatever is left is dropped and counted."""
        self._closing.set()
        task, self._task = self._task, None
        if task is not None:
            try:
                await asyncio.wait({task}, timeout=timeout_s)
            finally:
                task.cancel()
            await asyncio.wait({task})
        self._closed = True
        if self._waiting:
            DROPPED.labels("closed").inc(len(self._waiting))
            self._waiting.clear()

    async def _run(self) -> None:
        files = tls_files(self._tls)
        while True:
            pem = files.current()
            async with _channel(self._endpoint, self._tls, pem) as channel:
                stub = TraceServiceStub(channel)  # type: ignore[no-untyped-call]
                await self._send_until(stub, files, pem)
            if self._closing.is_set():
                return

    async def _send_until(self, stub: Any, files: TlsFiles, pem: TlsPem) -> None:
        """Send what comes, until closing, or until the certificate that the channel was made with has been renewed."""
        backoff = Backoff(first_s=self._settings.period_s, longest_s=self._settings.longest_backoff_s)
        pause_s = self._settings.period_s
        while await self._pause(pause_s) or self._waiting:
            sent = await self._send_all(stub)
            if self._closing.is_set() and not sent:
                return
            if files.current() is not pem and not self._closing.is_set():
                return
            if sent:
                backoff.reset()
            pause_s = self._settings.period_s if sent else backoff.next_s()

    async def _pause(self, seconds: float) -> bool:
        """Wait for the next turn; False when closing."""
        try:
            async with asyncio.timeout(seconds):
                await self._closing.wait()
        except TimeoutError:
            return True
        return False

    async def _send_all(self, stub: Any) -> bool:
        """Send all that waits now; False when telemetry could not take it."""
        for _ in range(1 + len(self._waiting) // self._settings.batch_spans):
            size = min(len(self._waiting), self._settings.batch_spans)
            batch = [self._waiting.popleft() for _ in range(size)]
            try:
                if batch and not await self._send(stub, batch):
                    return False
            except asyncio.CancelledError:
                DROPPED.labels("closed").inc(len(batch))
                raise
            except Exception:  # guard 2 of 3, the loop: one batch that cannot be encoded must not end all export
                DROPPED.labels("refused").inc(len(batch))
                log.exception("span_batch_failed", spans=len(batch))
        return True

    async def _send(self, stub: Any, batch: Sequence[ReadableSpan]) -> bool:
        request = await encode(batch)
        try:
            answer = await stub.Export(request, timeout=self._settings.deadline_s)
        except grpc.aio.AioRpcError as error:
            return self._failed(batch, error)
        if not self._reachable:
            self._reachable = True
            log.info("span_export_recovered", endpoint=self._endpoint)
        rejected = min(answer.partial_success.rejected_spans, len(batch))
        DROPPED.labels("refused").inc(rejected)
        EXPORTED.inc(len(batch) - rejected)
        return True

    def _failed(self, batch: Sequence[ReadableSpan], error: grpc.aio.AioRpcError) -> bool:
        """Keep the batch for later when that can help; True when there is nothing to wait for."""
        if self._reachable:
            self._reachable = False
            log.warning("span_export_failed", endpoint=self._endpoint, code=error.code().name, detail=error.details())
        if error.code() not in _LATER:
            DROPPED.labels("refused").inc(len(batch))
            return True
        self._waiting.extendleft(reversed(batch))
        self._trim()
        return False

    def _trim(self) -> None:
        dropped = 0
        while len(self._waiting) > self._settings.queue_spans:
            self._waiting.popleft()
            dropped += 1
        if dropped:
            DROPPED.labels("queue_full").inc(dropped)


def _channel(endpoint: str, tls: TlsSettings, pem: TlsPem) -> grpc.aio.Channel:
    """With TLS between services, the collector is one of them."""
    options = channel_options(_KEEPALIVE)
    if not tls.calls:
        return grpc.aio.insecure_channel(endpoint, options=options)
    credentials = grpc.ssl_channel_credentials(pem.ca or None, pem.key, pem.cert)
    name = ("grpc.ssl_target_name_override", tls.server_name)
    return grpc.aio.secure_channel(endpoint, credentials, options=[*options, name])


async def encode(batch: Sequence[ReadableSpan]) -> ExportTraceServiceRequest:
    """One request for the batch, giving the loop back between slices of it."""
    request = ExportTraceServiceRequest()
    for first in range(0, len(batch), _ENCODED_AT_ONCE):
        request.resource_spans.extend(encode_spans(batch[first : first + _ENCODED_AT_ONCE]).resource_spans)
        await asyncio.sleep(0)
    return request
