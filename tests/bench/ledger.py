"""What the ledger costs on a request's way, against SQLite in its place. ``python tests/bench/ledger.py``"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from headrace.gateway.core.account import Kind
from headrace.gateway.ledger import Account, Ledger

T = TypeVar("T")

REQUESTS, NOTES = 2000, 50
_NOTE = "UPDATE usage SET output = output + 1 WHERE id = ?"


class Nowhere:
    """A sink that takes everything."""

    async def send(self, kind: Kind, bodies: Sequence[bytes]) -> None:
        """Take it."""

    async def close(self) -> None:
        """Nothing is open."""


async def main() -> None:
    """Print a table; run it where the gateway's data folder would be, as TMPDIR."""
    with tempfile.TemporaryDirectory() as folder, Neighbour(Path(folder) / "noise"):
        ledger = Ledger(f"{folder}/ledger", Nowhere(), "bench")
        ledger.start()
        running = asyncio.create_task(ledger.run())
        _show("slots", *await _slots(ledger))
        running.cancel()
        await asyncio.wait({running})
        await ledger.close()
        for mode in ("NORMAL", "FULL"):
            _show(f"sqlite, {mode}", *_sqlite(f"{folder}/{mode}", mode))


class Neighbour:
    """Writes 4 MB and syncs, again and again, on the same disk."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._write)

    def _write(self) -> None:
        with open(self._path, "wb") as file:
            while not self._stop.is_set():
                file.seek(0)
                file.write(os.urandom(4 << 20))
                file.flush()
                os.fsync(file.fileno())

    def __enter__(self) -> Neighbour:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


async def _slots(ledger: Ledger) -> tuple[list[float], list[float]]:
    requests, notes = [], []
    for number in range(REQUESTS):
        account, seconds = _timed(lambda number=number: _begin(ledger, number))  # type: ignore[misc]
        for _ in range(NOTES):
            notes.append(_timed(lambda account=account: account.tokens(1, 1))[1])  # type: ignore[misc]
        requests.append(seconds + _timed(lambda account=account: account.close("OK"))[1])  # type: ignore[misc]
        await asyncio.sleep(0.001)
    return requests, notes


def _begin(ledger: Ledger, number: int) -> Account:
    account = ledger.open(
        request_id=f"01jd{number:022d}",
        tenant="acme",
        credential="laptop",
        model="smol",
        bundle_digest="ab" * 16,
        admitted_unix_ns=time.time_ns(),
    )
    account.prompt(100)
    account.attempt(1, "smol-0-abcdef", 1)
    account.attempt_ended(1, "OK")
    return account


def _sqlite(path: str, mode: str) -> tuple[list[float], list[float]]:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute(f"PRAGMA synchronous = {mode}")
    connection.execute("CREATE TABLE usage (id TEXT PRIMARY KEY, body BLOB, output INTEGER) WITHOUT ROWID")
    requests, notes, body = [], [], b"x" * 120
    for number in range(REQUESTS // (1 if mode == "NORMAL" else 40)):
        row = (f"01jd{number:022d}", body, 0)
        requests.append(_timed(lambda row=row: connection.execute("INSERT INTO usage VALUES (?, ?, ?)", row))[1])  # type: ignore[misc]
        notes += [_timed(lambda row=row: connection.execute(_NOTE, row[:1]))[1] for _ in range(5)]  # type: ignore[misc]
    connection.close()
    return requests, notes


def _timed(work: Callable[[], T]) -> tuple[T, float]:
    started = time.perf_counter()
    result = work()
    return result, time.perf_counter() - started


def _show(name: str, requests: list[float], notes: list[float]) -> None:
    requests.sort()
    notes.sort()
    print(
        f"{name:16}  request {_middle(requests):8.1f} µs, longest {requests[-1] * 1e3:6.2f} ms   "
        f"note {_middle(notes):8.2f} µs, longest {notes[-1] * 1e3:6.2f} ms"
    )


def _middle(values: list[float]) -> float:
    return values[len(values) // 2] * 1e6


if __name__ == "__main__":
    asyncio.run(main())
