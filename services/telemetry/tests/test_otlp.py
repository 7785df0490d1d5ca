import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue, KeyValueList
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span

from headrace.telemetry.core.span import Status
from headrace.telemetry.otlp import MOST_ATTRIBUTE_CHARS, Malformed, read_spans

VALID = {
    "trace_id": b"t" * 16,
    "span_id": b"s" * 8,
    "name": "router.Place",
    "start_time_unix_nano": 1_000,
    "end_time_unix_nano": 3_000,
}


def request(*spans, **resource):
    attributes = [KeyValue(key=k.replace("_", "."), value=AnyValue(string_value=v)) for k, v in resource.items()]
    scope_spans = [ScopeSpans(spans=spans)]
    return ExportTraceServiceRequest(
        resource_spans=[ResourceSpans(resource=Resource(attributes=attributes), scope_spans=scope_spans)]
    )


def read(*spans, **resource):
    return list(read_spans(request(*spans, **resource)))


def attribute(key, **value):
    return KeyValue(key=key, value=AnyValue(**value))


def test_a_span_keeps_its_ids_times_service_and_request():
    attributes = [attribute("headrace.request_id", string_value="r-1")]
    [span] = read(Span(**VALID, parent_span_id=b"p" * 8, attributes=attributes), service_name="router")
    assert span.trace_id == (b"t" * 16).hex()
    assert span.span_id == (b"s" * 8).hex()
    assert span.parent_span_id == (b"p" * 8).hex()
    assert (span.service, span.name, span.request_id) == ("router", "router.Place", "r-1")
    assert (span.start_ns, span.end_ns, span.status) == (1_000, 3_000, Status.UNSET)


def test_attributes_of_every_kind_become_text():
    array = AnyValue(array_value=ArrayValue(values=[AnyValue(int_value=1), AnyValue(string_value="é")]))
    listed = AnyValue(kvlist_value=KeyValueList(values=[KeyValue(key="k", value=AnyValue(bool_value=True))]))
    [span] = read(
        Span(
            **VALID,
            attributes=[
                attribute("text", string_value="x"),
                attribute("flag", bool_value=False),
                attribute("count", int_value=-3),
                attribute("ratio", double_value=0.5),
                attribute("raw", bytes_value=b"\x01\xff"),
                KeyValue(key="array", value=array),
                KeyValue(key="map", value=listed),
                KeyValue(key="none"),
            ],
        )
    )
    assert span.attributes == {
        "text": "x",
        "flag": "false",
        "count": "-3",
        "ratio": "0.5",
        "raw": "01ff",
        "array": '[1, "é"]',
        "map": '{"k": true}',
        "none": "",
    }


def test_the_instance_and_the_text_of_a_failure_are_kept_as_attributes():
    failed = Span(**VALID)
    failed.status.code, failed.status.message = 2, "SATURATED"
    [span] = read(failed, service_instance_id="router-7")
    assert span.status is Status.ERROR
    assert span.attributes == {"service.instance.id": "router-7", "otel.status_description": "SATURATED"}


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ({"trace_id": b""}, "trace_id"),
        ({"trace_id": b"t" * 15}, "trace_id"),
        ({"trace_id": bytes(16)}, "trace_id"),
        ({"span_id": b"s" * 9}, "span_id"),
        ({"span_id": bytes(8)}, "span_id"),
        ({"parent_span_id": b"p"}, "parent_span_id"),
        ({"name": ""}, "name"),
        ({"start_time_unix_nano": 0}, "times"),
        ({"end_time_unix_nano": 999}, "times"),
        ({"end_time_unix_nano": 2**64 - 1}, "times"),
        ({"attributes": [attribute("a", string_value="x" * MOST_ATTRIBUTE_CHARS)]}, "attributes"),
    ],
)
def test_a_malformed_span_is_refused_alone_with_the_field_that_is_wrong(fault, named):
    before, refused, after = read(Span(**VALID), Span(**{**VALID, **fault}), Span(**VALID))
    assert isinstance(refused, Malformed)
    assert named in refused.why
    assert before.name == after.name == "router.Place"


@given(st.binary(max_size=200))
def test_no_message_that_parses_makes_reading_fail(data):
    message = ExportTraceServiceRequest()
    try:
        message.ParseFromString(data)
    except Exception:
        return
    list(read_spans(message))
