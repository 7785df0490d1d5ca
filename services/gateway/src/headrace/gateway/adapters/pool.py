"""The Attach streams this gateway holds: opened on demand, one per life of an engine, closed when idle or broken."""

from __future__ import annotations

import asyncio
import contextvars
import time

import structlog

from headrace.base.deadline import Deadline
from headrace.gateway.adapters.attach import AttachConnection, AttachSettings, EngineAddress
from headrace.gateway.core.recovery import EngineFault, Fault

log = structlog.get_logger(__name__)

_SWEEP_S = 1.0


class AttachPool:
    """Owns the streams and their tasks; belongs to the running loop."""

    def __init__(self, settings: AttachSettings) -> None:
        self._settings = settings
        self._connections: dict[EngineAddress, AttachConnection] = {}
        self._tasks: dict[AttachConnection, asyncio.Task[None]] = {}
        self._closed = False

    @property
    def connections(self) -> int:
        """Streams open or being opened."""
        return len(self._connections)

    @property
    def open_slots(self) -> int:
        """Sequences running on all streams."""
        return sum(connection.open_slots for connection in self._connections.values())

    async def connection(self, engine: EngineAddress, bundle_digest: str, deadline: Deadline) -> AttachConnection:
        """The stream to `engine`, opened if there is none; EngineFault when it cannot be."""
        connection = self._connections.get(engine)
        if self._closed:
            raise EngineFault(Fault.UNREACHABLE, "this gateway is closing")
        if connection is None or connection.broken:
            connection = self._open(engine)
        await connection.opened(bundle_digest, deadline)
        return connection

    async def run(self) -> None:
        """Close streams that have been idle for long, until cancelled."""
        while True:
            await asyncio.sleep(_SWEEP_S)
            now = time.monotonic()
            for connection, task in list(self._tasks.items()):
                if connection.idle_for_s(now) > self._settings.idle_s:
                    connection.retire()
                    task.cancel()

    async def close(self) -> None:
        """Close every stream; open sequences on them fail."""
        self._closed = True
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _open(self, engine: EngineAddress) -> AttachConnection:
        connection = AttachConnection(engine, self._settings)
        # An empty context: the stream outlives the request that opened it and must not carry its trace.
        task = asyncio.create_task(connection.run(), context=contextvars.Context())
        self._connections[engine] = connection
        self._tasks[connection] = task

        def forget(ended: asyncio.Task[None]) -> None:
            if not ended.cancelled() and (error := ended.exception()) is not None:
                log.error("attach_failed", engine=engine.engine_id, exc_info=error)
            del self._tasks[connection]
            if self._connections.get(engine) is connection:
                del self._connections[engine]

        task.add_done_callback(forget)
        return connection
