"""The edge for spans: OTLP messages become domain spans, or are refused one by one with a reason."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1 import trace_pb2

from headrace.telemetry.core.span import Span, Status

MOST_ATTRIBUTE_CHARS = 65_536
"""Names and values of one span together; with the queue's bound this bounds memory."""

_LAST_NS = 2**63 - 1
_STATUS = {
    trace_pb2.Status.STATUS_CODE_UNSET: Status.UNSET,
    trace_pb2.Status.STATUS_CODE_OK: Status.OK,
    trace_pb2.Status.STATUS_CODE_ERROR: Status.ERROR,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Malformed:
    """A span that cannot be kept, and why."""

    why: str


def read_spans(request: ExportTraceServiceRequest) -> Iterator[Span | Malformed]:
    """Each span of the request, in its order."""
    for resource_spans in request.resource_spans:
        resource = _texts(resource_spans.resource.attributes)
        for scope_spans in resource_spans.scope_spans:
            for span in scope_spans.spans:
                yield _read_span(span, resource)


def _read_span(span: trace_pb2.Span, resource: Mapping[str, str]) -> Span | Malformed:
    why = _fault(span)
    if why:
        return Malformed(why=why)
    attributes = _texts(span.attributes)
    if "service.instance.id" in resource:
        attributes.setdefault("service.instance.id", resource["service.instance.id"])
    if span.status.message:
        attributes.setdefault("otel.status_description", span.status.message)
    if sum(len(name) + len(text) for name, text in attributes.items()) > MOST_ATTRIBUTE_CHARS:
        return Malformed(why=f"attributes are longer than {MOST_ATTRIBUTE_CHARS} characters")
    return Span(
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_span_id=span.parent_span_id.hex(),
        request_id=attributes.get("headrace.request_id", ""),
        service=resource.get("service.name", "unknown_service"),
        name=span.name,
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        status=_STATUS.get(span.status.code, Status.UNSET),
        attributes=attributes,
    )


def _fault(span: trace_pb2.Span) -> str:
    """Why the span cannot be kept; empty when it can."""
    if len(span.trace_id) != 16 or not any(span.trace_id):
        return "trace_id is not 16 bytes with one that is not zero"
    if len(span.span_id) != 8 or not any(span.span_id):
        return "span_id is not 8 bytes with one that is not zero"
    if len(span.parent_span_id) not in (0, 8):
        return "parent_span_id is neither empty nor 8 bytes"
    if not span.name:
        return "name is empty"
    if not 0 < span.start_time_unix_nano <= span.end_time_unix_nano <= _LAST_NS:
        return "times are missing, out of range, or end before they start"
    return ""


def _texts(attributes: Iterable[KeyValue]) -> dict[str, str]:
    return {attribute.key: _text(attribute.value) for attribute in attributes}


def _text(value: AnyValue) -> str:
    plain = _plain(value)
    return plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False)


def _plain(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_plain(item) for item in value.array_value.values]
    if kind == "kvlist_value":
        return {item.key: _plain(item.value) for item in value.kvlist_value.values}
    if kind == "bytes_value":
        return value.bytes_value.hex()
    return "" if kind is None else getattr(value, kind)
