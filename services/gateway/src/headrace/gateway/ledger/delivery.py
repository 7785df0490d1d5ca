"""Sending batches, around records that telemetry will never take."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from headrace.base.errors import InvalidRequest
from headrace.gateway.core.account import Kind
from headrace.gateway.ledger import metrics
from headrace.gateway.ledger.records import identity
from headrace.gateway.ledger.sink import Sink
from headrace.observe.log import get_logger

log = get_logger(__name__)


class Lane:
    """Where the delivery of one kind of records stands; no kind waits for the other.

    `sent` is the last record that telemetry has, `oldest_ns` since when the next one waits (0: none does).
    """

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.sent = 0
        self.oldest_ns = 0
        self.news = asyncio.Event()
        self._reachable = True

    def note_sent(self, last: int) -> None:
        """Telemetry has all up to `last`."""
        self.sent = last
        self.oldest_ns = 0
        if not self._reachable:
            self._reachable = True
            log.info("ledger_delivery_recovered", kind=self.kind.name.lower())

    def note_failed(self, why: str) -> None:
        """Telemetry did not take a batch; logged for the first of a row."""
        if self._reachable:
            self._reachable = False
            log.warning("ledger_delivery_failed", kind=self.kind.name.lower(), detail=why)


async def send_all(sink: Sink, kind: Kind, bodies: Sequence[bytes]) -> None:
    """Send a batch; one that is refused is halved until the record at fault is alone, and that is given up.

    Waiting for its refusal to change would hold up all the others for ever.
    """
    if not bodies:
        return
    try:
        await sink.send(kind, bodies)
    except InvalidRequest as error:
        if len(bodies) == 1:
            metrics.LOST.labels(kind.name.lower(), "refused").inc()
            log.error("ledger_record_refused", kind=kind.name.lower(), id=identity(kind, bodies[0]), why=error.message)
            return
        middle = len(bodies) // 2
        await send_all(sink, kind, bodies[:middle])
        await send_all(sink, kind, bodies[middle:])
    else:
        metrics.DELIVERED.labels(kind.name.lower()).inc(len(bodies))
