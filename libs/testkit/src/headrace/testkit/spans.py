"""A collector of spans in the test's own process: what engines say of each sequence, whatever is killed elsewhere."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as rpc
from opentelemetry.proto.common.v1.common_pb2 import KeyValue

from headrace.rpc.server import Server, ServerSettings

_FULL_NAME = "opentelemetry.proto.collector.trace.v1.TraceService"


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSpan:
    """One sequence, as its engine recorded it at its end."""

    engine_id: str
    request_id: str
    attempt: int
    tokens: int


class SpanCollector(rpc.TraceServiceServicer):
    """Keeps the spans of sequences, drops all others."""

    def __init__(self) -> None:
        self.address = ""
        self.sequences: list[SequenceSpan] = []

    async def Export(self, request: pb.ExportTraceServiceRequest, context: Any) -> pb.ExportTraceServiceResponse:
        """Take a batch."""
        for resource_spans in request.resource_spans:
            engine_id = _texts(resource_spans.resource.attributes).get("service.instance.id", "")
            for scope_spans in resource_spans.scope_spans:
                for span in scope_spans.spans:
                    if span.name == "engine.sequence":
                        self._keep(engine_id, _texts(span.attributes))
        return pb.ExportTraceServiceResponse()

    def _keep(self, engine_id: str, attributes: Mapping[str, str]) -> None:
        self.sequences.append(
            SequenceSpan(
                engine_id=engine_id,
                request_id=attributes["headrace.request_id"],
                attempt=int(attributes["headrace.attempt"]),
                tokens=int(attributes["gen_ai.usage.output_tokens"]),
            )
        )


@asynccontextmanager
async def span_collector() -> AsyncIterator[SpanCollector]:
    """One that listens while the block runs."""
    collector = SpanCollector()
    server = Server(ServerSettings(reflection=False), service_name="collector")
    server.add(rpc.add_TraceServiceServicer_to_server, collector, _FULL_NAME)
    collector.address = await server.start()
    try:
        yield collector
    finally:
        await server.drain(grace_s=0)


def _texts(attributes: Any) -> dict[str, str]:
    found: dict[str, str] = {}
    attribute: KeyValue
    for attribute in attributes:
        value = attribute.value
        found[attribute.key] = value.string_value or str(value.int_value)
    return found


__all__ = ["SequenceSpan", "SpanCollector", "span_collector"]
