"""The shell's end of the socket: reports as they come, for one reader."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from headrace.engine.worker.messages import FrameBuffer, Report

_MOST_WAITING = 64


class Inbox(asyncio.Protocol):
    """Cuts what arrives into reports.

    A stream reader would take two coroutines and a copy for each of them, which is once per step, beside the model. A
    reader that lags by `_MOST_WAITING` reports leaves the socket full, which holds the worker back.
    """

    def __init__(self) -> None:
        self._frames = FrameBuffer()
        self._reports: deque[Report] = deque()
        self._transport: Any = None  # uvloop's are no subclasses of asyncio's
        self._waiter: asyncio.Future[None] | None = None
        self._paused = False
        self._closed = False

    async def next(self) -> Report | None:
        """The next report; None when the other end is closed and all have been taken."""
        while not self._reports:
            if self._closed:
                return None
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        report = self._reports.popleft()
        if self._paused and not self._reports and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
        return report

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See Protocol."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """See Protocol."""
        self._reports.extend(self._frames.feed(data))  # type: ignore[arg-type]  # the worker sends reports only
        if len(self._reports) > _MOST_WAITING and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        """See Protocol."""
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
