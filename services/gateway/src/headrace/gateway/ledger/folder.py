"""The ledger's folder: whose it is, and what an earlier life left there."""

from __future__ import annotations

import fcntl
import os
import sqlite3
import time
from dataclasses import dataclass
from pathlib import Path

from headrace.base.errors import StartError
from headrace.gateway.core.account import Kind
from headrace.gateway.ledger import metrics
from headrace.gateway.ledger.records import body_of
from headrace.gateway.ledger.spool import Spool
from headrace.gateway.ledger.table import SlotTable, read_table
from headrace.observe.log import get_logger

log = get_logger(__name__)

_LOCK = "ledger.lock"


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """Slots and spool, and the lock that keeps others away from them."""

    table: SlotTable
    spool: Spool
    lock: int | None = None

    def close(self) -> None:
        """Let go of all of it."""
        self.spool.close()
        if self.lock is not None:
            os.close(self.lock)


def open_memory(slots: int, most_bytes: dict[Kind, int]) -> Store:
    """A store that ends with the process."""
    return Store(table=SlotTable.in_memory(slots), spool=Spool.in_memory(most_bytes))


def open_folder(data_dir: str, slots: int, most_bytes: dict[Kind, int]) -> Store:
    """Take the folder over from the life before, and make records of the requests it left unfinished.

    StartError when another process lives in it, or it cannot be written.
    """
    folder = Path(data_dir)
    lock: int | None = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = _locked(folder / _LOCK)
        spool = Spool.on_disk(folder, most_bytes)
        try:
            _recover(folder, spool)
            return Store(table=SlotTable.on_disk(folder, slots), spool=spool, lock=lock)
        except BaseException:
            spool.close()
            raise
    except (OSError, sqlite3.Error) as error:
        _unlock(lock)
        why = (error.strerror if isinstance(error, OSError) else "") or str(error)
        raise StartError(
            f"cannot keep the ledger in {folder}: {why}; the folder must be writable with free space, "
            "or choose another --data-dir"
        ) from None
    except StartError:
        _unlock(lock)
        raise


def _locked(path: Path) -> int:
    """A lock that the kernel takes back when this process is gone, however it goes."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(descriptor, 32).decode(errors="replace").strip()
        os.close(descriptor)
        who = f"process {holder}" if holder else "another process"
        raise StartError(f"{path.parent} is in use by {who}; give each gateway a --data-dir of its own") from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, str(os.getpid()).encode(), 0)
    return descriptor


def _unlock(lock: int | None) -> None:
    if lock is not None:
        os.close(lock)


def _recover(folder: Path, spool: Spool) -> None:
    """Spool what the slots hold. Ending between this and the new table spools it twice, and telemetry keeps one."""
    entries = read_table(folder)
    if not entries:
        return
    found_ns = time.time_ns()
    bodies = [(entry.kind, body_of(entry, found_ns=found_ns)) for entry in entries]
    for kind, _ in spool.store(bodies):
        metrics.LOST.labels(kind.name.lower(), "spool_full").inc()
    unfinished = sum(not entry.closed for entry in entries)
    metrics.RECOVERED.inc(unfinished)
    log.warning("ledger_recovered", unfinished=unfinished, finished=len(entries) - unfinished)
