"""What an operator can set."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.base.settings import knob


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetrySettings:
    """The settings of one telemetry process."""

    data_dir: str = knob(help="folder of the database, made when missing; one process at a time")
    address: str = knob("127.0.0.1:4317", help="host:port to take spans (OTLP) and answer questions on")
    metrics_address: str = knob("", help="host:port of the Prometheus endpoint; empty for none")
    retention_days: float = knob(7.0, help="spans that arrived longer ago are deleted", least=0.001)
    retention_spans: int = knob(1_000_000, help="only the newest so many spans are kept", least=1000)
    usage_retention_days: float = knob(400.0, help="usage recorded longer ago is deleted", least=0.001)
    audit_retention_days: float = knob(400.0, help="audit events recorded longer ago are deleted", least=0.001)
    retention_period_s: float = knob(60.0, help="seconds between deletions", least=0.1)
    queue_spans: int = knob(20_000, help="spans that may wait for the writer; more are refused and counted", least=1)
    flush_period_s: float = knob(0.5, help="seconds that spans are gathered for one write", least=0.001, most=2)
    memory_mb: int = knob(256, help="memory limit of the database engine in MB", least=64)
    drain_s: float = knob(5.0, help="seconds to finish calls and write what waits when asked to stop", least=0.1)
