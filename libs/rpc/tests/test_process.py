"""A service process as its operator meets it: signals, lifeline, failures, help."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = '''
import asyncio, sys
from dataclasses import dataclass
from headrace.base.errors import StartError
from headrace.base.settings import knob
from headrace.rpc.process import run

@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """A demo."""
    mode: str = knob("serve", help="what to do")
    drain_s: float = knob(0.0, help="how long a drain takes, in seconds", least=0)

class App:
    def __init__(self, settings): self.settings = settings
    async def start(self):
        if self.settings.mode == "refuse": raise StartError("no room: free some")
        print("started", flush=True)
    async def run(self):
        if self.settings.mode == "fail": raise RuntimeError("loop died")
        if self.settings.mode == "return": return
        await asyncio.Event().wait()
    async def drain(self):
        await asyncio.sleep(self.settings.drain_s)
        print("drained", flush=True)

sys.exit(run("demo", Settings, App, "A demo service."))
'''


def start(tmp_path: Path, *args: str, lifeline: int | None = None) -> subprocess.Popen[str]:
    program = tmp_path / "demo.py"
    program.write_text(PROGRAM)
    environ = dict(os.environ)
    if lifeline is not None:
        environ["HEADRACE_LIFELINE_FD"] = str(lifeline)
    return subprocess.Popen(
        [sys.executable, str(program), *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environ,
        pass_fds=() if lifeline is None else (lifeline,),
    )


def end(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=10)
    return process.returncode, out, err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_exits_zero(tmp_path: Path, number: signal.Signals) -> None:
    process = start(tmp_path)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(number)
    status, out, _ = end(process)
    assert status == 0
    assert "drained" in out


def test_a_second_signal_hurries_the_drain(tmp_path: Path) -> None:
    process = start(tmp_path, "--drain-s", "60")
    assert process.stdout is not None
    process.stdout.readline()
    process.terminate()
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.3)
    process.terminate()
    status, out, _ = end(process)
    assert status != 0
    assert "drained" not in out


def test_the_launchers_death_drains_like_a_signal(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    process = start(tmp_path, lifeline=read_end)
    os.close(read_end)
    assert process.stdout is not None
    process.stdout.readline()
    os.close(write_end)
    status, out, _ = end(process)
    assert status == 0
    assert "drained" in out


def test_a_refused_start_is_one_line_and_status_one(tmp_path: Path) -> None:
    status, out, err = end(start(tmp_path, "--mode", "refuse"))
    assert (status, out, err) == (1, "drained\n", "headrace demo: no room: free some\n"), "what had started is released"


@pytest.mark.parametrize("mode", ["fail", "return"])
def test_a_loop_that_ends_by_itself_ends_the_process_with_a_failure(tmp_path: Path, mode: str) -> None:
    status, out, _ = end(start(tmp_path, "--mode", mode))
    assert status == 1
    assert "drained" in out


def test_a_bad_setting_names_itself_and_its_range(tmp_path: Path) -> None:
    status, _, err = end(start(tmp_path, "--drain-s", "-1"))
    assert status == 1
    assert err == "headrace demo: --drain-s=-1 is out of range: it must be at least 0\n"


def test_help_lists_each_setting_with_default_and_variable(tmp_path: Path) -> None:
    status, out, _ = end(start(tmp_path, "--help"))
    assert status == 0
    assert "how long a drain takes, in seconds (default: 0.0)" in " ".join(out.split())
    assert "HEADRACE_DEMO_DRAIN_S" in out


async def test_the_probe_says_whether_a_server_serves() -> None:
    from headrace.rpc.probe import probe
    from headrace.rpc.server import Server, ServerSettings

    server = Server(ServerSettings(), service_name="probed")
    address = await server.start()
    assert not await probe(address)
    await server.set_serving(True)
    assert await probe(address)
    await server.drain(0)
    assert not await probe(address)
