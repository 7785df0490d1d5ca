"""Service processes: environment, logs, lifeline, and an end bounded in time."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from headrace.base.errors import StartError
from headrace.cli.child import Child, Lifeline, free_port, last_line, port_is_free
from headrace.cli.mark import alive
from headrace.testkit.eventually import eventually

Start = Callable[..., Child]

# Says that it listens to signals, then waits.
POLITE = "import time; print('ready', flush=True); time.sleep(60)"
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);" + POLITE.removeprefix("import time;")
WITH_CHILD = f"""
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", {POLITE!r}], stdout=subprocess.DEVNULL)
print(child.pid, flush=True)
time.sleep(60)
"""
ON_LIFELINE = """
import os
print("ready", flush=True)
print("end of file" if os.read(int(os.environ["HEADRACE_LIFELINE_FD"]), 1) == b"" else "data", flush=True)
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a Python process from code; ends it with the test."""
    started: list[Child] = []

    def start(code: str, *, lifeline: Lifeline | None = None, **environ: str) -> Child:
        child = Child(
            name="sample",
            command=[sys.executable, "-c", code],
            environ=environ,
            log_path=tmp_path / "sample.log",
            lifeline=lifeline,
        )
        child.start()
        started.append(child)
        return child

    yield start
    for child in started:
        child.kill()


async def log_of(child: Child) -> str:
    """Its log, once there is a whole line."""

    def line() -> str:
        text = child.log_path.read_text()
        return text if text.endswith("\n") else ""

    text: str = await eventually(line)
    return text


async def test_a_child_gets_our_environment_and_its_own_but_not_our_lifeline(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_LIFELINE_FD", "77")
    monkeypatch.setenv("OURS", "a")
    code = "import os; print(os.environ['OURS'], os.environ['ITS'], os.environ.get('HEADRACE_LIFELINE_FD'))"
    assert await log_of(start(code, ITS="b")) == "a b None\n"


async def test_the_lifeline_ends_when_its_holder_lets_go(start: Start) -> None:
    lifeline = Lifeline()
    child = start(ON_LIFELINE, lifeline=lifeline)
    assert await log_of(child) == "ready\n"
    assert child.alive
    lifeline.cut()
    await eventually(lambda: child.exit_status == 0)
    assert child.log_path.read_text() == "ready\nend of file\n"


async def test_no_child_holds_the_lifeline_of_another(start: Start) -> None:
    lifeline = Lifeline()
    bystander = start(POLITE)
    child = start(ON_LIFELINE, lifeline=lifeline)
    await log_of(bystander)
    lifeline.cut()
    await eventually(lambda: child.exit_status == 0)


async def test_a_polite_child_ends_by_itself_when_asked(start: Start) -> None:
    child = start(POLITE)
    await log_of(child)
    assert child.alive
    assert child.stop(5)
    assert child.exit_status == -signal.SIGTERM
    assert child.stop(5), "stopping twice is harmless"


async def test_a_child_that_does_not_end_is_killed_with_its_children(start: Start) -> None:
    child = start(WITH_CHILD)
    grandchild = psutil.Process(int(await log_of(child)))
    assert not child.stop(0.2)
    assert child.exit_status == -signal.SIGKILL
    await eventually(lambda: not alive(grandchild))


async def test_ctrl_c_in_the_terminal_does_not_reach_a_child(start: Start) -> None:
    child = start(POLITE)
    assert os.getpgid(child.pid) != os.getpgid(0)


async def test_last_words_are_of_the_newest_start_alone(start: Start) -> None:
    child = start("import sys; sys.exit('headrace sample: port 1 is taken')")
    await eventually(lambda: not child.alive)
    assert child.last_words() == "headrace sample: port 1 is taken"
    child.command = [sys.executable, "-c", "raise SystemExit(3)"]
    child.start()
    await eventually(lambda: not child.alive)
    assert child.last_words() == "status 3, nothing said"
    assert child.starts == 2


async def test_a_killed_childs_last_words_are_the_signal_not_its_log(start: Start) -> None:
    child = start(STUBBORN)
    await log_of(child)
    child.kill()
    assert child.last_words() == "killed by SIGKILL"


@pytest.mark.parametrize(
    ("log", "said"),
    [
        ("", ""),
        ("\n\n", ""),
        ("plain words\n", "plain words"),
        ('{"level": "info", "event": "server_started"}\n', "server_started"),
        ('{"level": "error", "event": "lost", "reason": "disk", "error": "full"}\n', "lost: disk: full"),
        (
            '{"level": "error", "event": "service_failed", "exception": "Traceback:\\n  x\\nKeyError: 1"}\n'
            '{"level": "info", "event": "service_stopped"}\n',
            "service_failed: KeyError: 1",
        ),
        ("headrace x: no\nnot a log line\n", "not a log line"),
    ],
)
def test_the_last_line_prefers_the_last_error(tmp_path: Path, log: str, said: str) -> None:
    path = tmp_path / "x.log"
    path.write_text(log)
    assert last_line(path) == said


def test_a_missing_log_says_nothing(tmp_path: Path) -> None:
    assert last_line(tmp_path / "none.log") == ""


def test_a_command_that_does_not_exist_is_a_start_error(tmp_path: Path) -> None:
    child = Child(name="x", command=["/no/such/binary"], environ={}, log_path=tmp_path / "x.log")
    with pytest.raises(StartError, match="cannot start x: No such file"):
        child.start()
    assert not child.alive
    assert child.pid == 0


def test_a_port_is_free_until_somebody_listens() -> None:
    port = free_port()
    assert port_is_free(port)
    with socket.socket() as server:
        server.bind(("127.0.0.1", port))
        server.listen()
        assert not port_is_free(port)
