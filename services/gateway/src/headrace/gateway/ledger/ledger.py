"""One record of each request: noted, spooled, delivered."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections import deque
from dataclasses import dataclass
from itertools import islice

from headrace.base.backoff import Backoff
from headrace.base.errors import HeadraceError
from headrace.gateway.core.account import Kind, Slot
from headrace.gateway.core.audit import Audit
from headrace.gateway.ledger import metrics
from headrace.gateway.ledger.account import Account
from headrace.gateway.ledger.delivery import Lane, send_all
from headrace.gateway.ledger.disk import DiskThread
from headrace.gateway.ledger.folder import Store, open_folder, open_memory
from headrace.gateway.ledger.records import audit_body, body_of, opening
from headrace.gateway.ledger.sink import Sink
from headrace.gateway.ledger.table import private_slot
from headrace.observe.log import get_logger

log = get_logger(__name__)

# One fsync for whatever ends within this time; a power cut may take as much.
_GATHER_S = 0.25
# One call to telemetry for whatever is stored within this time: each takes some milliseconds of CPU on both sides,
# however few records it carries, and a model may be computing on the same cores.
_DELIVER_S = 0.5
# How much of the notes on running requests a power cut may take. Every 50 ms would make a store wait up to 4 ms for
# the disk, every second 0.8 at most (measured: 256 requests, a neighbour that writes and syncs all the time).
_SYNC_S = 1.0
_BATCH = 1000
# Beyond these, while neither disk nor telemetry takes anything, what ends is lost, and counted.
_MOST_WAITING = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerSettings:
    """Bounds: requests noted on disk at a time (2 kB each), and undelivered records of usage and audit in the spool."""

    slots: int = 4096
    spool_usage_bytes: int = 256 << 20
    spool_audit_bytes: int = 64 << 20
    longest_backoff_s: float = 5.0


class Ledger:
    """Opens accounts, keeps what comes of them, and hands it to `sink` until that has it on disk.

    With a folder nothing noted is lost to kill -9 of any process; without one it lives as long as this process. Without
    a sink records stay in the folder, for a later life that has one. `start` comes first and blocks, for the disk;
    `open` and `audit` never wait, never fail.
    """

    def __init__(
        self, data_dir: str, sink: Sink | None, gateway_id: str, settings: LedgerSettings | None = None
    ) -> None:
        self._data_dir = data_dir
        self._sink = sink
        self._gateway_id = gateway_id
        self._settings = settings or LedgerSettings()
        self._store: Store | None = None
        self._disk: DiskThread | None = None
        self._ended: deque[Slot] = deque()
        self._news = asyncio.Event()
        self._lanes = {kind: Lane(kind) for kind in Kind}
        self._disk_healthy = True
        self._dirty = False
        self._has_room = True

    def start(self) -> None:
        """Take the folder over and recover what an earlier life left. Blocks; StartError for a folder of no use."""
        settings = self._settings
        most_bytes = {Kind.USAGE: settings.spool_usage_bytes, Kind.AUDIT: settings.spool_audit_bytes}
        if self._data_dir:
            self._store = open_folder(self._data_dir, settings.slots, most_bytes)
        else:
            self._store = open_memory(settings.slots, most_bytes)
            log.warning("ledger_in_memory_only", why="no data folder: usage not delivered yet ends with this process")
        if self._sink is None:
            log.warning("ledger_not_delivered", why="no telemetry endpoint", kept=bool(self._data_dir))
        self._disk = DiskThread()
        metrics.OLDEST_SECONDS.set_function(self._oldest_s)
        self._gauge()

    def open(
        self, *, request_id: str, tenant: str, credential: str, model: str, bundle_digest: str, admitted_unix_ns: int
    ) -> Account:
        """Begin the account of one request. The same id admitted at another time is another request."""
        slot = self._slot()
        body = opening(
            request_id=request_id,
            tenant=tenant,
            credential=credential,
            model=model,
            bundle_digest=bundle_digest,
            admitted_unix_ns=admitted_unix_ns,
            gateway_id=self._gateway_id,
        )
        slot.open(Kind.USAGE, body)
        self._dirty = True
        return Account(slot, self._done)

    def audit(self, audit: Audit) -> None:
        """Keep a decision."""
        body = audit_body(audit)
        slot = self._slot(audit=True)
        slot.open(Kind.AUDIT, body)
        slot.close("", 0)
        self._done(slot)

    async def run(self) -> None:
        """Store what ends and deliver what is stored, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._keep_storing())
            tasks.create_task(self._keep_syncing())
            if self._sink is not None:
                for lane in self._lanes.values():
                    tasks.create_task(self._keep_delivering(lane, self._sink))

    async def close(self, timeout_s: float = 2.0) -> None:
        """Store what has ended, deliver what can be within `timeout_s`, and let go; `run` must have ended.

        What is left is in the folder; without one, it is lost and counted.
        """
        if self._store is None or self._disk is None:
            return
        try:
            async with asyncio.timeout(timeout_s):
                await self._flush()
        except TimeoutError:
            pass
        store, self._store = self._store, None
        if not self._data_dir:
            for kind, count in store.spool.records.items():
                metrics.LOST.labels(kind.name.lower(), "process_ended").inc(count)
        try:
            async with asyncio.timeout(timeout_s):
                await self._disk.do(store.close)
        except TimeoutError:
            log.error("ledger_disk_stuck", not_spooled=len(self._ended))  # their slots keep them for the next life
        self._disk.end()
        if self._sink is not None:
            await self._sink.close()

    async def _flush(self) -> None:
        while self._ended and await self._store_batch():
            pass
        if self._sink is not None:
            for lane in self._lanes.values():
                while await self._deliver_batch(lane, self._sink):
                    pass

    def _slot(self, *, audit: bool = False) -> Slot:
        """A lasting slot; one in this process's memory when there is none, so that nobody waits."""
        # A storm of refusals must leave room for those who are served.
        spared = self._settings.slots // 2 if audit else 0
        table = self._store.table if self._store else None
        slot = table.take() if table and table.free > spared else None
        if slot is None:
            metrics.OFF_DISK.inc()
            return private_slot()
        return slot

    def _opened(self) -> Store:
        if self._store is None:
            raise RuntimeError("the ledger is not open")
        return self._store

    def _done(self, slot: Slot) -> None:
        if self._store is None:
            return  # a request that outlived the drain: the next life finds its slot
        if len(self._ended) >= _MOST_WAITING and not self._store.table.lasts(slot):
            metrics.LOST.labels("any", "memory_full").inc()
            if self._has_room:
                self._has_room = False
                log.error("ledger_records_lost", why="neither disk nor telemetry takes any, and memory is full")
            return
        self._ended.append(slot)
        self._dirty = True
        self._news.set()

    async def _keep_storing(self) -> None:
        backoff = Backoff(first_s=_GATHER_S, longest_s=1.0)
        while True:
            await self._news.wait()
            self._news.clear()
            await asyncio.sleep(_GATHER_S)
            while self._ended:
                if await self._store_batch():
                    backoff.reset()
                else:
                    await asyncio.sleep(backoff.next_s())

    async def _store_batch(self) -> bool:
        """Move what has ended to the spool, or, when the disk takes nothing, straight to telemetry."""
        assert self._disk is not None
        batch = list(islice(self._ended, _BATCH))
        started = time.perf_counter()
        try:
            await self._disk.do(self._spool, batch)
        except sqlite3.Error as error:
            self._note_disk(error)
            if not await self._deliver_directly(batch):
                return False
        else:
            metrics.STORE_SECONDS.observe(time.perf_counter() - started)
            self._note_disk(None)
        self._has_room = True
        table = self._opened().table
        for _ in batch:
            table.give_back(self._ended.popleft())
        for lane in self._lanes.values():
            lane.news.set()
        self._gauge()
        return True

    def _spool(self, batch: list[Slot]) -> None:
        """On the disk's thread. A slot is freed once its record is on disk: at no moment is it in neither."""
        bodies = _bodies(batch)
        refused = self._opened().spool.store(bodies)
        for slot in batch:
            slot.free()
        for kind, _ in bodies:
            metrics.CLOSED.labels(kind.name.lower()).inc()
        if refused:
            for kind, _ in refused:
                metrics.LOST.labels(kind.name.lower(), "spool_full").inc()
            log.error("ledger_records_lost", why="the spool is full: telemetry was away too long", records=len(refused))

    async def _deliver_directly(self, batch: list[Slot]) -> bool:
        """Without the spool: the slots hold the records until telemetry does."""
        assert self._disk is not None
        if self._sink is None:
            return False
        bodies = await self._disk.do(_bodies, batch)
        try:
            for kind in Kind:
                await send_all(self._sink, kind, [body for of, body in bodies if of is kind])
        except HeadraceError:
            return False
        for slot in batch:
            slot.free()
        for kind, _ in bodies:
            metrics.CLOSED.labels(kind.name.lower()).inc()
        return True

    async def _keep_syncing(self) -> None:
        assert self._disk is not None
        while True:
            await asyncio.sleep(_SYNC_S)
            if self._dirty or self._opened().table.free < self._settings.slots:
                self._dirty = False
                try:
                    await self._disk.do(self._opened().table.sync)
                except OSError as error:
                    self._note_disk(error)

    async def _keep_delivering(self, lane: Lane, sink: Sink) -> None:
        backoff = Backoff(first_s=0.1, longest_s=self._settings.longest_backoff_s)
        while True:
            if await self._deliver_batch(lane, sink):
                backoff.reset()
            elif lane.oldest_ns:
                await asyncio.sleep(backoff.next_s())
            else:
                await lane.news.wait()
                await asyncio.sleep(_DELIVER_S)
                lane.news.clear()

    async def _deliver_batch(self, lane: Lane, sink: Sink) -> bool:
        """Deliver the oldest records of a kind; False when there was none, or it failed (`lane.oldest_ns` tells)."""
        assert self._disk is not None
        spool = self._opened().spool
        if not spool.records[lane.kind]:
            lane.oldest_ns = 0
            return False
        try:
            batch = await self._disk.do(spool.oldest, lane.kind, lane.sent, _BATCH)
            lane.oldest_ns = batch.oldest_ns if batch else 0
            if batch is None:
                return False
            await send_all(sink, lane.kind, batch.bodies)
            lane.note_sent(batch.last)
            await self._disk.do(spool.delete, lane.kind, batch.last)
        except HeadraceError as error:
            lane.note_failed(error.message)
            return False
        except sqlite3.Error as error:
            lane.oldest_ns = lane.oldest_ns or time.time_ns()
            self._note_disk(error)
            return False
        self._gauge()
        return True

    def _note_disk(self, error: Exception | None) -> None:
        """Log the first of a row of failures, and the first success after it."""
        if error is not None and self._disk_healthy:
            log.error(
                "ledger_disk_failed", detail=str(error), still="requests are served; usage goes to telemetry only"
            )
        elif error is None and not self._disk_healthy:
            log.info("ledger_disk_recovered")
        self._disk_healthy = error is None

    def _gauge(self) -> None:
        for kind, count in self._opened().spool.records.items():
            metrics.BACKLOG_RECORDS.labels(kind.name.lower()).set(count)
            metrics.BACKLOG_BYTES.labels(kind.name.lower()).set(self._opened().spool.bytes[kind])

    def _oldest_s(self) -> float:
        waiting = [lane.oldest_ns for lane in self._lanes.values() if lane.oldest_ns]
        return (time.time_ns() - min(waiting)) / 1e9 if waiting else 0.0


def _bodies(batch: list[Slot]) -> list[tuple[Kind, bytes]]:
    """The records of ended slots; one that is free was stored when its wait was cancelled."""
    bodies = []
    for slot in batch:
        entry = slot.read()
        if entry is not None:
            bodies.append((entry.kind, body_of(entry, slot.extra.values())))
    return bodies
