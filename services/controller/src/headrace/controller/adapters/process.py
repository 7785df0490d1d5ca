"""Which process a record speaks of, if it still runs; never another one that was given its pid."""

from __future__ import annotations

import psutil

from headrace.controller.adapters.engine_record import EngineRecord

LAUNCH_ENV = "HEADRACE_LAUNCH_ID"

# psutil derives start times from the boot time, which clock adjustments move a little; no pid comes round in a second.
_SAME_START_S = 1.0


def living(record: EngineRecord) -> psutil.Process | None:
    """The record's process; None when it has ended (a zombie has)."""
    if record.pid is None or record.created is None:
        return _find(record.launch_id)
    try:
        process = psutil.Process(record.pid)
        same_start = abs(process.create_time() - record.created) < _SAME_START_S
        # A clock that was set moves all start times: then the environment it was started with still tells.
        if process.status() == psutil.STATUS_ZOMBIE or not (same_start or _launch_of(process) == record.launch_id):
            return None
        return process
    except psutil.NoSuchProcess:
        return None


def terminate(process: psutil.Process) -> None:
    """SIGTERM to the process alone: it ends its own children in order."""
    try:
        process.terminate()
    except psutil.NoSuchProcess:
        pass


def kill(process: psutil.Process) -> None:
    """SIGKILL to the process, so that it starts no more children, then to all it had."""
    try:
        family = [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for member in family:
        try:
            member.kill()
        except psutil.NoSuchProcess:
            continue


def _find(launch_id: str) -> psutil.Process | None:
    """Search all processes; children inherit the environment, so the oldest match is the engine itself."""
    matches = [process for process in psutil.process_iter() if _launch_of(process) == launch_id]
    return min(matches, key=_created, default=None)


def _launch_of(process: psutil.Process) -> str | None:
    try:
        return process.environ().get(LAUNCH_ENV)
    except (psutil.Error, OSError):
        return None


def _created(process: psutil.Process) -> float:
    try:
        return process.create_time()
    except psutil.NoSuchProcess:
        return float("inf")
