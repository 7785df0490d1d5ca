"""Traces: spans made with OpenTelemetry, sent over OTLP from the running event loop.

The SDK's own gRPC exporter uses threads and synchronous gRPC, which hangs beside grpc.aio (grpc #22733); this one
is a bounded queue and one task. Nothing here blocks a request or raises into one: what cannot be sent is dropped
and counted in `headrace_spans_dropped_total`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context, attach, detach
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.sampling import DEFAULT_ON
from opentelemetry.trace import Span, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from headrace.observe.export import ExportSettings, SpanExport

AttributeValue = str | bool | int | float

_PROPAGATOR = TraceContextTextMapPropagator()
# A span with a long list of reasons must not fill a batch's message (16 MiB); usual spans are 0.2 kB.
_LIMITS = SpanLimits(
    max_span_attributes=64, max_events=16, max_links=16, max_span_attribute_length=2048, max_attribute_length=2048
)


class Tracing:
    """Span making and sending for one process: `start` inside the running loop, `shutdown` at the end.

    `endpoint` is telemetry's host:port; with None spans are made (so trace ids exist) and dropped at once. While
    started, it is what `get_tracer` and OpenTelemetry's own `trace.get_tracer` use; when several are started in one
    process, as in tests, the one started last.
    """

    def __init__(
        self, service: str, instance: str, endpoint: str | None, *, export: ExportSettings | None = None
    ) -> None:
        resource = Resource({"service.namespace": "headrace", "service.name": service, "service.instance.id": instance})
        provider = TracerProvider(sampler=DEFAULT_ON, resource=resource, span_limits=_LIMITS, shutdown_on_exit=False)
        self._export = SpanExport(endpoint, export or ExportSettings()) if endpoint else None
        if self._export is not None:
            provider.add_span_processor(self._export)
        self.tracer = provider.get_tracer("headrace")

    async def start(self) -> None:
        """Become the process's tracing and begin to send; never fails when telemetry is away."""
        if trace.get_tracer_provider() is not _PROVIDER:
            trace.set_tracer_provider(_PROVIDER)
        _started.append(self)
        if self._export is not None:
            self._export.start()

    async def shutdown(self, timeout_s: float = 2.0) -> None:
        """Send what is queued within `timeout_s`, then drop and count the rest. Safe to call twice."""
        if self in _started:
            _started.remove(self)
        if self._export is not None:
            await self._export.close(timeout_s)


def get_tracer() -> Tracer:
    """The process's tracer; may be kept from before `Tracing.start`."""
    return _TRACER


class current_span:  # a context manager, read like the functions beside it
    """A span that is the current one inside the block; an exception that leaves the block is its error.

    For coroutines, not for generators, which may be closed from another context. OpenTelemetry's own way takes two
    more context managers, each a generator.
    """

    __slots__ = ("_span", "_token")

    def __init__(self, name: str, attributes: Mapping[str, AttributeValue] | None = None) -> None:
        self._span = _TRACER.start_span(name, attributes=attributes)

    def __enter__(self) -> Span:
        self._token = attach(trace.set_span_in_context(self._span))
        return self._span

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        detach(self._token)
        if kind is not None and issubclass(kind, Exception):
            self._span.set_status(StatusCode.ERROR, kind.__name__)
        self._span.end()


def record_span(
    name: str,
    start_ns: int,
    end_ns: int,
    traceparent: str,
    attributes: Mapping[str, AttributeValue],
    status_error: str | None = None,
) -> str:
    """Record a span whose times (unix nanoseconds) are known afterwards; returns its own traceparent.

    It is a child of the span that `traceparent` names, or the root of a new trace when that is empty or malformed.
    """
    span = _TRACER.start_span(name, context=context_of(traceparent), attributes=dict(attributes), start_time=start_ns)
    if status_error is not None:
        span.set_status(StatusCode.ERROR, status_error)
    span.end(end_ns)
    return _traceparent(span)


def current_traceparent() -> str:
    """The W3C traceparent of the current span; "" when there is none."""
    return _traceparent(trace.get_current_span())


def context_of(traceparent: str) -> Context:
    """A context whose current span is the remote one that `traceparent` names; empty when it names none."""
    return _PROPAGATOR.extract({"traceparent": traceparent}, context=Context())


def _traceparent(span: Span) -> str:
    context = span.get_span_context()
    if not context.is_valid:
        return ""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


class _SwitchTracer(Tracer):
    """Delegates each span to the tracing started last; before any, spans have no recorder and no new ids."""

    def start_span(self, *args: Any, **kwargs: Any) -> Span:
        return _current().start_span(*args, **kwargs)

    def start_as_current_span(self, *args: Any, **kwargs: Any) -> Any:
        return _current().start_as_current_span(*args, **kwargs)


class _SwitchProvider(trace.TracerProvider):
    """OpenTelemetry's global provider can be set once per process; this one can be, and what is behind it changes."""

    def get_tracer(self, *_args: Any, **_kwargs: Any) -> Tracer:
        return _TRACER


def _current() -> Tracer:
    return _started[-1].tracer if _started else _IDLE


_started: list[Tracing] = []
_IDLE = trace.NoOpTracer()
_TRACER = _SwitchTracer()
_PROVIDER = _SwitchProvider()
