"""One service process started from here: environment, log file, lifeline, and an end bounded in time."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from headrace.base.errors import StartError
from headrace.rpc.process import LIFELINE_ENV

LAST_WORDS_BYTES = 16_384
"""How much of a log's end is read for its last line: more than any traceback of ours."""


class Lifeline:
    """A pipe whose write end only this process holds: when it dies, however, its children read end of file."""

    def __init__(self) -> None:
        self.read_fd, self._write_fd = os.pipe()
        os.set_inheritable(self._write_fd, False)

    def cut(self) -> None:
        """Let go of both ends."""
        for descriptor in (self.read_fd, self._write_fd):
            os.close(descriptor)


@dataclass(slots=True, kw_only=True)
class Child:
    """A service: how to start it, and its newest process."""

    name: str
    command: Sequence[str]
    environ: Mapping[str, str]
    log_path: Path
    lifeline: Lifeline | None = None
    starts: int = 0
    _log_offset: int = 0
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def start(self) -> None:
        """Start the process; its output is appended to the log file."""
        environ = dict(os.environ) | dict(self.environ)
        environ.pop(LIFELINE_ENV, None)
        passed: tuple[int, ...] = ()
        if self.lifeline is not None:
            environ[LIFELINE_ENV] = str(self.lifeline.read_fd)
            passed = (self.lifeline.read_fd,)
        try:
            with self.log_path.open("ab") as log:
                self._log_offset = log.tell()
                self._process = subprocess.Popen(
                    list(self.command),
                    env=environ,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=passed,
                    # Ctrl-C in the terminal is for the launcher, which then drains its children in order.
                    start_new_session=True,
                )
        except OSError as error:
            raise StartError(f"cannot start {self.name}: {error.strerror} ({self.log_path})") from error
        self.starts += 1

    @property
    def pid(self) -> int:
        """Process id of the newest start; 0 before the first."""
        return self._process.pid if self._process else 0

    @property
    def exit_status(self) -> int | None:
        """None while it runs; negative for a signal, as subprocess has it."""
        return self._process.poll() if self._process else None

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._process is not None and self._process.poll() is None

    def terminate(self) -> None:
        """Ask it to drain."""
        if self._process and self.alive:
            self._process.terminate()

    def wait(self, grace_s: float) -> bool:
        """Wait for its end, then kill it and its own children; True when it ended by itself."""
        if self._process is None:
            return True
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            kill_tree(self._process.pid)
            self._process.wait(5)
            return False
        return True

    def stop(self, grace_s: float = 10.0) -> bool:
        """Drain it and wait; True when it ended by itself."""
        self.terminate()
        return self.wait(grace_s)

    def kill(self) -> None:
        """SIGKILL to the process itself, none of its children; for fault tests."""
        if self._process:
            self._process.kill()
            self._process.wait(5)

    def last_words(self) -> str:
        """How its newest start ended, in its own words if it had any; for people."""
        status = self.exit_status
        # What was logged before a kill has nothing to do with its end.
        if status is not None and status < 0:
            return f"killed by {signal.Signals(-status).name}"
        return last_line(self.log_path, self._log_offset) or f"status {status}, nothing said"


def last_line(log: Path, offset: int = 0) -> str:
    """Why a process ended, by its log after `offset`: its last error, or else its last line; of JSON, what it says."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(offset, size - LAST_WORDS_BYTES))
            lines = [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    except OSError:
        return ""
    entries = [_entry(line) for line in reversed(lines)]
    errors = (entry for entry in entries if entry["level"] in ("error", "critical"))
    chosen = next(errors, entries[0] if entries else {})
    words = [str(chosen[key]) for key in ("event", "reason", "error") if chosen.get(key)]
    words += str(chosen.get("exception", "")).strip().splitlines()[-1:]
    return ": ".join(words)


def _entry(line: str) -> dict[str, Any]:
    """A log line as its fields; text that is no log line of ours (a refusal, a traceback) counts as an error."""
    try:
        entry = json.loads(line)
    except ValueError:
        entry = None
    if isinstance(entry, dict) and "event" in entry:
        return {"level": ""} | entry
    return {"level": "error", "event": line.strip()}


def kill_tree(pid: int) -> None:
    """SIGKILL a process and all its descendants."""
    try:
        root = psutil.Process(pid)
        family = [*root.children(recursive=True), root]
    except psutil.NoSuchProcess:
        return
    for process in family:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


def python_module(module: str, *args: str) -> list[str]:
    """The command that runs a module of this installation."""
    return [sys.executable, "-m", module, *args]


def free_port() -> int:
    """A TCP port on 127.0.0.1 that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def port_is_free(port: int) -> bool:
    """Whether 127.0.0.1:`port` can be bound now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
