"""The one thread that writes spans, and the bounded queue in front of it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import duckdb

from headrace.observe.log import get_logger
from headrace.observe.metrics import counter, gauge, histogram
from headrace.telemetry.core.span import Span
from headrace.telemetry.store import SpanStore

log = get_logger(__name__)

STORED = counter("headrace_telemetry_spans_stored_total", "Spans written to the database.")
DROPPED = counter("headrace_telemetry_spans_dropped_total", "Spans received and not written, by reason.", ("reason",))
TRIMMED = counter("headrace_telemetry_spans_trimmed_total", "Spans deleted because of their age or number.")
QUEUED = gauge("headrace_telemetry_queue_spans", "Spans waiting for the writer.")
WRITE_S = histogram("headrace_telemetry_write_seconds", "Time of one write of a batch, in seconds.")

# 5000 spans take 35 ms to write (measured): far below the flush period, and a bound on one transaction.
_BATCH_SPANS = 5000


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterSettings:
    """Bounds of the queue, of the wait before a write, and of what is kept."""

    queue_spans: int
    flush_period_s: float
    keep_spans: int
    keep_s: float
    trim_period_s: float


class SpanWriter:
    """Takes spans from the event loop without waiting, writes them in batches from its own thread.

    A batch that cannot be written (disk full) is dropped and counted, and the next one is tried; a database that has
    become unusable ends the thread, and `ended` carries the error so that the process ends with it.
    """

    def __init__(self, store: SpanStore, settings: WriterSettings) -> None:
        self._store = store
        self._settings = settings
        self._queue: deque[Span] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._healthy = True
        # A daemon, so that a disk that never answers cannot keep a drained process alive.
        self._thread = threading.Thread(target=self._live, name="span-writer", daemon=True)
        self.ended: Future[None] = Future()
        self.ended.set_running_or_notify_cancel()

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def offer(self, spans: Sequence[Span]) -> int:
        """Queue as many of `spans` as there is room for, from the first on; returns how many. Never waits for disk."""
        with self._changed:
            room = 0 if self._closing else max(self._settings.queue_spans - len(self._queue), 0)
            taken = spans[:room]
            self._queue.extend(taken)
            QUEUED.set(len(self._queue))
            if taken:
                self._changed.notify()
        if len(taken) < len(spans):
            DROPPED.labels("queue_full").inc(len(spans) - len(taken))
        return len(taken)

    def close(self, timeout_s: float) -> None:
        """Refuse new spans, write those that wait, end the thread; blocks for at most `timeout_s`."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _live(self) -> None:
        try:
            self._loop()
        except BaseException as error:  # guard 2 of 3, the loop: handed to the process, which ends with it
            self.ended.set_exception(error)
        else:
            self.ended.set_result(None)

    def _loop(self) -> None:
        next_trim = time.monotonic()
        while True:
            batch = self._take(next_trim)
            if batch:
                self._write(batch)
            elif self._closing:
                return
            if time.monotonic() >= next_trim:
                self._trim()
                next_trim = time.monotonic() + self._settings.trim_period_s

    def _take(self, until: float) -> list[Span]:
        """Wait for a first span, then gather for the flush period; empty at `until` or when closing."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing, max(until - time.monotonic(), 0.0))
            if self._queue:
                full = min(_BATCH_SPANS, self._settings.queue_spans)
                self._changed.wait_for(lambda: self._closing or len(self._queue) >= full, self._settings.flush_period_s)
            batch = [self._queue.popleft() for _ in range(min(len(self._queue), _BATCH_SPANS))]
            QUEUED.set(len(self._queue))
        return batch

    def _write(self, batch: Sequence[Span]) -> None:
        started = time.perf_counter()
        try:
            self._store.append(batch)
        except duckdb.Error as error:
            DROPPED.labels("write_failed").inc(len(batch))
            self._failed(error)
            return
        WRITE_S.observe(time.perf_counter() - started)
        STORED.inc(len(batch))
        if not self._healthy:
            self._healthy = True
            log.info("span_write_recovered")

    def _trim(self) -> None:
        try:
            TRIMMED.inc(self._store.trim(keep_spans=self._settings.keep_spans, keep_s=self._settings.keep_s))
        except duckdb.Error as error:
            self._failed(error)

    def _failed(self, error: duckdb.Error) -> None:
        """Log the first of a row of failures; raise those after which the database takes nothing any more."""
        if isinstance(error, (duckdb.FatalException, duckdb.InternalException)):
            raise error
        if self._healthy:
            self._healthy = False
            log.error("span_write_failed", detail=str(error).splitlines()[0])
