"""One attempt's sequence on an Attach stream: the stream's reader fills it, the request's handler empties it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from headrace.gateway.core.outbox import Batch, Outbox
from headrace.gateway.core.recovery import EngineFault
from headrace.gateway.core.step import Finish


class AttachedSequence:
    """Tokens arrive without waiting for the client; whoever takes them gets all that are pending."""

    def __init__(self, slot: int, cancel: Callable[[int], None]) -> None:
        self.slot = slot
        self._send_cancel = cancel
        self._outbox = Outbox()
        self._news = asyncio.Event()
        self._fault: EngineFault | None = None
        self._ended = False
        self._cancelled = False

    def deliver(self, token_id: int, now: float) -> None:
        """A token arrived; one that was on its way when the sequence was cancelled is dropped."""
        if not self._cancelled:
            self._outbox.put(token_id, now)
            self._news.set()

    def end(self, finish: Finish) -> None:
        """The finish record arrived."""
        self._ended = True
        self._outbox.end(finish)
        self._news.set()

    def fail(self, fault: EngineFault) -> None:
        """The stream is gone; what had arrived can still be taken."""
        self._ended = True
        self._fault = fault
        self._news.set()

    async def next(self, timeout_s: float) -> Batch:
        """Everything pending, waiting up to `timeout_s` for something; EngineFault after the last of a failed one."""
        if not self._outbox and self._fault is None:
            self._news.clear()
            async with asyncio.timeout(timeout_s):
                await self._news.wait()
        if self._outbox or self._fault is None:
            return self._outbox.take()
        raise self._fault.again()

    def cancel(self) -> None:
        """Tell the engine to stop, once, unless the sequence has ended. Never waits: it is called on every way out."""
        if not self._ended and not self._cancelled:
            self._cancelled = True
            self._send_cancel(self.slot)
