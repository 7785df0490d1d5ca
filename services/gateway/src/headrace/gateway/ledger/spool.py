"""Finished records on their way to telemetry, in one SQLite file."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.gateway.core.account import Kind
from headrace.observe.log import get_logger

log = get_logger(__name__)

FILE_NAME = "spool.sqlite"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS records (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, kind INTEGER NOT NULL, stored_ns INTEGER NOT NULL, body BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS records_by_kind ON records (kind);
"""
_INSERT = "INSERT INTO records (kind, stored_ns, body) VALUES (?, ?, ?)"
_OLDEST = "SELECT seq, stored_ns, body FROM records WHERE kind = ? AND seq > ? ORDER BY seq LIMIT ?"
_DELETE = "DELETE FROM records WHERE kind = ? AND seq <= ?"
_SIZES = "SELECT kind, count(*), coalesce(sum(length(body)), 0) FROM records GROUP BY kind"
_SIZE = "SELECT count(*), coalesce(sum(length(body)), 0) FROM records WHERE kind = ? AND seq <= ?"
# What a long absence of telemetry made large is given back to the disk a little at a time.
_VACUUM = "PRAGMA incremental_vacuum(256)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The oldest records of one kind: serialized messages, the last one's number, and when the first was stored."""

    bodies: tuple[bytes, ...]
    last: int
    oldest_ns: int


class Spool:
    """The database; all methods belong to one thread at a time and raise `sqlite3.Error`.

    WAL with synchronous=FULL: a commit is on the disk when it returns. The hot path does not wait for it, and commits
    are grouped, so the price is one fsync per group.
    """

    def __init__(self, path: str, most_bytes: dict[Kind, int]) -> None:
        self._most_bytes = most_bytes
        self.records = dict.fromkeys(Kind, 0)
        self.bytes = dict.fromkeys(Kind, 0)
        self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        try:
            self._prepare()
        except sqlite3.Error:
            self._connection.close()
            raise

    @classmethod
    def on_disk(cls, folder: Path, most_bytes: dict[Kind, int]) -> Spool:
        """Open or create the file; one that is no database any more is set aside, and a new one begun."""
        path = folder / FILE_NAME
        try:
            return cls(str(path), most_bytes)
        except sqlite3.OperationalError:
            raise
        except sqlite3.DatabaseError as error:
            aside = path.with_name(f"{FILE_NAME}.damaged-{time.time_ns()}")
            path.rename(aside)
            for rest in ("-wal", "-shm"):
                path.with_name(FILE_NAME + rest).unlink(missing_ok=True)
            log.error("ledger_spool_damaged", detail=str(error), kept_as=str(aside))
            return cls(str(path), most_bytes)

    @classmethod
    def in_memory(cls, most_bytes: dict[Kind, int]) -> Spool:
        """A spool that ends with the process."""
        return cls(":memory:", most_bytes)

    def store(self, records: Sequence[tuple[Kind, bytes]]) -> list[tuple[Kind, bytes]]:
        """Keep the records, all or none; returns those for which the bound on bytes left no room."""
        now, taken, refused = time.time_ns(), [], []
        size = dict(self.bytes)
        for kind, body in records:
            if size[kind] + len(body) > self._most_bytes[kind]:
                refused.append((kind, body))
                continue
            size[kind] += len(body)
            taken.append((int(kind), now, body))
        if taken:
            self._in_transaction(lambda: self._connection.executemany(_INSERT, taken))
            for number, _, body in taken:
                self.records[Kind(number)] += 1
                self.bytes[Kind(number)] += len(body)
        return refused

    def oldest(self, kind: Kind, after: int, limit: int) -> Batch | None:
        """The oldest records numbered above `after`; None when there is none."""
        rows = self._connection.execute(_OLDEST, (int(kind), after, limit)).fetchall()
        if not rows:
            return None
        return Batch(bodies=tuple(row[2] for row in rows), last=rows[-1][0], oldest_ns=rows[0][1])

    def delete(self, kind: Kind, last: int) -> None:
        """Forget the records of a kind up to `last`."""
        which = (int(kind), last)
        count, size = self._connection.execute(_SIZE, which).fetchone()
        self._in_transaction(lambda: self._connection.execute(_DELETE, which))
        self.records[kind] -= count
        self.bytes[kind] -= size
        self._connection.executescript(_VACUUM)  # `execute` would give back one page and stop

    def close(self) -> None:
        """Fold the log into the file and let go of it."""
        self._connection.close()

    def _prepare(self) -> None:
        execute = self._connection.execute
        execute("PRAGMA auto_vacuum = INCREMENTAL")
        execute("PRAGMA journal_mode = WAL")
        execute("PRAGMA synchronous = FULL")
        execute("PRAGMA journal_size_limit = 4194304")
        self._connection.executescript(_SCHEMA)
        # A write proves at the start that the disk takes one.
        self._in_transaction(lambda: execute("PRAGMA user_version = 1"))
        for number, count, size in execute(_SIZES):
            self.records[Kind(number)], self.bytes[Kind(number)] = count, size

    def _in_transaction(self, work: Callable[[], object]) -> None:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            work()
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise
