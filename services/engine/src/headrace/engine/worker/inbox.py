"""The shell's end of the socket: reports as they come, for one reader."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

from headrace.engine.worker.messages import FrameBuffer, Report

_MOST_WAITING = 64


class Inbox(asyncio.Protocol):
    """Cuts what arrives into reports, and keeps them for `next` or hands them on at once while somebody `follow`s.

    A stream reader would take two coroutines and a copy for each of them, which is once per step, beside the model. A
    reader that lags by `_MOST_WAITING` reports leaves the socket full, which holds the worker back; one that follows
    cannot lag: nothing is read before it has dealt with what came before.
    """

    def __init__(self) -> None:
        self._frames = FrameBuffer()
        self._reports: deque[Report] = deque()
        self._transport: Any = None  # uvloop's are no subclasses of asyncio's
        self._waiter: asyncio.Future[None] | None = None
        self._paused = False
        self._closed = False
        self._take: Callable[[Report], bool] | None = None
        self._failure: Exception | None = None

    async def next(self) -> Report | None:
        """The next report; None when the other end is closed and all have been taken."""
        while not self._reports:
            if self._closed:
                return None
            await self._wait()
        report = self._reports.popleft()
        self._resume()
        return report

    async def follow(self, take: Callable[[Report], bool]) -> None:
        """Call `take` with each report as it comes, until it says False or the other end is closed and all are taken.

        What `take` raises is raised here. It must not wait.
        """
        self._take = take
        try:
            self._hand_on()
            self._resume()
            while self._take is not None and not self._closed:
                await self._wait()
        finally:
            self._take = None
        if self._failure is not None:
            raise self._failure

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See Protocol."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """See Protocol."""
        self._reports.extend(self._frames.feed(data))  # type: ignore[arg-type]  # the worker sends reports only
        if self._take is not None:
            self._hand_on()
            return
        if len(self._reports) > _MOST_WAITING and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        """See Protocol."""
        self._closed = True
        if error is not None and not isinstance(error, OSError):
            self._failure = error  # what `take` raised: the loop has closed the transport for it
        self._wake()

    def _hand_on(self) -> None:
        while self._take is not None and self._reports:
            if not self._take(self._reports.popleft()):
                self._take = None
                self._wake()

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _resume(self) -> None:
        if self._paused and not self._reports and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
