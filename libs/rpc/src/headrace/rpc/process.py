"""How every service process starts, runs and ends."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import structlog
import uvloop

from headrace.base import settings
from headrace.base.errors import StartError
from headrace.base.turns import stand_back, take_short_turns
from headrace.rpc.garbage import collect_forever, set_aside, take_back

log = structlog.get_logger(__name__)
S = TypeVar("S")

LIFELINE_ENV = "HEADRACE_LIFELINE_FD"
"""Inherited read end of a pipe whose only write end the launcher holds: end of file means it died."""

RELEASE_WITHIN_S = 10.0
CANCEL_AGAIN_S = 2.0


class App(Protocol):
    """A service: three phases, each awaited once, in this order."""

    async def start(self) -> None:
        """Bind, connect, load; StartError when the operator has to mend something."""

    async def run(self) -> None:
        """Work until cancelled; returning or raising ends the process with a non-zero status."""

    async def drain(self) -> None:
        """Finish or hand back what is in hand, then release everything; bounded in time. Also after a failed start."""


def run(
    service: str,
    settings_type: type[S],
    app_type: Callable[[S], App],
    description: str,
    argv: list[str] | None = None,
    *,
    awaited: bool = True,
) -> int:
    """Parse settings, run the app until a signal, drain it; returns the exit status.

    0: asked to stop and drained. 1: could not start, or a loop of its own died. A second signal hurries the drain.
    `awaited`: whether streams wait for its work; otherwise it stands back from cores that others want.
    """
    take_short_turns() if awaited else stand_back()
    try:
        values = settings.load(
            settings_type,
            service=service,
            argv=sys.argv[1:] if argv is None else argv,
            environ=os.environ,
            description=description,
        )
        return uvloop.run(_live(service, app_type, values))
    except StartError as error:
        print(f"headrace {service}: {error}", file=sys.stderr, flush=True)
        return 1
    finally:
        # gRPC's calls are cycles; a TLS connection found in one only at the interpreter's end makes that 2 s late.
        take_back()


async def _live(service: str, app_type: Callable[[S], App], values: S) -> int:
    stop, hurry = asyncio.Event(), asyncio.Event()
    _watch_signals(stop, hurry)
    _watch_lifeline(stop)
    app = app_type(values)
    starting = asyncio.ensure_future(app.start())
    if not await _first(starting, stop):
        await _cancel(starting)
        return await _drain(service, app, hurry, 0)
    try:
        await starting
    except StartError:
        await _release(service, app)
        raise
    set_aside()
    collecting = asyncio.ensure_future(collect_forever())
    running = asyncio.ensure_future(app.run())
    status = 0
    if await _first(running, stop):
        status = 1
        error = running.exception()
        log.error("service_failed", service=service, exc_info=error)
    await _cancel(running)
    status = await _drain(service, app, hurry, status)
    await _cancel(collecting)
    return status


async def _release(service: str, app: App) -> None:
    """Guard 2 of 3: let go of what had started before the start failed; that failure is the one to report."""
    try:
        async with asyncio.timeout(RELEASE_WITHIN_S):
            await app.drain()
    except Exception as error:
        log.warning("release_failed", service=service, exc_info=error)


async def _first(work: asyncio.Future[None], stop: asyncio.Event) -> bool:
    """Wait for either; True when `work` ended first."""
    stopping: asyncio.Future[Any] = asyncio.ensure_future(stop.wait())
    both: set[asyncio.Future[Any]] = {work, stopping}
    await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    await _cancel(stopping)
    return work.done()


async def _drain(service: str, app: App, hurry: asyncio.Event, status: int) -> int:
    draining = asyncio.ensure_future(app.drain())
    if not await _first(draining, hurry):
        log.warning("drain_hurried", service=service)
        await _cancel(draining)
        return status or 1
    await draining
    log.info("service_stopped", service=service, status=status)
    return status


async def _cancel(work: asyncio.Future[Any]) -> None:
    """Cancel and wait for the end; asks again, and says so, where some library has lost the first cancel."""
    work.cancel()
    while not (await asyncio.wait({work}, timeout=CANCEL_AGAIN_S))[0]:
        log.warning("cancel_repeated", work=str(work))
        work.cancel()


def _watch_signals(stop: asyncio.Event, hurry: asyncio.Event) -> None:
    def on_signal() -> None:
        (hurry if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)


def _watch_lifeline(stop: asyncio.Event) -> None:
    given = os.environ.get(LIFELINE_ENV, "")
    if not given:
        return
    descriptor = int(given)
    loop = asyncio.get_running_loop()

    def on_readable() -> None:
        loop.remove_reader(descriptor)
        log.warning("launcher_died")
        stop.set()

    try:
        os.set_blocking(descriptor, False)
        loop.add_reader(descriptor, on_readable)
    except OSError as error:
        raise StartError(f"{LIFELINE_ENV}={given} is not an open pipe ({error.strerror}); unset it") from error
