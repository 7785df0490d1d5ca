"""The mark of a stack: a variable in the environment of all its processes, whoever started them.

A pid file can miss a process that was started a moment before a crash; the environment cannot.
"""

from __future__ import annotations

import os
import time

import psutil

from headrace.base.errors import StartError

MARK_ENV = "HEADRACE_STACK"


def marked(mark: str) -> list[psutil.Process]:
    """Living processes of this user that carry `mark`; never this one."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(MARK_ENV) == mark and alive(process):
                found.append(process)
        except (psutil.Error, OSError):  # ended meanwhile, or another user's
            continue
    return found


def kill_marked(mark: str, *, within_s: float = 5.0) -> list[str]:
    """SIGKILL all that carry `mark` and wait until they are gone; returns what they were, for people.

    Twice, because one of them may have started another between our look and its end.
    """
    killed: list[str] = []
    for _ in range(2):
        processes = marked(mark)
        killed += [_describe(process) for process in processes]
        for process in processes:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        deadline = time.monotonic() + within_s
        while left := [process for process in processes if alive(process)]:
            if time.monotonic() > deadline:
                pids = ", ".join(str(process.pid) for process in left)
                raise StartError(f"processes {pids} of a stack do not end, not even by SIGKILL")
            time.sleep(0.02)
    return killed


def alive(process: psutil.Process) -> bool:
    """Whether it runs; a zombie does not, and in a container nobody may ever come to reap it."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _describe(process: psutil.Process) -> str:
    """E.g. "headrace.router (4711)"."""
    try:
        words = [word for word in process.cmdline() if word.startswith("headrace.")]
        return f"{words[0] if words else process.name()} ({process.pid})"
    except psutil.Error:
        return str(process.pid)
