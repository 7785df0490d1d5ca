"""The `headrace` command run as a user runs it: once to its end, as a stack that stays up, on a terminal."""

from __future__ import annotations

import asyncio
import os
import pty
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from headrace.cli.home import Home, same_process
from headrace.cli.mark import alive, marked
from headrace.testkit.eventually import eventually

HEADRACE = str(Path(sys.executable).with_name("headrace"))
WITHIN_S = 60.0


def environ(home: Path) -> dict[str, str]:
    """Our environment without Headrace's variables, pointed at the data folder `home`."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("HEADRACE_")}
    return kept | {"HEADRACE_HOME": str(home), "PYTHONUNBUFFERED": "1"}


@dataclass(frozen=True, slots=True)
class Ran:
    """How one command ended and what it wrote."""

    status: int
    out: str
    err: str


async def headrace(home: Path, *args: str, given: bytes = b"") -> Ran:
    """Run one command to its end."""
    process = await asyncio.create_subprocess_exec(
        HEADRACE,
        *args,
        env=environ(home),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(WITHIN_S):
            out, err = await process.communicate(given)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert "Traceback" not in err.decode()
    return Ran(process.returncode or 0, out.decode(), err.decode())


class Up:
    """A running `headrace up` whose output goes to a file; killed with all that is its own at `close`."""

    def __init__(self, home: Path, *args: str) -> None:
        self.home = Home(home)
        self.output = home.with_name(f"{home.name}-output")
        self._stores: set[psutil.Process] = set()
        with self.output.open("wb") as file:
            self.process = subprocess.Popen(
                [HEADRACE, "up", *args],
                env=environ(home),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    @property
    def text(self) -> str:
        """All it has said so far."""
        return self.output.read_text()

    async def until(self, text: str, *, within_s: float = WITHIN_S) -> None:
        """Wait until it has said `text`."""

        def said() -> bool:
            if self.process.poll() is not None and text not in self.text:
                raise RuntimeError(f"it ended with {self.process.returncode} and never said {text!r}:\n{self.text}")
            return text in self.text

        await eventually(said, within_s=within_s)
        self.processes()  # takes note of the stores while their record is there

    async def ended(self, *, within_s: float = WITHIN_S) -> int:
        """Wait for its end; its exit status."""
        await eventually(lambda: self.process.poll() is not None, within_s=within_s)
        return self.process.returncode

    def processes(self) -> list[psutil.Process]:
        """All living processes of the stack but the launcher: by the mark, by the data folder, by its own record."""
        record = self.home.last_record()
        if record is not None:
            for name in ("etcd", "redis"):
                if same_process(record.processes[name], record.create_times[name]):
                    self._stores.add(psutil.Process(record.processes[name]))
        path = str(self.home.path)
        by_folder = {p for p in psutil.process_iter() if any(path in word for word in _command(p))}
        found = {*marked(self.home.mark), *by_folder, *self._stores}
        return [p for p in found if p.pid != self.process.pid and alive(p)]

    async def assert_nothing_left(self, *, within_s: float = 5.0) -> None:
        """No process of the stack is left, nor a record that says it runs."""
        await eventually(lambda: not self.processes(), within_s=within_s)
        assert self.home.record() is None

    def close(self) -> None:
        """Kill the launcher and whatever of its stack still runs."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        for process in self.processes():
            process.kill()


def _command(process: psutil.Process) -> Sequence[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return ()


class Generating:
    """A `headrace generate` that has begun to print."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    @classmethod
    async def begin(cls, home: Path, tokens: int) -> Generating:
        """Start it and wait for the first character."""
        process = await asyncio.create_subprocess_exec(
            HEADRACE,
            "generate",
            "Once upon a time",
            "--max-tokens",
            str(tokens),
            env=environ(home),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        async with asyncio.timeout(WITHIN_S):
            assert await process.stdout.read(1)
        return cls(process)

    async def ended(self) -> Ran:
        """Wait for its end; `out` lacks the first character."""
        async with asyncio.timeout(WITHIN_S):
            out, err = await self.process.communicate()
        return Ran(self.process.returncode or 0, out.decode(), err.decode())


class Terminal:
    """A command on a terminal of its own."""

    def __init__(self, home: Path, *args: str) -> None:
        self._master, slave = pty.openpty()
        os.set_blocking(self._master, False)
        self.process = subprocess.Popen(
            [HEADRACE, *args],
            env=environ(home) | {"TERM": "dumb"},
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
        )
        os.close(slave)
        self.text = ""

    def type(self, text: str) -> None:
        """What the user types."""
        os.write(self._master, text.encode())

    async def until(self, text: str) -> str:
        """Wait for `text`; returns what came up to its end, and forgets it."""

        def came() -> bool:
            try:
                self.text += os.read(self._master, 65536).decode(errors="replace")
            except BlockingIOError:
                pass
            return text in self.text

        await eventually(came, within_s=WITHIN_S)
        before, self.text = self.text.split(text, 1)
        return before

    def close(self) -> None:
        """End the command and the terminal."""
        self.process.kill()
        self.process.wait(10)
        os.close(self._master)
