"""One attempt's sequence on an Attach stream: the stream's reader fills it, the request's handler empties it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from headrace.base.alarm import Alarm
from headrace.gateway.core.outbox import Batch, Outbox
from headrace.gateway.core.recovery import EngineFault
from headrace.gateway.core.step import Finish, Likelihoods


class Meter(Protocol):
    """What is told of everything that an engine sends, whether or not somebody still waits for it."""

    def received(self, tokens: int, now: float) -> None:
        """So many tokens arrived, of one step."""
        ...

    def ended(self, finish: Finish | None, fault: EngineFault | None) -> None:
        """The engine sends no more: its finish record, or the fault by which the stream was lost."""
        ...


class AttachedSequence:
    """Tokens arrive without waiting for the client; whoever takes them gets all that are pending. One may take."""

    def __init__(self, slot: int, cancel: Callable[[int], None], meter: Meter) -> None:
        self.slot = slot
        self._meter = meter
        self._send_cancel = cancel
        self._outbox = Outbox()
        self._waiter: asyncio.Future[None] | None = None
        self._alarm = Alarm()
        self._fault: EngineFault | None = None
        self._ended = False
        self._cancelled = False

    def deliver(self, token_ids: Sequence[int], now: float, logprobs: Sequence[Likelihoods] = ()) -> None:
        """One step's tokens arrived; those that were on their way when the sequence was cancelled are dropped."""
        self._meter.received(len(token_ids), now)
        if not self._cancelled:
            self._outbox.put(token_ids, now, logprobs)
            self._wake()

    def end(self, finish: Finish) -> None:
        """The finish record arrived."""
        self._meter.ended(finish, None)
        self._outbox.end(finish)
        self._close()

    def fail(self, fault: EngineFault) -> None:
        """The stream is gone; what had arrived can still be taken."""
        self._meter.ended(None, fault)
        self._fault = fault
        self._close()

    async def next(self, timeout_s: float) -> Batch:
        """Everything pending, waiting up to `timeout_s` for something; EngineFault after the last of a failed one."""
        if not self._outbox and self._fault is None:
            self._waiter = asyncio.get_running_loop().create_future()
            self._alarm.set(timeout_s, self._give_up_waiting)
            try:
                await self._waiter
            finally:
                self._waiter = None
                self._alarm.stop()
        if self._outbox or self._fault is None:
            return self._outbox.take()
        raise self._fault.again()

    def cancel(self) -> None:
        """Tell the engine to stop, once, unless the sequence has ended. Never waits: it is called on every way out."""
        if not self._ended and not self._cancelled:
            self._cancelled = True
            self._send_cancel(self.slot)

    def _close(self) -> None:
        self._ended = True
        self._alarm.close()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _give_up_waiting(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(TimeoutError())
