"""What the ledger counts."""

from __future__ import annotations

from headrace.observe.metrics import counter, gauge, histogram

CLOSED = counter("headrace_gateway_ledger_closed_total", "Records finished by this process, by kind.", ("kind",))
RECOVERED = counter(
    "headrace_gateway_ledger_recovered_total", "Unfinished requests of an earlier life that became records."
)
DELIVERED = counter(
    "headrace_gateway_ledger_delivered_total", "Records that telemetry has on disk, by kind.", ("kind",)
)
LOST = counter(
    "headrace_gateway_ledger_lost_total",
    "Records that will never be delivered, by kind and reason.",
    ("kind", "reason"),
)
OFF_DISK = counter(
    "headrace_gateway_ledger_off_disk_total", "Requests and events that found no slot and were kept in memory only."
)
BACKLOG_RECORDS = gauge("headrace_gateway_ledger_backlog_records", "Records waiting for telemetry, by kind.", ("kind",))
BACKLOG_BYTES = gauge("headrace_gateway_ledger_backlog_bytes", "Their size, by kind.", ("kind",))
OLDEST_SECONDS = gauge(
    "headrace_gateway_ledger_oldest_seconds", "For how long the oldest record waits for telemetry; 0: none does."
)
STORE_SECONDS = histogram("headrace_gateway_ledger_store_seconds", "Time of one group commit to the spool, seconds.")
