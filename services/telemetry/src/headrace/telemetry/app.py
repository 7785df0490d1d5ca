"""The telemetry process: wiring, start and end."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import DESCRIPTOR as OTLP_DESCRIPTOR
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import add_TraceServiceServicer_to_server

from headrace.api.telemetry.v1.telemetry_service_pb2 import DESCRIPTOR
from headrace.api.telemetry.v1.telemetry_service_pb2_grpc import add_TelemetryServiceServicer_to_server
from headrace.observe.log import get_logger
from headrace.observe.metrics import start_metrics_server
from headrace.rpc.server import Server, ServerSettings
from headrace.telemetry.ledger import LedgerStore
from headrace.telemetry.ledger_writer import LedgerWriter
from headrace.telemetry.servicer import TelemetryServicer, TraceIntake
from headrace.telemetry.settings import TelemetrySettings
from headrace.telemetry.store import SpanStore
from headrace.telemetry.writer import SpanWriter, WriterSettings

log = get_logger(__name__)

FULL_NAME = DESCRIPTOR.services_by_name["TelemetryService"].full_name
OTLP_NAME = OTLP_DESCRIPTOR.services_by_name["TraceService"].full_name

# A message may be 16 MiB, so this also bounds what arrives at once; more are told RESOURCE_EXHAUSTED.
_MOST_CALLS = 64


class TelemetryApp:
    """Needs its data folder and its port. Starts no tracing of its own, so its calls feed nothing back to it."""

    def __init__(self, settings: TelemetrySettings) -> None:
        self._settings = settings
        self.address = ""
        self._store: SpanStore | None = None
        self.writer: SpanWriter | None = None
        self._ledger: LedgerWriter | None = None
        self._server: Server | None = None
        # As many as the database uses cores for one query.
        self._readers = ThreadPoolExecutor(max_workers=2, thread_name_prefix="trace-reader")

    async def start(self) -> None:
        """Open the database, listen, and be healthy."""
        settings = self._settings
        if settings.metrics_address:
            log.info("metrics_served", address=start_metrics_server(settings.metrics_address))
        # Reading back a log after a crash takes time; a signal meanwhile must still be heard.
        self._store = await asyncio.to_thread(SpanStore.open, settings.data_dir, memory_mb=settings.memory_mb)
        self.writer = SpanWriter(self._store, _writer_settings(settings))
        ledger = await asyncio.to_thread(LedgerStore, self._store.database)
        self._ledger = LedgerWriter(
            ledger,
            usage_s=settings.usage_retention_days * 86_400,
            audit_s=settings.audit_retention_days * 86_400,
            trim_period_s=settings.retention_period_s,
        )
        server = Server(
            ServerSettings(address=settings.address, grace_s=settings.drain_s, most_calls=_MOST_CALLS),
            service_name="telemetry",
        )
        server.add(add_TraceServiceServicer_to_server, TraceIntake(self.writer), OTLP_NAME)
        servicer = TelemetryServicer(self._store, self._ledger, self._readers)
        server.add(add_TelemetryServiceServicer_to_server, servicer, FULL_NAME)
        self.address = await server.start()
        self._server = server
        self.writer.start()
        await server.set_serving(True)

    async def run(self) -> None:
        """Raise when a writer ends: without it nothing is kept."""
        if self.writer is None or self._ledger is None:
            raise RuntimeError("run before start")
        spans = asyncio.wrap_future(self.writer.ended)
        ledger = asyncio.ensure_future(self._ledger.run())
        try:
            done, _ = await asyncio.wait({spans, ledger}, return_when=asyncio.FIRST_COMPLETED)
            for ended in done:
                await ended
        finally:
            spans.cancel()
            ledger.cancel()
            await asyncio.wait({spans, ledger})

    async def drain(self) -> None:
        """Finish calls, write what waits, close the database; harmless after a start that failed."""
        if self._server:
            await self._server.drain()
        self._readers.shutdown(wait=False, cancel_futures=True)
        if self.writer:
            await asyncio.to_thread(self.writer.close, self._settings.drain_s)
        if self._ledger:
            await asyncio.to_thread(self._ledger.close)
        if self._store:
            await asyncio.to_thread(self._store.close)


def _writer_settings(settings: TelemetrySettings) -> WriterSettings:
    return WriterSettings(
        queue_spans=settings.queue_spans,
        flush_period_s=settings.flush_period_s,
        keep_spans=settings.retention_spans,
        keep_s=settings.retention_days * 86_400,
        trim_period_s=settings.retention_period_s,
    )
