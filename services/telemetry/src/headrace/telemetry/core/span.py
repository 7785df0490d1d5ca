"""What a span is once it has passed the edge, and how spans become traces."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum


class Status(Enum):
    """How the work a span covers ended, by OpenTelemetry's names."""

    UNSET = "UNSET"
    OK = "OK"
    ERROR = "ERROR"


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One finished piece of work; ids are lower-case hex, times unix nanoseconds, attributes text."""

    trace_id: str
    span_id: str
    parent_span_id: str
    request_id: str
    service: str
    name: str
    start_ns: int
    end_ns: int
    status: Status
    attributes: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One trace in short; `request_id` is empty when no span names a request."""

    trace_id: str
    request_id: str
    root: str
    start_ns: int
    end_ns: int
    spans: int


def in_order(spans: Iterable[Span]) -> tuple[Span, ...]:
    """The spans sorted by start, each once: an exporter that timed out sends a batch again."""
    once = {span.span_id: span for span in spans}
    return tuple(sorted(once.values(), key=lambda span: (span.start_ns, -span.end_ns, span.span_id)))


def summarise(spans: Iterable[Span]) -> tuple[Summary, ...]:
    """One summary per trace, newest start first."""
    traces: dict[str, list[Span]] = {}
    for span in spans:
        traces.setdefault(span.trace_id, []).append(span)
    summaries = [_summary(in_order(trace)) for trace in traces.values()]
    return tuple(sorted(summaries, key=lambda summary: (-summary.start_ns, summary.trace_id)))


def _summary(spans: Sequence[Span]) -> Summary:
    return Summary(
        trace_id=spans[0].trace_id,
        request_id=next((span.request_id for span in spans if span.request_id), ""),
        root=_root(spans).name,
        start_ns=spans[0].start_ns,
        end_ns=max(span.end_ns for span in spans),
        spans=len(spans),
    )


def _root(spans: Sequence[Span]) -> Span:
    """The earliest span whose parent is not among them: a client's own span, for one, never arrives here."""
    present = {span.span_id for span in spans}
    return next((span for span in spans if span.parent_span_id not in present), spans[0])
