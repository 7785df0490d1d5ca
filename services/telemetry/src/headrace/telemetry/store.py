"""Spans in the database."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from headrace.telemetry.core.span import Span, Status
from headrace.telemetry.database import FILE_NAME, Database

__all__ = ["FILE_NAME", "MOST_SPANS_PER_TRACE", "SpanStore"]

MOST_SPANS_PER_TRACE = 10_000
"""More would not fit one answer (16 MiB); the earliest are shown."""

# `seq` orders by arrival, which is also how retention deletes. No index: among a million spans (140 MB) one
# trace is found by scanning in 30 ms and the newest are listed in 120 (measured, 2 cores); it would cost every write.
_SCHEMA = """
CREATE TABLE IF NOT EXISTS spans (
    seq BIGINT, received_ns BIGINT, trace_id VARCHAR, span_id VARCHAR, parent_span_id VARCHAR, request_id VARCHAR,
    service VARCHAR, name VARCHAR, start_ns BIGINT, end_ns BIGINT, status VARCHAR, attributes VARCHAR
);
"""
_TYPES = ["BIGINT"] * 2 + ["VARCHAR"] * 6 + ["BIGINT"] * 2 + ["VARCHAR"] * 2
# Columns as list parameters: 6 to 20 µs a span, where executemany takes 780 (measured).
_INSERT = f"INSERT INTO spans SELECT {', '.join(f'unnest(?::{kind}[])' for kind in _TYPES)}"
_READ = "trace_id, span_id, parent_span_id, request_id, service, name, start_ns, end_ns, status"
_TRACE = f"SELECT {_READ}, attributes FROM spans WHERE trace_id = ? ORDER BY start_ns LIMIT {MOST_SPANS_PER_TRACE}"
_BY_REQUEST = "SELECT trace_id FROM spans WHERE request_id = ? ORDER BY seq DESC LIMIT 1"
_NEWEST = f"""
WITH newest AS (SELECT trace_id FROM spans GROUP BY trace_id ORDER BY min(start_ns) DESC LIMIT ?)
SELECT {_READ}, '{{}}' FROM spans SEMI JOIN newest USING (trace_id)
"""
_TRIM = "DELETE FROM spans WHERE seq <= ? OR received_ns < ?"


class SpanStore:
    """The table of spans; `append` and `trim` belong to one writer, the reading methods to any thread.

    A committed batch survives kill -9. Methods raise `duckdb.Error`.
    """

    def __init__(self, database: Database) -> None:
        self.database = database
        database.create(_SCHEMA)
        row = database.connection.execute("SELECT coalesce(max(seq), 0) FROM spans").fetchone()
        self._seq: int = row[0] if row else 0

    @classmethod
    def open(cls, data_dir: str, *, memory_mb: int = 256) -> SpanStore:
        """Open or create the file in `data_dir`; StartError as for `Database.open`."""
        return cls(Database.open(data_dir, memory_mb=memory_mb))

    def append(self, spans: Sequence[Span]) -> None:
        """Write one batch in one transaction; it is on disk when this returns."""
        first, now = self._seq + 1, time.time_ns()
        columns: list[list[Any]] = [
            list(range(first, first + len(spans))),
            [now] * len(spans),
            [span.trace_id for span in spans],
            [span.span_id for span in spans],
            [span.parent_span_id for span in spans],
            [span.request_id for span in spans],
            [span.service for span in spans],
            [span.name for span in spans],
            [span.start_ns for span in spans],
            [span.end_ns for span in spans],
            [span.status.value for span in spans],
            [json.dumps(dict(span.attributes)) for span in spans],
        ]
        with self.database.writing:
            self.database.connection.execute(_INSERT, columns)
        self._seq += len(spans)

    def trim(self, *, keep_spans: int, keep_s: float) -> int:
        """Delete all but the newest `keep_spans` and what arrived over `keep_s` seconds ago; returns how many went."""
        oldest_ns = time.time_ns() - int(keep_s * 1e9)
        with self.database.writing:
            row = self.database.connection.execute(_TRIM, [self._seq - keep_spans, oldest_ns]).fetchone()
            deleted = int(row[0]) if row else 0
            if deleted:
                # Deleted space is used again only after a checkpoint: 30 ms to 1 s for a million spans (measured).
                self.database.connection.execute("CHECKPOINT")
        return deleted

    def trace(self, trace_id: str) -> list[Span]:
        """The spans of a trace, duplicates included; empty when none has arrived."""
        return [_span(row) for row in self.database.read(_TRACE, trace_id)]

    def trace_of_request(self, request_id: str) -> list[Span]:
        """The spans of the trace that last named this request; empty when none has."""
        rows = self.database.read(_BY_REQUEST, request_id)
        return self.trace(rows[0][0]) if rows else []

    def newest(self, limit: int) -> list[Span]:
        """All spans of the `limit` traces that started last, without attributes."""
        return [_span(row) for row in self.database.read(_NEWEST, limit)]

    def close(self) -> None:
        """Close the database."""
        self.database.close()


def _span(row: Sequence[Any]) -> Span:
    return Span(
        trace_id=row[0],
        span_id=row[1],
        parent_span_id=row[2],
        request_id=row[3],
        service=row[4],
        name=row[5],
        start_ns=row[6],
        end_ns=row[7],
        status=Status(row[8]),
        attributes=json.loads(row[9]),
    )
