"""Watches over the worker: a replica whose worker is silent is not READY, and ends when it stays so."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import structlog

from headrace.engine.core.pulse import Pulse, Vital
from headrace.engine.metrics import STALLS
from headrace.engine.worker.client import WorkerClient, WorkerDied

log = structlog.get_logger(__name__)
# A worker is asked to speak after so long: the price of an idle replica is one message a second.
_LONGEST_PERIOD_S = 1.0


class Watch:
    """Pings a silent worker and tells `changed` when it stalls (True) and when it is heard again (False)."""

    def __init__(
        self, worker: WorkerClient, *, stall_s: float, lost_s: float, changed: Callable[[bool], Awaitable[None]]
    ) -> None:
        self._worker = worker
        self._changed = changed
        self._period_s = min(_LONGEST_PERIOD_S, stall_s / 4)
        self._pulse = Pulse(period_s=self._period_s, stall_s=stall_s, lost_s=max(stall_s, lost_s))
        self._stalled = False

    async def run(self) -> None:
        """Watch until cancelled; kills the worker and raises WorkerDied when it stays silent."""
        self._worker.on_report = self._pulse.heard
        while True:
            await asyncio.sleep(self._period_s)
            vital = self._pulse.listen(time.monotonic())
            if vital is Vital.LOST:
                silent_s = round(self._pulse.silent_s, 1)
                log.error("worker_lost", pid=self._worker.pid, silent_s=silent_s)
                self._worker.kill()
                raise WorkerDied(f"the engine's worker (pid {self._worker.pid}) was silent for {silent_s} s")
            await self._note(stalled=vital is Vital.STALLED)
            if self._pulse.silent_s:
                self._worker.ping()

    async def _note(self, *, stalled: bool) -> None:
        if stalled is self._stalled:
            return
        self._stalled = stalled
        if stalled:
            STALLS.inc()
            log.warning("worker_stalled", pid=self._worker.pid, silent_s=round(self._pulse.silent_s, 1))
        else:
            log.info("worker_recovered", pid=self._worker.pid)
        await self._changed(stalled)
