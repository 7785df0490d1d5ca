"""The data folder of one local stack: what lies where, who holds it, and how others find the running stack."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

import psutil

from headrace.base.errors import StartError
from headrace.cli.internal_tls import internal_environ


@dataclass(frozen=True, slots=True, kw_only=True)
class StackRecord:
    """What a running stack says of itself: its launcher and the address (host:port) of each service."""

    pid: int
    create_time: float
    addresses: dict[str, str]
    metrics: dict[str, str]
    processes: dict[str, int]
    create_times: dict[str, float]
    tls_folder: str = ""
    """Where the certificates for calls between its services lie; "" when those are plain."""

    @property
    def alive(self) -> bool:
        """Whether the launcher of this record still runs (a reused pid has another start time)."""
        return same_process(self.pid, self.create_time)


def same_process(pid: int, create_time: float) -> bool:
    """Whether `pid` is the process that started at `create_time` (unix seconds) and is not a zombie."""
    try:
        process = psutil.Process(pid)
        return abs(process.create_time() - create_time) < 1.0 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def write_private(path: Path, text: str) -> None:
    """Write a file that only this user can read, atomically; StartError says why not."""
    temporary = path.with_suffix(path.suffix + ".new")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        temporary.replace(path)
    except OSError as error:
        raise StartError(f"cannot write {path}: {error.strerror}") from error


class Home:
    """Paths under one data folder, created private (0700)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.logs = path / "logs"
        self.stack_file = path / "stack.json"
        self.key_file = path / "api-key"
        self.tls = path / "tls"
        self._lock: IO[str] | None = None

    @classmethod
    def default(cls) -> Home:
        """HEADRACE_HOME, else the user's data folder by the XDG rule."""
        given = os.environ.get("HEADRACE_HOME")
        if given:
            return cls(Path(given).expanduser().absolute())
        data = os.environ.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
        return cls(Path(data) / "headrace")

    def create(self) -> None:
        """Make the folder; StartError names it when that is impossible."""
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.logs.mkdir(exist_ok=True, mode=0o700)
            probe = self.path / ".write-probe"
            # 1 MiB, synced: a full disk answers here, in words, instead of somewhere inside etcd.
            with probe.open("wb") as file:
                file.write(b"\0" * (1 << 20))
                file.flush()
                os.fsync(file.fileno())
            probe.unlink()
        except OSError as error:
            raise StartError(
                f"cannot use the data folder {self.path}: {error.strerror}; set HEADRACE_HOME to a folder with space"
            ) from error

    @property
    def mark(self) -> str:
        """What processes of this folder's stack carry in their environment, see `headrace.cli.mark`."""
        return str(self.path.resolve())

    def lock(self) -> None:
        """Hold the folder until `release`, or the process's end in any way; StartError when another stack holds it."""
        try:
            file = (self.path / "lock").open("a")
        except OSError as error:
            raise StartError(f"cannot use the data folder {self.path}: {error.strerror} (lock)") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            record = self.record()
            who = f" (process {record.pid})" if record else ""
            raise StartError(
                f"a stack already runs on {self.path}{who}: use it, stop it with `headrace down`, "
                "or set HEADRACE_HOME to another folder"
            ) from None
        self._lock = file

    def release(self) -> None:
        """Let go of the folder; harmless when it is not held."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def clear_past(self) -> None:
        """Set the logs of the stack before this one aside (as .log.1) and drop its engine records.

        For the holder of the lock, once nothing of that stack runs any more: its records speak of nobody, and
        its logs would be taken for ours.
        """
        for log in self.logs.glob("*.log"):
            log.replace(log.with_suffix(".log.1"))
        shutil.rmtree(self.path / "engines", ignore_errors=True)

    def write_record(self, record: StackRecord) -> None:
        """Publish the running stack, atomically."""
        write_private(self.stack_file, json.dumps(asdict(record), indent=1))

    def record(self) -> StackRecord | None:
        """The stack that runs on this folder; None when none does."""
        record = self.last_record()
        return record if record is not None and record.alive else None

    def clear_record(self) -> None:
        """Withdraw the record."""
        self.stack_file.unlink(missing_ok=True)

    def last_record(self) -> StackRecord | None:
        """The newest record, whether or not its launcher still runs."""
        try:
            return StackRecord(**json.loads(self.stack_file.read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def running(self) -> StackRecord:
        """The running stack; StartError says how to start one.

        With TLS between its services, this process is one more member: its calls use their certificates from here on.
        """
        record = self.record()
        if record is None:
            raise StartError(f"no stack is up on {self.path}: start one with `headrace up`")
        if record.tls_folder:
            os.environ.update(internal_environ(Path(record.tls_folder)))
        return record
