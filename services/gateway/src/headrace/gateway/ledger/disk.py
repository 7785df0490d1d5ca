"""The one thread that waits for the disk, so that the event loop never does."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
_Job = tuple[asyncio.Future[Any], Callable[..., Any], tuple[Any, ...]]


class DiskThread:
    """Runs one piece of work after the other.

    A daemon, unlike the threads of an executor, so that a disk that never answers cannot keep a drained process alive.
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        threading.Thread(target=self._work, name="ledger-disk", daemon=True).start()

    async def do(self, work: Callable[..., T], *arguments: Any) -> T:
        """The result of `work`. When the wait for it is cancelled, the work is still done, unless it had not begun."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._jobs.put((future, work, arguments))
        return await future

    def end(self) -> None:
        """Stop after what is queued; does not wait for it."""
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, work, arguments = job
            if future.cancelled():
                continue
            try:
                result, error = work(*arguments), None
            except Exception as raised:  # handed to whoever waits
                result, error = None, raised
            try:
                future.get_loop().call_soon_threadsafe(_settle, future, result, error)
            except RuntimeError:  # the loop is closed: nobody waits any more
                return


def _settle(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if future.cancelled():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
