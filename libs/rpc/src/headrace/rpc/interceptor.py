"""The server interceptor: context, trace, metrics and error status around every handler."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from contextlib import contextmanager
from typing import Any

import grpc
import structlog
from grpc.aio import ServerInterceptor, ServicerContext
from grpc_status import rpc_status
from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from prometheus_client import Counter, Gauge, Histogram

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
# Probes and the telemetry feed itself would drown or feed back into the traces; Attach lives for hours.
_UNTRACED = ("/grpc.health.", "/grpc.reflection.", "/opentelemetry.")
_UNTRACED_METHODS = ("Attach",)

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
        self._default_deadline_s = default_deadline_s
        self._stalled_reader_s = stalled_reader_s
        self._tracer = trace.get_tracer("headrace.rpc")
        self.in_flight = 0
        self.refusing = False

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Return the method's handler with the house's behaviour around it."""
        handler = await continuation(handler_call_details)
        path = handler_call_details.method
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
        return make(wrapped, handler.request_deserializer, handler.response_serializer)

    def _unary(self, path: str, inner: Any) -> Callable[..., Awaitable[Any]]:
        async def handle(request: Any, context: ServicerContext[Any, Any]) -> Any:
            with self._call(path, context) as record:
                try:
                    record.raise_if_refused()
                    return await inner(request, context)
                except Exception as error:
                    failure = self._domain_error(error, context, record)
            await _abort(context, failure, record.request_id)

        return handle

    def _streaming(self, path: str, inner: Any) -> Callable[..., Awaitable[None]]:
        # A coroutine that writes, not a generator: only so can a write have an end.
        async def handle(request: Any, context: ServicerContext[Any, Any]) -> None:
            with self._call(path, context) as record:
                messages = inner(request, context)
                failure: HeadraceError | None = None
                try:
                    record.raise_if_refused()
                    async for message in messages:
                        await self._write(context, message)
                except Exception as error:
                    failure = self._domain_error(error, context, record)
                finally:
                    close = getattr(messages, "aclose", None)
                    if close is not None:
                        await close()
            if failure is not None:
                await _abort(context, failure, record.request_id)

        return handle

    async def _write(self, context: ServicerContext[Any, Any], message: Any) -> None:
        """Returns once the transport has taken the message: at once, or when the client has read enough of others."""
        try:
            async with asyncio.timeout(self._stalled_reader_s):
                await context.write(message)
        except TimeoutError:
            raise ReaderStalled(f"nothing of this stream was read for {self._stalled_reader_s:g} s") from None

    @contextmanager
    def _call(self, path: str, context: ServicerContext[Any, Any]) -> Any:
        method = path.rsplit("/", 1)[-1]
        metadata = {str(k): v for k, v in context.invocation_metadata() or () if isinstance(v, str)}
        record = _Record(metadata)
        if self.refusing:
            record.refused = Unavailable("this server is draining", reason="DRAINING", retry_after_s=0.5)
        elif self._peer_names is not None:
            record.refused = self._peer_names.refusal(context)
        self.in_flight += 1
        IN_FLIGHT.labels(self._service, method).inc()
        started = time.perf_counter()
        try:
            if path.startswith(_UNTRACED) or method in _UNTRACED_METHODS:
                enter_call(self._context(record, context))
                yield record
            else:
                parent = _PROPAGATOR.extract(metadata)
                with self._tracer.start_as_current_span(
                    f"{self._service}.{method}",
                    context=parent,
                    kind=trace.SpanKind.SERVER,
                    record_exception=False,
                    set_status_on_exception=False,
                ) as span:
                    span.set_attribute("headrace.request_id", record.request_id)
                    enter_call(self._context(record, context))
                    yield record
                    _finish_span(span, record)
        except BaseException:  # cancelled by the client or its deadline: not an error of ours, but an outcome
            record.code = "CANCELLED"
            raise
        finally:
            self.in_flight -= 1
            IN_FLIGHT.labels(self._service, method).dec()
            SECONDS.labels(self._service, method).observe(time.perf_counter() - started)
            CALLS.labels(self._service, method, record.code, record.reason).inc()

    def _context(self, record: _Record, context: ServicerContext[Any, Any]) -> CallContext:
        left = context.time_remaining()
        # No deadline, or one of weeks, which nobody means: it gets ours, so that nothing waits for ever.
        unlimited = left is None or math.isinf(left) or left > 10**6
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier)
        return CallContext(
            request_id=record.request_id,
            deadline=Deadline.after(self._default_deadline_s if unlimited or left is None else left),
            peer=context.peer(),
            metadata=record.metadata,
            traceparent=carrier.get("traceparent", ""),
        )

    def _domain_error(self, error: Exception, context: ServicerContext[Any, Any], record: _Record) -> HeadraceError:
        """Guard 1 of 3: whatever a handler raises becomes a domain error; a bug is logged with its trace."""
        if not isinstance(error, HeadraceError):
            log.error("handler_failed", service=self._service, request=record.request_id, exc_info=error)
            error = InternalError(f"internal error; quote request id {record.request_id}")
        record.code, record.reason = error.code.value, error.reason
        return error


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


def _finish_span(span: trace.Span, record: _Record) -> None:
    if record.code != "OK":
        span.set_attribute("error.type", record.reason)
        span.set_status(trace.StatusCode.ERROR, record.reason)


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
