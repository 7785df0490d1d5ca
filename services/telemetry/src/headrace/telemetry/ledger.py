"""Usage and audit in the database: each fact once, however often it is sent."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import duckdb

from headrace.telemetry.core.facts import (
    AuditFact,
    Standing,
    Sum,
    Usage,
    UsageAttempt,
    UsageKey,
    once_each,
    standing,
    supersedes,
)
from headrace.telemetry.database import Database

# No index: the one writer looks for what it knows already among the rows admitted in the same span of time, which the
# tables' min/max per row group find. An index would be kept in memory, and grow with every request there ever was.
_SCHEMA = """
CREATE TABLE IF NOT EXISTS usage (
    recorded_ns BIGINT, request_id VARCHAR, gateway_id VARCHAR, admitted_ns BIGINT, ended_ns BIGINT, tenant VARCHAR,
    credential VARCHAR, model VARCHAR, bundle_digest VARCHAR, prompt_tokens BIGINT, cached_tokens BIGINT,
    output_tokens BIGINT, outcome VARCHAR, recovered BOOLEAN, attempts VARCHAR
);
CREATE TABLE IF NOT EXISTS audit (
    recorded_ns BIGINT, event_id VARCHAR, at_ns BIGINT, service VARCHAR, tenant VARCHAR, credential VARCHAR,
    request_id VARCHAR, subject VARCHAR, decision VARCHAR, reason VARCHAR, facts VARCHAR
);
"""


def _insert(table: str, types: Sequence[str]) -> str:
    return f"INSERT INTO {table} SELECT {', '.join(f'unnest(?::{kind}[])' for kind in types)}"


_TEXT, _INT = "VARCHAR", "BIGINT"
_ADD_USAGE = _insert("usage", [_INT, _TEXT, _TEXT, _INT, _INT, *[_TEXT] * 4, *[_INT] * 3, _TEXT, "BOOLEAN", _TEXT])
_ADD_AUDIT = _insert("audit", [_INT, _TEXT, _INT, *[_TEXT] * 8])
_KNOWN_USAGE = """
SELECT request_id, gateway_id, admitted_ns, recovered, output_tokens FROM usage
WHERE admitted_ns BETWEEN ? AND ? AND request_id IN (SELECT unnest(?::VARCHAR[]))
"""
_KNOWN_AUDIT = """
SELECT event_id FROM audit WHERE at_ns BETWEEN ? AND ? AND event_id IN (SELECT unnest(?::VARCHAR[]))
"""
_FORGET_USAGE = "DELETE FROM usage WHERE request_id = ? AND gateway_id = ? AND admitted_ns = ?"
_OF_TENANT = "(? = '' OR tenant = ?)"
_SUMS = f"""
SELECT tenant, model, bundle_digest, count(*), sum(prompt_tokens)::BIGINT, sum(cached_tokens)::BIGINT,
       sum(output_tokens)::BIGINT
