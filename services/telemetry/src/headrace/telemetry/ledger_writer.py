"""The one thread that writes usage and audit, and deletes what is old."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import duckdb

from headrace.base.errors import Unavailable
from headrace.observe.log import get_logger
from headrace.observe.metrics import counter
from headrace.telemetry.ledger import LedgerStore

log = get_logger(__name__)

RECORDS = counter("headrace_telemetry_records_total", "Records of usage and audit that were new, by kind.", ("kind",))
AGAIN = counter("headrace_telemetry_records_again_total", "Records that were known already, by kind.", ("kind",))
REFUSED = counter("headrace_telemetry_record_batches_failed_total", "Batches the database did not take.")

_RETRY_AFTER_S = 1.0

T = TypeVar("T")


class LedgerWriter:
    """Writes on behalf of calls, which wait for the disk: their senders keep what was not acknowledged.

    A database that has become unusable makes `run` raise, so that the process ends with it.
    """

    def __init__(self, store: LedgerStore, *, usage_s: float, audit_s: float, trim_period_s: float) -> None:
        self.store = store
        self._usage_s = usage_s
        self._audit_s = audit_s
        self._trim_period_s = trim_period_s
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ledger-writer")
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._healthy = True

    async def write(self, kind: str, sent: int, work: Callable[[], int]) -> int:
        """Run `work`, which returns how many of `sent` records were new; Unavailable when the disk does not take it."""
        new = await self._run(work)
        RECORDS.labels(kind).inc(new)
        AGAIN.labels(kind).inc(sent - new)
        return new

    async def run(self) -> None:
        """Delete what is old, from time to time; raises when the database is of no use any more."""
        while True:
            done, _ = await asyncio.wait({self._broken}, timeout=self._trim_period_s)
            if done:
                await self._broken
            try:
                await self._run(lambda: self.store.trim(usage_s=self._usage_s, audit_s=self._audit_s))
            except Unavailable:
                pass  # logged; tried again in a period

    def close(self) -> None:
        """Stop; what was asked for before is written."""
        self._thread.shutdown(wait=True)
        if self._broken.done() and not self._broken.cancelled():
            self._broken.exception()

    async def _run(self, work: Callable[[], T]) -> T:
        try:
            result = await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except duckdb.Error as error:
            self._failed(error)
            raise Unavailable(
                "the database does not take it now", reason="DISK_FAILED", retry_after_s=_RETRY_AFTER_S
            ) from None
        if not self._healthy:
            self._healthy = True
            log.info("ledger_write_recovered")
        return result

    def _failed(self, error: duckdb.Error) -> None:
        REFUSED.inc()
        if isinstance(error, (duckdb.FatalException, duckdb.InternalException)) and not self._broken.done():
            self._broken.set_exception(error)
        if self._healthy:
            self._healthy = False
            log.error("ledger_write_failed", detail=str(error).splitlines()[0])
