"""`headrace logs`: which file, how much of it, and what comes later."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import Queue

import pytest

from headrace.base.errors import StartError
from headrace.cli.home import Home
from headrace.cli.logs import log_path, show


@pytest.fixture
def home(tmp_path: Path) -> Home:
    made = Home(tmp_path)
    made.create()
    for name in ("gateway", "etcd", "redis", "smollm2-1", "smollm2-2"):
        (made.logs / f"{name}.log").write_text("".join(f"{name} line {n}\n" for n in range(5)))
    return made


def test_a_service_or_replica_is_found_by_name_and_engine_means_the_first_replica(home: Home) -> None:
    assert log_path(home, "gateway").name == "gateway.log"
    assert log_path(home, "smollm2-2").name == "smollm2-2.log"
    assert log_path(home, "engine").name == "smollm2-1.log"


@pytest.mark.parametrize("name", ["nope", "../stack", "", "gateway.log", "/etc/passwd"])
def test_an_unknown_name_is_refused_with_those_there_are(home: Home, name: str) -> None:
    with pytest.raises(StartError, match="there are: etcd, gateway, redis, smollm2-1, smollm2-2"):
        log_path(home, name)


def test_an_engine_that_never_started_has_no_log(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.create()
    with pytest.raises(StartError, match="none yet"):
        log_path(home, "engine")


@pytest.mark.parametrize(("lines", "shown"), [(2, ["gateway line 3", "gateway line 4"]), (0, []), (99, None)])
def test_the_last_lines_are_shown(
    home: Home, capsys: pytest.CaptureFixture[str], lines: int, shown: list[str] | None
) -> None:
    show(log_path(home, "gateway"), lines=lines, follow=False)
    expected = [f"gateway line {n}" for n in range(5)] if shown is None else shown
    assert capsys.readouterr().out.splitlines() == expected


@pytest.fixture
def followed(home: Home) -> Iterator[Queue[str]]:
    """Lines that a follower of the gateway's log prints, as they come."""
    path = home.logs / "gateway.log"
    code = (
        f"import pathlib; from headrace.cli.logs import show; show(pathlib.Path({str(path)!r}), lines=1, follow=True)"
    )
    lines: Queue[str] = Queue()
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as follower:

        def read() -> None:
            assert follower.stdout is not None
            for line in follower.stdout:
                lines.put(line.strip())

        reader = threading.Thread(target=read)
        reader.start()
        yield lines
        follower.kill()
        reader.join(5)


def test_following_shows_what_is_appended_and_then_the_next_starts_log(home: Home, followed: Queue[str]) -> None:
    path = home.logs / "gateway.log"
    assert followed.get(timeout=20) == "gateway line 4"
    with path.open("a") as log:
        log.write("appended\n")
    assert followed.get(timeout=10) == "appended"
    home.clear_past()
    path.write_text("of the next start\n")
    assert followed.get(timeout=10) == "of the next start"
