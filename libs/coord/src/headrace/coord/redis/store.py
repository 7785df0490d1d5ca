"""The connection to Redis: short timeouts, no silent retries, one place where its errors become ours."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from redis import exceptions
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.maint_notifications import MaintNotificationsConfig

from headrace.base.errors import InternalError, StartError, Unavailable

TIMEOUT_S = 0.3
_LOST = (
    exceptions.ConnectionError,
    exceptions.TimeoutError,
    exceptions.ReadOnlyError,
    exceptions.OutOfMemoryError,
    exceptions.ClusterDownError,
    exceptions.MasterDownError,
)


T = TypeVar("T")


class _Client(Redis):
    """redis-py, with cancellation that always arrives.

    redis-py sends inside `asyncio.wait_for`. On Python 3.11 that swallows a cancel which comes together with the
    send's completion (cpython #86296, mended in 3.12): a third of the cancels of a busy loop were lost here, and
    each lost one is a service that does not end when told to.
    """

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        """The command's answer; a cancel ends the wait at once and the command within its socket timeouts."""
        return await cancellable(super().execute_command(*args, **options))  # type: ignore[no-untyped-call]


async def cancellable(command: Coroutine[Any, Any, T]) -> T:
    """What `command` returns; a cancel of the caller ends the wait whatever `command` makes of its own."""
    running = asyncio.ensure_future(command)
    try:
        # Unlike awaiting the task itself, this is told of the cancel in any case.
        await asyncio.wait({running})
    except asyncio.CancelledError:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        raise
    return running.result()


def open_redis(url: str, *, max_connections: int = 32) -> Redis:
    """A client for `url` that answers or fails within 0.3 s a command (0.6 s with a new connection); bytes in and out.

    Connects at the first command, inside the running loop; close it with `aclose()`. StartError on a malformed URL.
    """
    try:
        pool = BlockingConnectionPool.from_url(
            url,
            max_connections=max_connections,
            timeout=TIMEOUT_S,
            socket_timeout=TIMEOUT_S,
            socket_connect_timeout=TIMEOUT_S,
            # redis-py tries each command 10 times by default, and then a script has run twice.
            retry=Retry(NoBackoff(), 0),
            # On by default, and then the pool hands out connections without looking whether they are dead or dirty.
            maint_notifications_config=MaintNotificationsConfig(enabled=False),
        )
    except ValueError as error:
        raise StartError(f"the Redis URL cannot be used: {error}") from error
    return _Client.from_pool(pool)


@contextmanager
def redis_errors() -> Iterator[None]:
    """Turn redis-py's errors into Unavailable (no server, or one that cannot serve) or InternalError (our fault)."""
    try:
        yield
    except _LOST as error:
        raise Unavailable(f"Redis does not serve: {error}", reason="REDIS_UNAVAILABLE", retry_after_s=1.0) from error
    except exceptions.RedisError as error:
        raise InternalError(f"Redis refused a command: {error}") from error
