"""One connection that runs one script, without the general client's cost per command.

redis-py takes about 75 µs of this process's time for a script call, this about 16: the rest is pool, retries, tasks and
encoding. Where each placement makes such a call that shows. So redis-py connects, authenticates and keeps the
connection (its pool closes it in the end), and between that the protocol of the socket is this one: a command is
packed and written at once, hiredis reads the answers, which come in order.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Sequence
from typing import Any

import hiredis
from redis import exceptions
from redis.asyncio import Redis

from headrace.coord.redis.store import cancellable

LATE_S = 0.1
"""Whoever gives up on an answer that is out for so long takes the connection for dead. An answer that is merely not
wanted any more is read and dropped."""

_ERRORS: dict[str, type[exceptions.RedisError]] = {
    "NOSCRIPT": exceptions.NoScriptError,
    "LOADING": exceptions.BusyLoadingError,
    "READONLY": exceptions.ReadOnlyError,
    "OOM": exceptions.OutOfMemoryError,
    "CLUSTERDOWN": exceptions.ClusterDownError,
    "MASTERDOWN": exceptions.MasterDownError,
}


def _error(text: str) -> exceptions.RedisError:
    return _ERRORS.get(text.split(" ", 1)[0], exceptions.ResponseError)(text)


def _no_answer(timeout_s: float) -> exceptions.TimeoutError:
    return exceptions.TimeoutError(f"no answer within {timeout_s:g} s")


class ScriptLine:
    """Runs `script` over one connection of `redis`, which is taken at the first call and anew after it was lost.

    Calls do not wait for each other's answers. Raises redis-py's errors; an answer may take `timeout_s`.
    """

    def __init__(self, redis: Redis, script: str, *, timeout_s: float) -> None:
        self._redis = redis
        self._script = script.encode()
        self._sha = hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest().encode()
        self._timeout_s = timeout_s
        self._wire: _Wire | None = None
        self._connection: Any = None
        self._connecting = asyncio.Lock()

    async def call(self, key: bytes, arguments: Sequence[bytes]) -> Any:
        """The script's answer."""
        command = (b"EVALSHA", self._sha, b"1", key, *arguments)
        wire = self._wire
        if wire is not None and not wire.lost:
            try:
                return await wire.send(command)  # which keeps the time itself
            except exceptions.NoScriptError:  # another server, or one that has forgotten
                command = (b"EVAL", self._script, b"1", key, *arguments)
        try:
            async with asyncio.timeout(self._timeout_s):
                wire = await self._connected()
                try:
                    return await wire.send(command)
                except exceptions.NoScriptError:
                    return await wire.send((b"EVAL", self._script, b"1", key, *arguments))
        except TimeoutError:
            raise _no_answer(self._timeout_s) from None

    async def _connected(self) -> _Wire:
        async with self._connecting:
            if self._wire is None or self._wire.lost:
                await cancellable(self._connect())
            assert self._wire is not None
            return self._wire

    async def _connect(self) -> None:
        pool: Any = self._redis.connection_pool
        if self._connection is not None:
            lost, self._connection = self._connection, None
            await lost.disconnect(nowait=True)
            await pool.release(lost)
        self._connection = await pool.get_connection()
        self._wire = _Wire(self._connection._writer.transport, self._timeout_s)


class _Wire(asyncio.Protocol):
    """A connected socket; its stream's protocol is put in its place again by being told of the end.

    Answers come in order, so one timer, for the oldest, keeps the time of all; one for each would cost 6 µs a call.
    """

    def __init__(self, transport: Any, timeout_s: float) -> None:
        self.lost = False
        self._timeout_s = timeout_s
        self._timer: asyncio.TimerHandle | None = None
        self._transport = transport
        self._before = transport.get_protocol()
        self._loop = asyncio.get_running_loop()
        self._reader: Any = hiredis.Reader(replyError=_error, protocolError=exceptions.ConnectionError)
        self._waiting: deque[tuple[float, asyncio.Future[Any]]] = deque()
        transport.set_protocol(self)

    async def send(self, command: Any) -> Any:
        """The answer to one command, a tuple of bytes."""
        answer = self._loop.create_future()
        sent_at = self._loop.time()
        self._waiting.append((sent_at, answer))
        if self._timer is None:
            self._timer = self._loop.call_at(sent_at + self._timeout_s, self._look_at_oldest)
        self._transport.write(hiredis.pack_command(command))
        try:
            return await answer
        except asyncio.CancelledError:
            if self._loop.time() - sent_at >= LATE_S:
                self._end(exceptions.ConnectionError("an answer was late"))
            raise

    def data_received(self, data: bytes) -> None:
        """Answers, or parts of them."""
        try:
            self._reader.feed(data)
            while (answer := self._reader.gets()) is not False:
                self._answer(answer)
        except (exceptions.ConnectionError, IndexError) as error:
            self._end(exceptions.ConnectionError(f"the server's answers cannot be read: {error}"))

    def eof_received(self) -> bool:
        """The server has closed it."""
        return False

    def connection_lost(self, error: Exception | None) -> None:
        """The socket is gone."""
        self._end(exceptions.ConnectionError("the connection was closed"))
        self._before.connection_lost(error)

    def pause_writing(self) -> None:
        """A placement is small, and waits for its answer anyhow: what is written is bounded by who waits."""

    def _look_at_oldest(self) -> None:
        self._timer = None
        if not self._waiting:
            return
        sent_at, answer = self._waiting[0]
        due = sent_at + self._timeout_s
        if due > self._loop.time():
            self._timer = self._loop.call_at(due, self._look_at_oldest)
            return
        if not answer.done():
            answer.set_exception(_no_answer(self._timeout_s))
        self._end(exceptions.ConnectionError("an answer was late"))

    def _answer(self, answer: Any) -> None:
        _, waiting = self._waiting.popleft()
        if waiting.done():
            return
        if isinstance(answer, Exception):
            waiting.set_exception(answer)
        else:
            waiting.set_result(answer)

    def _end(self, error: exceptions.RedisError) -> None:
        if not self.lost:
            self.lost = True
            self._transport.abort()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._waiting:
            _, waiting = self._waiting.popleft()
            if not waiting.done():
                waiting.set_exception(error)
