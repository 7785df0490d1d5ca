"""Engines as processes of this machine.

They outlive the controller: each has a session of its own and a record on disk, and the next controller takes them
over as if it had started them. They end with the launcher of the whole stack, if there is one, by its lifeline.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import psutil

from headrace.base.errors import StartError
from headrace.controller.adapters.engine_record import EngineRecord, RecordFolder
from headrace.controller.adapters.exit_text import REFUSED, describe_exit, last_line
from headrace.controller.adapters.process import LAUNCH_ENV, kill, living, terminate
from headrace.controller.core.decision import Action, Forget, Kill, Start, Stop
from headrace.controller.core.fleet import EngineId, Life, Process, Spec
from headrace.controller.ports import BundleSource, ProvisionError
from headrace.rpc.process import LIFELINE_ENV

T = TypeVar("T")

ENGINE_COMMAND = (sys.executable, "-m", "headrace.engine")


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSettings:
    """Where records and logs go, and what every engine is told besides its deployment's settings."""

    data_dir: Path
    redis_url: str
    otlp_endpoint: str = ""
    command: tuple[str, ...] = ENGINE_COMMAND


class LocalProvisioner:
    """Starts, finds and ends engine processes; StartError when `data_dir` cannot be used."""

    def __init__(self, settings: LocalSettings, bundles: BundleSource) -> None:
        self._settings = settings
        self._bundles = bundles
        self._logs = settings.data_dir / "logs"
        try:
            self._logs.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._records = RecordFolder(settings.data_dir / "engines")
        except OSError as error:
            raise StartError(f"cannot use the data folder {settings.data_dir}: {error.strerror}") from error
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._told: set[str] = set()
        # One thread: disk and process table may block, the event loop must not, and actions must not overlap.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="provisioner")

    async def observe(self) -> tuple[Process, ...]:
        """Every recorded engine. Only looks, so that a controller that does not lead may do it too."""
        return await self._in_thread(self._observe)

    async def act(self, action: Action) -> None:
        """Carry out one action; ProvisionError says why not."""
        await self._in_thread(lambda: self._act(action))

    async def stop_all(self, grace_s: float) -> None:
        """SIGTERM to every engine, SIGKILL to those left after the grace; then no record is left."""
        await self._in_thread(lambda: self._end_all(terminate))
        deadline = time.monotonic() + grace_s
        while time.monotonic() < deadline and await self._in_thread(self._any_living):
            await asyncio.sleep(0.05)
        await self._in_thread(lambda: self._end_all(kill))
        await self._in_thread(self._drop_records)

    def close(self) -> None:
        """Reap what has ended, end the thread; engines keep running."""
        for child in self._children.values():
            child.poll()
        self._thread.shutdown(wait=False)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except OSError as error:
            raise ProvisionError(error.strerror or str(error)) from error

    def _observe(self) -> tuple[Process, ...]:
        records = self._records.read_all()
        self._reap({record.launch_id for record in records})
        return tuple(self._look(record) for record in records)

    def _look(self, record: EngineRecord) -> Process:
        found = living(record)
        told = record.stopping or record.launch_id in self._told
        if found is not None:
            life = Life.STOPPING if told else Life.RUNNING
            return _process(record, life, found, last_exit=record.last_exit)
        status = self._exit_status(record)
        ended = describe_exit(status, last_line(Path(record.log_path), record.log_offset))
        life = Life.STOPPED if told else Life.CRASHED
        return _process(record, life, None, last_exit=ended, refused=status == REFUSED)

    def _act(self, action: Action) -> None:
        with self._records.exclusive():
            match action:
                case Start():
                    self._start(action)
                case Stop():
                    self._stop(action.engine_id)
                case Kill():
                    record = self._records.read(action.engine_id)
                    if record is not None and (process := living(record)) is not None:
                        kill(process)
                case Forget():
                    self._forget(action.engine_id)

    def _start(self, start: Start) -> None:
        before = self._records.read(start.engine_id)
        if before is not None and living(before) is not None:
            raise ProvisionError(f"{start.engine_id} is running already, as process {before.pid}")
        bundle = self._records.write_bundle(start.spec.bundle_digest, self._bundles(start.spec.bundle_digest))
        log_path = self._logs / f"{start.engine_id}.log"
        with open(os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as log_file:
            record = EngineRecord(
                engine_id=start.engine_id,
                deployment=start.deployment,
                spec=start.spec,
                launch_id=uuid.uuid4().hex,
                starts=start.starts,
                failures=start.failures,
                last_exit=start.last_exit,
                log_path=str(log_path),
                log_offset=log_file.seek(0, 2),
            )
            # Written before the process exists: whenever we die, a record leads to every process.
            self._records.write(record)
            lifeline = os.environ.get(LIFELINE_ENV)
            child = subprocess.Popen(
                [*self._settings.command, *_flags(start.spec)],
                env=self._environ(record, bundle),
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=log_file,
                pass_fds=(int(lifeline),) if lifeline else (),
                start_new_session=True,
            )
        self._children[record.launch_id] = child
        try:
            created = psutil.Process(child.pid).create_time()
        except psutil.NoSuchProcess:  # gone already; the next observation says how
            created = time.time()
        self._records.write(replace(record, pid=child.pid, created=created))

    def _stop(self, engine_id: EngineId) -> None:
        record = self._records.read(engine_id)
        if record is None or record.stopping or (process := living(record)) is None:
            return
        # Signal first: were it the other way round, a controller killed in between would leave an engine that is
        # recorded as draining and never was told. Once only, as a second SIGTERM makes an engine hurry.
        if record.launch_id not in self._told:
            terminate(process)
            self._told.add(record.launch_id)
        self._records.write(replace(record, stopping=True))

    def _forget(self, engine_id: EngineId) -> None:
        record = self._records.read(engine_id)
        if record is not None and living(record) is None:
            self._records.remove(engine_id)

    def _end_all(self, end: Callable[[psutil.Process], None]) -> None:
        for record in self._records.read_all():
            process = living(record)
            if process is not None and not (end is terminate and (record.stopping or record.launch_id in self._told)):
                self._told.add(record.launch_id)
                end(process)

    def _any_living(self) -> bool:
        return any(process.life in (Life.RUNNING, Life.STOPPING) for process in self._observe())

    def _drop_records(self) -> None:
        for record in self._records.read_all():
            if (child := self._children.get(record.launch_id)) is not None:
                child.wait(5)  # killed: gone as soon as the kernel has cleaned up
            self._forget(record.engine_id)

    def _exit_status(self, record: EngineRecord) -> int | None:
        child = self._children.get(record.launch_id)
        return None if child is None else child.poll()

    def _reap(self, recorded: set[str]) -> None:
        """Take the exit status of ended children; keep it for as long as the record lives."""
        for launch_id, child in list(self._children.items()):
            if child.poll() is not None and launch_id not in recorded:
                del self._children[launch_id]
                self._told.discard(launch_id)

    def _environ(self, record: EngineRecord, bundle: Path) -> Mapping[str, str]:
        # Settings of engines come from their deployment alone, or replicas of one spec would differ by their starter.
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("HEADRACE_ENGINE_", "HEADRACE_CONTROLLER_"))}
        own = {
            LAUNCH_ENV: record.launch_id,
            "HEADRACE_ENGINE_ENGINE_ID": record.engine_id,
            "HEADRACE_ENGINE_DEPLOYMENT": record.deployment,
            "HEADRACE_ENGINE_BUNDLE": str(bundle),
            "HEADRACE_ENGINE_BACKEND": record.spec.backend,
            "HEADRACE_ENGINE_ADDRESS": "127.0.0.1:0",
            # In the environment, which only this user can read, as the URL holds a password.
            "HEADRACE_REDIS_URL": self._settings.redis_url,
        }
        if self._settings.otlp_endpoint:
            own["HEADRACE_OTLP_ENDPOINT"] = self._settings.otlp_endpoint
        return kept | own


def _flags(spec: Spec) -> list[str]:
    """A deployment's engine settings as flags: an unknown flag is refused, an unknown variable would be ignored."""
    return [f"--{name.replace('_', '-')}={value}" for name, value in spec.settings]


def _process(
    record: EngineRecord, life: Life, found: psutil.Process | None, *, last_exit: str, refused: bool = False
) -> Process:
    started_at = record.created
    if started_at is None:
        started_at = 0.0 if found is None else found.create_time()
    return Process(
        engine_id=record.engine_id,
        deployment=record.deployment,
        spec=record.spec,
        pid=record.pid or (found.pid if found else 0),
        started_at=started_at,
        life=life,
        starts=record.starts,
        failures=record.failures,
        last_exit=last_exit,
        refused=refused,
        log_path=record.log_path,
    )
