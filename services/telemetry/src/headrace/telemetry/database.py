"""The one DuckDB file: who may open it, who reads it, and that one writes at a time."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path
from typing import Any

import duckdb

from headrace.base.errors import StartError

FILE_NAME = "telemetry.duckdb"

_SCHEMA_VERSION = 1
_STARTS = "CREATE TABLE IF NOT EXISTS starts (schema_version INTEGER, started_ns BIGINT)"


class Database:
    """`connection` is for whoever holds `writing`; `read` for any thread. Methods raise `duckdb.Error`.

    A committed transaction survives kill -9 (it is in the write-ahead log, synced).
    """

    def __init__(self, connection: duckdb.DuckDBPyConnection, path: Path) -> None:
        self._path = path
        self.connection = connection
        # A checkpoint fails while another thread's transaction writes.
        self.writing = threading.Lock()
        self._reader = threading.local()
        self._cursors: list[duckdb.DuckDBPyConnection] = []

    @classmethod
    def open(cls, data_dir: str, *, memory_mb: int = 256) -> Database:
        """Open or create the file in `data_dir`; StartError says which of locked, unwritable, full or foreign it is."""
        folder = Path(data_dir)
        path = folder / FILE_NAME
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StartError(
                f"cannot make the data folder {folder}: {error.strerror}; choose another --data-dir"
            ) from None
        # Extensions are never fetched: this process talks to nobody but its clients.
        config = {
            "threads": "2",
            "memory_limit": f"{memory_mb}MB",
            "autoinstall_known_extensions": "false",
            "autoload_known_extensions": "false",
        }
        connection: duckdb.DuckDBPyConnection | None = None
        try:
            connection = duckdb.connect(str(path), config=config)  # type: ignore[arg-type]
            _prepare(connection, path)
            return cls(connection, path)
        except duckdb.Error as error:
            if connection is not None:
                connection.close()
            raise _start_error(path, error) from None

    def create(self, schema: str) -> None:
        """Make the tables there are not yet; StartError when that fails, with the file closed."""
        try:
            self.connection.execute(schema)
        except duckdb.Error as error:
            self.close()
            raise _start_error(self._path, error) from None

    def close(self) -> None:
        """Fold the log into the file and let go of it; queries that still run are broken off."""
        for cursor in self._cursors:
            cursor.interrupt()
            cursor.close()
        self.connection.close()

    def read(self, query: str, *parameters: object) -> list[Any]:
        """All rows of a query."""
        # A connection runs one statement at a time; each reading thread has its own, over the same database.
        if not hasattr(self._reader, "cursor"):
            self._reader.cursor = self.connection.cursor()
            self._cursors.append(self._reader.cursor)
        rows: list[Any] = self._reader.cursor.execute(query, parameters).fetchall()
        return rows


def _prepare(connection: duckdb.DuckDBPyConnection, path: Path) -> None:
    """Create the tables, refuse another version's, and prove by a write that the disk takes one."""
    connection.execute(_STARTS)
    newest = connection.execute("SELECT coalesce(max(schema_version), 0) FROM starts").fetchone()
    if newest and newest[0] > _SCHEMA_VERSION:
        connection.close()
        raise StartError(
            f"{path} was written by a newer version (schema {newest[0]}, this one knows {_SCHEMA_VERSION}); "
            "run that version, or choose another --data-dir"
        )
    connection.execute("INSERT INTO starts VALUES (?, ?)", [_SCHEMA_VERSION, time.time_ns()])
    connection.execute("CHECKPOINT")


def _start_error(path: Path, error: duckdb.Error) -> StartError:
    text = str(error).splitlines()[0]
    if "Could not set lock" in text:
        holder = re.search(r"\(PID (\d+)\)", text)
        who = f"process {holder[1]}" if holder else "another process"
        return StartError(f"{path} is in use by {who}; stop that one, or choose another --data-dir")
    return StartError(
        f"cannot open {path}: {text}; the folder must be writable with free space, or choose another --data-dir"
    )
