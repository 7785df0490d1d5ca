"""The server interceptor: context, trace, metrics and error status around every handler."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Any

import grpc
import structlog
from grpc.aio import ServerInterceptor, ServicerContext
from grpc_status import rpc_status
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from prometheus_client import Counter, Gauge, Histogram

from headrace.base.alarm import Alarm
from headrace.base.deadline import Deadline
from headrace.base.errors import HeadraceError, InternalError, ReaderStalled, Unavailable
from headrace.rpc.context import REQUEST_ID, CallContext, enter_call
from headrace.rpc.ids import is_request_id, new_request_id
from headrace.rpc.status import to_status
from headrace.rpc.tls import PeerNames

log = structlog.get_logger(__name__)

CALLS = Counter("headrace_rpc_server_calls_total", "Calls served, by outcome.", ("service", "method", "code", "reason"))
SECONDS = Histogram(
    "headrace_rpc_server_seconds",
    "Time from a call's arrival to its end, in seconds.",
    ("service", "method"),
    buckets=(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
)
IN_FLIGHT = Gauge("headrace_rpc_server_in_flight", "Calls being served now.", ("service", "method"))

_PROPAGATOR = TraceContextTextMapPropagator()
# Probes and the telemetry feed itself would drown or feed back into the traces; Attach lives for hours; a booking that
# is given back tells nothing that the request's own spans do not.
_UNTRACED = ("/grpc.health.", "/grpc.reflection.", "/opentelemetry.")
_UNTRACED_METHODS = ("Attach", "RecordAudit", "RecordUsage", "Release")

_HAND_OVER_S = 0.1


class CallInterceptor(ServerInterceptor):
    """Wrap each handler once.

    `in_flight` counts calls of traced and untraced methods except probes; while `refusing` is set, new ones are
    refused as DRAINING, or a steady stream of them would use up the whole grace of a drain.
    """

    def __init__(
        self,
        service_name: str,
        *,
        default_deadline_s: float,
        stalled_reader_s: float,
        peer_names: PeerNames | None = None,
    ) -> None:
        self._service = service_name
        self._peer_names = peer_names
        self.default_deadline_s = default_deadline_s
        self._stalled_reader_s = stalled_reader_s
        self.tracer = trace.get_tracer("headrace.rpc")
        self._wrapped: dict[str, Any] = {}
        self.in_flight = 0
        self.refusing = False

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Return the method's handler with the house's behaviour around it; made at the method's first call."""
        path = handler_call_details.method
        known = self._wrapped.get(path)
        if known is not None:
            return known
        handler = await continuation(handler_call_details)
        if handler is None or path.startswith(("/grpc.health.", "/grpc.reflection.")):
            return handler
        if handler.response_streaming:
            inner = handler.stream_stream if handler.request_streaming else handler.unary_stream
            make = (
                grpc.stream_stream_rpc_method_handler
                if handler.request_streaming
                else grpc.unary_stream_rpc_method_handler
            )
            wrapped: Any = self._streaming(path, inner)
        else:
            inner = handler.stream_unary if handler.request_streaming else handler.unary_unary
            make = (
                grpc.stream_unary_rpc_method_handler
                if handler.request_streaming
                else grpc.unary_unary_rpc_method_handler
            )
            wrapped = self._unary(path, inner)
        self._wrapped[path] = make(wrapped, handler.request_deserializer, handler.response_serializer)
        return self._wrapped[path]

    def _unary(self, path: str, inner: Any) -> Callable[..., Awaitable[Any]]:
        method = _Method(self._service, path)

        async def handle(request: Any, context: ServicerContext[Any, Any]) -> Any:
            with _Call(self, method, context) as record:
                try:
                    record.raise_if_refused()
                    return await inner(request, context)
                except Exception as error:
                    failure = self._domain_error(error, context, record)
            await _abort(context, failure, record.request_id)

        return handle

    def _streaming(self, path: str, inner: Any) -> Callable[..., Awaitable[None]]:
        method = _Method(self._service, path)

        # A coroutine that writes, not a generator: only so can a write have an end.
        async def handle(request: Any, context: ServicerContext[Any, Any]) -> None:
            with _Call(self, method, context) as record:
                messages = inner(request, context)
                failure: HeadraceError | None = None
                try:
                    record.raise_if_refused()
                    await self._write(context, messages)
                except Exception as error:
                    failure = self._domain_error(error, context, record)
                finally:
                    close = getattr(messages, "aclose", None)
                    if close is not None:
                        await close()
            if failure is not None:
                await _abort(context, failure, record.request_id)

        return handle

    async def _write(self, context: ServicerContext[Any, Any], messages: AsyncIterator[Any]) -> None:
        """Each write returns once the transport has taken it: at once, or when the client has read enough of others."""
        alarm = Alarm()
        try:
            async with asyncio.timeout(None) as patience:
                async for message in messages:
                    alarm.set(self._stalled_reader_s, lambda: patience.reschedule(0))
                    await context.write(message)
                    alarm.stop()
        except TimeoutError:
            if not patience.expired():
                raise
            raise ReaderStalled(f"nothing of this stream was read for {self._stalled_reader_s:g} s") from None
        finally:
            alarm.close()

    def refusal(self, context: ServicerContext[Any, Any]) -> HeadraceError | None:
        """Why a call that begins now is refused, if it is."""
        if self.refusing:
            return Unavailable("this server is draining", reason="DRAINING", retry_after_s=0.5)
        return self._peer_names.refusal(context) if self._peer_names is not None else None

    def _domain_error(self, error: Exception, context: ServicerContext[Any, Any], record: _Record) -> HeadraceError:
        """Guard 1 of 3: whatever a handler raises becomes a domain error; a bug is logged with its trace."""
        if not isinstance(error, HeadraceError):
            log.error("handler_failed", service=self._service, request=record.request_id, exc_info=error)
            error = InternalError(f"internal error; quote request id {record.request_id}")
        record.code, record.reason = error.code.value, error.reason
        return error


class _Call:
    """One call's account, from its beginning to its end: counted, timed, traced, and current in its task.

    A class: two generators as context managers took as long as all that they did.
    """

    __slots__ = ("_context", "_interceptor", "_method", "_record", "_span", "_started", "_token")

    def __init__(self, interceptor: CallInterceptor, method: _Method, context: ServicerContext[Any, Any]) -> None:
        self._interceptor = interceptor
        self._method = method
        self._context = context
        self._span: trace.Span | None = None

    def __enter__(self) -> _Record:
        interceptor, method, context = self._interceptor, self._method, self._context
        metadata = {str(k): v for k, v in context.invocation_metadata() or () if isinstance(v, str)}
        self._record = record = _Record(metadata)
        record.refused = interceptor.refusal(context)
        interceptor.in_flight += 1
        method.in_flight.inc()
        self._started = time.perf_counter()
        if method.traced:
            # OpenTelemetry's own way to make a span the current one takes three more context managers.
            parent = _PROPAGATOR.extract(metadata) if "traceparent" in metadata else Context()
            span = interceptor.tracer.start_span(method.span_name, context=parent, kind=trace.SpanKind.SERVER)
            span.set_attribute("headrace.request_id", record.request_id)
            self._span, self._token = span, otel_context.attach(trace.set_span_in_context(span))
        _enter(record, context, interceptor.default_deadline_s)
        return record

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        record, method, span = self._record, self._method, self._span
        if kind is not None:  # cancelled by the client or its deadline: not an error of ours, but an outcome
            record.code = "CANCELLED"
        if span is not None:
            if kind is None and record.code != "OK":
                span.set_attribute("error.type", record.reason)
                span.set_status(trace.StatusCode.ERROR, record.reason)
            otel_context.detach(self._token)
            span.end()
        self._interceptor.in_flight -= 1
        method.in_flight.dec()
        method.seconds.observe(time.perf_counter() - self._started)
        method.ended(record.code, record.reason).inc()


class _Method:
    """What is the same for all calls of a method, its metrics looked up once."""

    __slots__ = ("_ended", "_names", "in_flight", "seconds", "span_name", "traced")

    def __init__(self, service: str, path: str) -> None:
        name = path.rsplit("/", 1)[-1]
        self.span_name = f"{service}.{name}"
        self.traced = not path.startswith(_UNTRACED) and name not in _UNTRACED_METHODS
        self._names = service, name
        self.in_flight = IN_FLIGHT.labels(service, name)
        self.seconds = SECONDS.labels(service, name)
        self._ended: dict[tuple[str, str], Any] = {}

    def ended(self, code: str, reason: str) -> Any:
        """The counter of calls that ended so; reasons are few, and never the caller's."""
        known = self._ended.get((code, reason))
        if known is None:
            known = self._ended[code, reason] = CALLS.labels(*self._names, code, reason)
        return known


class _Record:
    """The outcome of one call, filled in on its way."""

    __slots__ = ("code", "metadata", "reason", "refused", "request_id")

    def __init__(self, metadata: dict[str, str]) -> None:
        given = metadata.get(REQUEST_ID, "")
        self.request_id = given if is_request_id(given) else new_request_id()
        self.metadata = metadata
        self.code = "OK"
        self.reason = ""
        self.refused: HeadraceError | None = None

    def raise_if_refused(self) -> None:
        """Refuse a call that came too late, with the account of it kept like any other's."""
        if self.refused is not None:
            raise self.refused


def _enter(record: _Record, context: ServicerContext[Any, Any], default_s: float) -> None:
    left = context.time_remaining()
    # No deadline, or one of weeks, which nobody means: it gets ours, so that nothing waits for ever.
    unlimited = left is None or math.isinf(left) or left > 10**6
    enter_call(
        CallContext(
            request_id=record.request_id,
            deadline=Deadline.after(default_s if unlimited or left is None else left),
            peer=context.peer(),
            metadata=record.metadata,
        )
    )


async def _abort(context: ServicerContext[Any, Any], error: HeadraceError, request_id: str) -> None:
    status = rpc_status.to_status(to_status(error, request_id=request_id))
    if not isinstance(error, ReaderStalled):
        await context.abort_with_status(status)
    # The status stands behind messages that nobody reads: it is handed to the transport, which keeps it for a client
    # that wakes up, and nobody waits for its leaving.
    try:
        async with asyncio.timeout(_HAND_OVER_S):
            await context.abort_with_status(status)
    except TimeoutError:
        pass
