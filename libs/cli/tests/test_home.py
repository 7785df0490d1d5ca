"""The data folder: who holds it, what it says of the running stack, and how it refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from headrace.base.errors import StartError
from headrace.cli.home import Home, StackRecord, same_process, write_private


def record_of(pid: int, create_time: float) -> StackRecord:
    return StackRecord(
        pid=pid,
        create_time=create_time,
        addresses={"gateway": "127.0.0.1:1"},
        metrics={},
        processes={"gateway": 1},
        create_times={},
    )


def own_record() -> StackRecord:
    return record_of(os.getpid(), psutil.Process().create_time())


@contextmanager
def process_that_runs(code: str) -> Iterator[subprocess.Popen[bytes]]:
    """A Python process that has printed its first line; killed at the end."""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield process
        finally:
            process.kill()


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    made = Home(tmp_path / "home")
    made.create()
    yield made
    made.release()


def test_the_folder_is_made_for_its_owner_alone(home: Home) -> None:
    assert home.path.stat().st_mode & 0o777 == 0o700
    assert home.logs.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_cannot_be_made_is_named_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StartError, match=r"cannot use the data folder .*file/home: .*HEADRACE_HOME"):
        Home(tmp_path / "file" / "home").create()


def test_a_second_lock_is_refused_and_names_the_first_stack(home: Home) -> None:
    holder = Home(home.path)
    holder.lock()
    with pytest.raises(StartError, match="already runs"):
        home.lock()
    holder.write_record(own_record())
    with pytest.raises(StartError, match=rf"\(process {os.getpid()}\).*headrace down"):
        home.lock()
    holder.release()
    home.lock()


def test_the_lock_ends_with_its_holder_however_it_ends(home: Home) -> None:
    code = f"""
import pathlib, time
from headrace.cli.home import Home
home = Home(pathlib.Path({str(home.path)!r}))
home.lock()
print("locked", flush=True)
time.sleep(60)
"""
    with process_that_runs(code) as holder:
        with pytest.raises(StartError):
            home.lock()
        holder.kill()
        holder.wait(10)
    home.lock()


def test_a_record_counts_only_while_its_launcher_lives(home: Home) -> None:
    assert home.record() is None
    home.write_record(own_record())
    assert home.running() == own_record()
    home.write_record(record_of(os.getpid(), psutil.Process().create_time() - 100))
    assert home.record() is None, "the pid was given to another process"
    with pytest.raises(StartError, match="headrace up"):
        home.running()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 1}', '{"unknown": 1}'])
def test_a_record_that_cannot_be_read_is_no_record(home: Home, text: str) -> None:
    home.stack_file.write_text(text)
    assert home.record() is None


def test_a_zombie_is_no_running_process() -> None:
    with process_that_runs("print(1)") as process:
        zombie = psutil.Process(process.pid)
        created = zombie.create_time()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert zombie.status() == psutil.STATUS_ZOMBIE
        assert not same_process(process.pid, created)


def test_private_files_are_private_and_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "api-key"
    write_private(path, "one")
    write_private(path, "two")
    assert path.read_text() == "two"
    assert path.stat().st_mode & 0o777 == 0o600
    assert [p.name for p in tmp_path.iterdir()] == ["api-key"]
    with pytest.raises(StartError, match=r"cannot write .*missing/api-key: No such file"):
        write_private(tmp_path / "missing" / "api-key", "x")


def test_what_the_last_stack_left_is_set_aside(home: Home) -> None:
    (home.logs / "gateway.log").write_text("old\n")
    (home.path / "engines").mkdir()
    (home.path / "engines" / "e-1.json").write_text("{}")
    home.key_file.write_text("kept")
    home.clear_past()
    assert {p.name for p in home.logs.iterdir()} == {"gateway.log.1"}
    assert not (home.path / "engines").exists()
    assert home.key_file.read_text() == "kept"


def test_the_default_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "given"))
    assert Home.default().path == tmp_path / "given"
    monkeypatch.delenv("HEADRACE_HOME")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "xdg"))
    assert Home.default().path == tmp_path / "xdg" / "headrace"
