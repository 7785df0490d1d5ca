"""A server as a child process that cannot outlive us, and the wait until it answers."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from headrace.base.errors import StartError
from headrace.coord.embedded import tether

_POLL_S = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """A server's place in `data_dir`, claimed for one process at a time."""

    log: Path
    lock_fd: int


@contextmanager
def claimed_home(data_dir: Path, name: str) -> Iterator[Home]:
    """Make `data_dir/<name>` and a fresh `data_dir/logs/<name>.log` (the one before becomes `.log.1`).

    The claim lasts as long as the child started inside the block, or the block if there is none. StartError when
    the folder cannot be written, or a running server has claimed it.
    """
    try:
        (data_dir / name).mkdir(mode=0o700, parents=True, exist_ok=True)
        lock_fd = os.open(data_dir / f"{name}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise StartError(f"{name} cannot write to {data_dir}: {error.strerror}") from error
    try:
        _lock(lock_fd, within_s=0.5)
        yield Home(log=_fresh_log(data_dir, name), lock_fd=lock_fd)
    except BlockingIOError as error:
        raise StartError(f"{name} cannot use {data_dir}: another one is running there") from error
    except OSError as error:
        raise StartError(f"{name} cannot write to {data_dir}: {error.strerror}") from error
    finally:
        os.close(lock_fd)


def _fresh_log(data_dir: Path, name: str) -> Path:
    log = data_dir / "logs" / f"{name}.log"
    log.parent.mkdir(exist_ok=True)
    if log.exists():
        log.replace(log.with_suffix(".log.1"))
    log.touch()
    return log


def _lock(fd: int, *, within_s: float) -> None:
    """Lock the file, or BlockingIOError. A process killed a moment ago holds its locks for some milliseconds."""
    deadline = time.monotonic() + within_s
    while True:
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
        time.sleep(_POLL_S)


def last_line(lines: Sequence[str]) -> str:
    """The newest line that says something."""
    return next((line.strip() for line in reversed(lines) if line.strip()), "it left no word in its log")


class Child:
    """A running child that writes to the home's log and holds its lock; the kernel kills it when we end in any way."""

    def __init__(self, command: Sequence[str], *, home: Home, env: Mapping[str, str]) -> None:
        self.log = home.log
        self._ended = threading.Event()
        started: Future[subprocess.Popen[bytes]] = Future()
        # The kernel sends the death signal when the *thread* that forked ends, so a thread that does nothing
        # but wait for the child forks it: start() may then be called from a short-lived worker thread.
        owner = threading.Thread(target=self._own, args=(command, home, env, started), daemon=True)
        owner.start()
        self._process = started.result()
        self.pid = self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; -N when signal N ended it."""
        return self._process.returncode if self._ended.is_set() else None

    def await_answer(
        self,
        probe: Callable[[], bool],
        *,
        name: str,
        timeout_s: float,
        explain: Callable[[Sequence[str]], str] = last_line,
    ) -> None:
        """Return when `probe` says yes; StartError when the child ends first or time is up. An error kills it.

        `explain` finds in the lines of the log what went wrong.
        """
        deadline = time.monotonic() + timeout_s
        try:
            while not probe():
                if self._ended.wait(_POLL_S):
                    raise StartError(
                        f"{name} ended with code {self.exit_code} while starting: {explain(self._lines())}"
                    )
                if time.monotonic() > deadline:
                    raise StartError(f"{name} did not answer within {timeout_s:g} s: {explain(self._lines())}")
        except BaseException:
            self.kill()
            raise

    def stop(self, *, grace_s: float) -> None:
        """SIGTERM, then SIGKILL after `grace_s`; returns when it has ended. Harmless on an ended child."""
        if self.exit_code is None:
            # A stopped (SIGSTOP) process takes SIGTERM only once it continues.
            self._process.send_signal(signal.SIGTERM)
            self._process.send_signal(signal.SIGCONT)
            if not self._ended.wait(grace_s):
                self.kill()

    def kill(self) -> None:
        """SIGKILL; returns when it has ended."""
        self._process.kill()
        self._ended.wait()

    def _lines(self) -> Sequence[str]:
        return self.log.read_text(errors="replace").splitlines()

    def _own(
        self, command: Sequence[str], home: Home, env: Mapping[str, str], started: Future[subprocess.Popen[bytes]]
    ) -> None:
        tethered = [sys.executable, "-I", "-S", tether.__file__, str(os.getpid()), *command]
        try:
            with home.log.open("wb") as output:
                process = subprocess.Popen(
                    tethered,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=env,
                    # The lock goes with the open file; once we close it, the child alone holds it.
                    pass_fds=[home.lock_fd],
                    # Ctrl-C in the terminal goes to the whole process group; the servers must outlive our drain.
                    start_new_session=True,
                )
        except OSError as error:
            started.set_exception(error)
            return
        started.set_result(process)
        process.wait()
        self._ended.set()
