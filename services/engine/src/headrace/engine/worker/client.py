"""The gRPC shell's side of the worker process: start it, feed it, hear from it, end it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence

from headrace.base.deadline import Deadline
from headrace.base.errors import StartError
from headrace.engine.core.placement import USUAL, Placement
from headrace.engine.core.sampling_plan import SamplingPlan
from headrace.engine.worker.config import WorkerConfig
from headrace.engine.worker.inbox import Inbox
from headrace.engine.worker.messages import (
    Abort,
    Command,
    Configure,
    Failed,
    LongStep,
    Ping,
    Report,
    StartFailed,
    StepEvent,
    Submit,
    WorkerReady,
    encode,
)

__all__ = ["StepEvent", "WorkerClient", "WorkerConfig", "WorkerDied", "WorkerReady"]

_EXIT_S = 5.0


class WorkerDied(Exception):
    """The worker process ended by itself; the text says how, with the worker's own words if it had any."""


def _failure(failed: Failed) -> str:
    return f"the engine's worker failed: {failed.text}"


def _ignore(silent_s: float) -> None:
    pass


class WorkerClient:
    """One worker process. Every method belongs to the event loop that called `start`.

    Call `start` from the process's main thread: the kernel ends the worker when the thread that started it ends.
    """

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._inbox = Inbox()
        self._transport: asyncio.WriteTransport | None = None
        self._stopping = False
        self._last_id = 0
        # Told of every report, and how long the worker may be silent after it, beyond the time of an ordinary step.
        self.on_report: Callable[[float], None] = _ignore

    async def start(self, config: WorkerConfig, *, timeout_s: float = 300.0) -> WorkerReady:
        """Start the worker and wait until it has warmed up.

        StartError with the worker's own words when it cannot start, or when `timeout_s` passes; the process is gone
        then.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._spawn()
                self._send(Configure(config=config))
                report = await self._receive()
        except TimeoutError:
            await self.stop(grace_s=0.0)
            raise StartError(f"the engine's worker was not ready after {timeout_s:g} s") from None
        except WorkerDied as death:
            await self.stop(grace_s=0.0)
            raise StartError(str(death)) from None
        except asyncio.CancelledError:
            await self.stop(grace_s=0.0)
            raise
        if isinstance(report, WorkerReady):
            return report
        await self.stop()
        raise StartError(report.text if isinstance(report, StartFailed) else f"the engine's worker sent {report!r}")

    @property
    def pid(self) -> int:
        """The worker's process id."""
        if self._process is None:
            raise RuntimeError("the worker has not been started")
        return self._process.pid

    def submit(
        self,
        token_ids: Sequence[int],
        plan: SamplingPlan,
        *,
        deadline: Deadline,
        n: int = 1,
        emitted_tokens: int = 0,
        placement: Placement = USUAL,
    ) -> int:
        """Hand over `n` sequences with one prompt; the first one's id, counted from 1, the others' follow.

        Never waits and never refuses. See Submit for the arguments.

        A submission the engine cannot serve (empty, out of the vocabulary, too long, queue full, bad sampling values)
        comes back as a Finish with reason ERROR and a Problem. `plan.max_tokens` is capped to the context.
        """
        first = self._last_id + 1
        self._last_id += n
        self._send(
            Submit(
                sequence_id=first,
                token_ids=list(token_ids),
                plan=plan,
                arrived_at=time.monotonic(),
                deadline_at=deadline.at,
                n=n,
                emitted_tokens=emitted_tokens,
                placement=placement,
            )
        )
        return first

    def abort(self, sequence_id: int) -> None:
        """End a sequence within one step; a Finish with reason CANCELLED follows unless it has already finished."""
        self._send(Abort(sequence_id=sequence_id))

    def ping(self) -> None:
        """Make it speak: an event follows between two steps."""
        self._send(Ping())

    def kill(self) -> None:
        """End it at once, even if it is stopped; `follow` raises WorkerDied."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def follow(self, take: Callable[[StepEvent], None]) -> None:
        """Call `take` with every event from now on, as it comes, until `stop`; WorkerDied if the process just dies.

        `take` must not wait; what it raises is raised here. Nothing lies between it and the socket, so that it costs a
        step no more than the call, and a `take` that is slow holds the worker back.
        """
        failed: list[Failed] = []

        def note(report: Report) -> bool:
            if isinstance(report, Failed):
                failed.append(report)
                return False
            self.on_report(report.may_take_s if isinstance(report, LongStep) else 0.0)
            if isinstance(report, StepEvent):
                take(report)
            return True

        await self._inbox.follow(note)
        if not self._stopping:
            raise WorkerDied(_failure(failed[0]) if failed else await self._how_it_ended())

    async def stop(self, *, grace_s: float = 2.0) -> None:
        """End the worker now, whatever it is doing; sequences still in it are forgotten. May be called twice.

        It exits by itself after the step it is in; after `grace_s` it is killed.
        """
        self._stopping = True
        if self._transport is not None:
            self._transport.close()
        if self._process is None:
            return
        try:
            async with asyncio.timeout(grace_s):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    async def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            loop = asyncio.get_running_loop()
            self._transport, _ = await loop.create_connection(lambda: self._inbox, sock=ours)
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "headrace.engine.worker", str(theirs.fileno()), str(os.getpid())),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                # A terminal's Ctrl-C goes to the shell's whole group; the shell drains, and the worker must still work.
                start_new_session=True,
            )

    def _send(self, command: Command) -> None:
        if self._transport is None:
            raise RuntimeError("the worker has not been started")
        if not self._transport.is_closing():  # else there is nobody to tell, and whoever follows hears why
            self._transport.write(encode(command))

    async def _receive(self) -> Report:
        """The next report; WorkerDied when there is none to come."""
        report = await self._inbox.next()
        if report is None:
            raise WorkerDied(await self._how_it_ended())
        if isinstance(report, Failed):
            raise WorkerDied(_failure(report))
        return report

    async def _how_it_ended(self) -> str:
        assert self._process is not None
        try:
            async with asyncio.timeout(_EXIT_S):
                code = await self._process.wait()
        except TimeoutError:
            return f"the engine's worker (pid {self._process.pid}) closed its socket and still runs"
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        return f"the engine's worker (pid {self._process.pid}) {how}"