FROM usage WHERE {_OF_TENANT} AND ended_ns >= ? AND ended_ns < ? GROUP BY ALL ORDER BY ALL
"""
_USAGE = (
    "request_id, gateway_id, admitted_ns, ended_ns, tenant, credential, model, bundle_digest, prompt_tokens, "
    "cached_tokens, output_tokens, outcome, recovered, attempts"
)
_NEWEST_USAGE = f"""
SELECT {_USAGE} FROM usage WHERE {_OF_TENANT} AND ended_ns >= ? AND ended_ns < ? ORDER BY ended_ns DESC LIMIT ?
"""
_ONE_USAGE = f"SELECT {_USAGE} FROM usage WHERE {_OF_TENANT} AND request_id = ? ORDER BY ended_ns DESC LIMIT 1000"
_NEWEST_AUDIT = f"""
SELECT event_id, at_ns, service, tenant, credential, request_id, subject, decision, reason, facts FROM audit
WHERE {_OF_TENANT} AND (? = '' OR request_id = ?) ORDER BY at_ns DESC LIMIT ?
"""
_TRIM = ("DELETE FROM usage WHERE recorded_ns < ?", "DELETE FROM audit WHERE recorded_ns < ?")


class LedgerStore:
    """The tables of usage and audit. `add_…` and `trim` wait for other writers; reading methods are for any thread.

    What an `add_…` has returned for is on disk. Methods raise `duckdb.Error`.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        database.create(_SCHEMA)

    def add_usage(self, records: Sequence[Usage]) -> int:
        """Keep one record of each request, by `supersedes`; returns how many requests were new."""
        wanted = once_each(records)
        if not wanted:
            return 0
        with self._database.writing:
            known = self._known_usage(wanted)
            new = [record for key, record in wanted.items() if key not in known]
            better = [r for key, r in wanted.items() if key in known and supersedes(standing(r), known[key])]
            if new or better:
                self._write_usage(better, [*new, *better])
        return len(new)

    def add_audit(self, events: Sequence[AuditFact]) -> int:
        """Keep each event once; returns how many were new."""
        wanted = {event.event_id: event for event in reversed(events)}
        if not wanted:
            return 0
        times = [event.at_ns for event in wanted.values()]
        with self._database.writing:
            execute = self._database.connection.execute
            known = {row[0] for row in execute(_KNOWN_AUDIT, [min(times), max(times), list(wanted)]).fetchall()}
            new = [event for event in wanted.values() if event.event_id not in known]
            if new:
                execute(_ADD_AUDIT, _audit_columns(new))
        return len(new)

    def sums(self, tenant: str, since_ns: int, until_ns: int) -> list[Sum]:
        """Usage of requests that ended in [since, until), by tenant, model and bundle; all tenants for ""."""
        rows = self._database.read(_SUMS, tenant, tenant, since_ns, until_ns)
        names = ("tenant", "model", "bundle_digest", "requests", "prompt_tokens", "cached_tokens", "output_tokens")
        return [Sum(**dict(zip(names, row, strict=True))) for row in rows]

    def newest_usage(self, tenant: str, since_ns: int, until_ns: int, limit: int) -> list[Usage]:
        """The records that ended last in [since, until), newest first."""
        return [_usage(row) for row in self._database.read(_NEWEST_USAGE, tenant, tenant, since_ns, until_ns, limit)]

    def usage_of(self, tenant: str, request_id: str) -> list[Usage]:
        """The record of a request; several when a client used its id again."""
        return [_usage(row) for row in self._database.read(_ONE_USAGE, tenant, tenant, request_id)]

    def newest_audit(self, tenant: str, request_id: str, limit: int) -> list[AuditFact]:
        """The newest events, of a tenant and a request unless these are ""."""
        rows = self._database.read(_NEWEST_AUDIT, tenant, tenant, request_id, request_id, limit)
        return [_audit(row) for row in rows]

    def trim(self, *, usage_s: float, audit_s: float) -> int:
        """Delete what was recorded longer ago; returns how many rows went."""
        deleted = 0
        with self._database.writing:
            for query, keep_s in zip(_TRIM, (usage_s, audit_s), strict=True):
                row = self._database.connection.execute(query, [time.time_ns() - int(keep_s * 1e9)]).fetchone()
                deleted += int(row[0]) if row else 0
        return deleted

    def _known_usage(self, wanted: dict[UsageKey, Usage]) -> dict[UsageKey, Standing]:
        times = [record.admitted_ns for record in wanted.values()]
        ids = [record.request_id for record in wanted.values()]
        rows = self._database.connection.execute(_KNOWN_USAGE, [min(times), max(times), ids]).fetchall()
        return {(row[0], row[1], row[2]): Standing(row[3], row[4]) for row in rows}

    def _write_usage(self, replaced: Iterable[Usage], written: Sequence[Usage]) -> None:
        connection = self._database.connection
        connection.begin()
        try:
            for record in replaced:
                connection.execute(_FORGET_USAGE, list(record.key))
            connection.execute(_ADD_USAGE, _usage_columns(written))
            connection.commit()
        except duckdb.Error:
            _roll_back(connection)
            raise


def _roll_back(connection: duckdb.DuckDBPyConnection) -> None:
    """End the transaction; a commit that failed has ended it already."""
    try:
        connection.rollback()
    except duckdb.TransactionException:
        pass


def _usage_columns(records: Sequence[Usage]) -> list[list[Any]]:
    now = time.time_ns()
    rows = [
        (
            now,
            record.request_id,
            record.gateway_id,
            record.admitted_ns,
            record.ended_ns,
            record.tenant,
            record.credential,
            record.model,
            record.bundle_digest,
            record.prompt_tokens,
            record.cached_tokens,
            record.output_tokens,
            record.outcome,
            record.recovered,
            json.dumps([asdict(attempt) for attempt in record.attempts]),
        )
        for record in records
    ]
    return [list(column) for column in zip(*rows, strict=True)]


def _audit_columns(events: Sequence[AuditFact]) -> list[list[Any]]:
    now = time.time_ns()
    rows = [
        (
            now,
            event.event_id,
            event.at_ns,
            event.service,
            event.tenant,
            event.credential,
            event.request_id,
            event.subject,
            event.decision,
            event.reason,
            json.dumps(dict(event.facts)),
        )
        for event in events
    ]
    return [list(column) for column in zip(*rows, strict=True)]


def _usage(row: Sequence[Any]) -> Usage:
    return Usage(
        request_id=row[0],
        gateway_id=row[1],
        admitted_ns=row[2],
        ended_ns=row[3],
        tenant=row[4],
        credential=row[5],
        model=row[6],
        bundle_digest=row[7],
        prompt_tokens=row[8],
        cached_tokens=row[9],
        output_tokens=row[10],
        outcome=row[11],
        recovered=row[12],
        attempts=tuple(UsageAttempt(**attempt) for attempt in json.loads(row[13])),
    )


def _audit(row: Sequence[Any]) -> AuditFact:
    names = ("event_id", "at_ns", "service", "tenant", "credential", "request_id", "subject", "decision", "reason")
    return AuditFact(**dict(zip(names, row[:9], strict=True)), facts=json.loads(row[9]))
