"""What an earlier stack left behind is found by its environment and ended, and nothing else is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from headrace.cli.mark import MARK_ENV, alive, kill_marked, marked

# A parent with a child of its own, as an engine has its worker.
FAMILY = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(child.pid, flush=True)
time.sleep(60)
"""


class Family:
    """A process and its child, both with a mark in their environment."""

    def __init__(self, mark: str) -> None:
        environ = os.environ | {MARK_ENV: mark}
        self.parent = subprocess.Popen([sys.executable, "-c", FAMILY], env=environ, stdout=subprocess.PIPE)
        assert self.parent.stdout is not None
        self.child = psutil.Process(int(self.parent.stdout.readline()))

    def close(self) -> None:
        if alive(self.child):
            self.child.kill()
        self.parent.kill()
        self.parent.communicate()


@pytest.fixture
def families(tmp_path: Path) -> Iterator[tuple[Family, Family]]:
    made = Family(str(tmp_path / "mine")), Family(str(tmp_path / "other"))
    yield made
    for family in made:
        family.close()


def test_all_processes_with_the_mark_are_found_also_those_started_by_others(
    families: tuple[Family, Family], tmp_path: Path
) -> None:
    mine, _ = families
    assert {p.pid for p in marked(str(tmp_path / "mine"))} == {mine.parent.pid, mine.child.pid}


def test_only_those_with_the_mark_are_killed_even_frozen_ones(families: tuple[Family, Family], tmp_path: Path) -> None:
    mine, other = families
    os.kill(mine.parent.pid, signal.SIGSTOP)
    assert len(kill_marked(str(tmp_path / "mine"))) == 2
    assert not alive(mine.child)
    assert mine.parent.wait(5) == -signal.SIGKILL
    assert alive(other.child)
    assert other.parent.poll() is None
    assert kill_marked(str(tmp_path / "mine")) == []


def test_a_process_never_counts_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code = f"from headrace.cli.mark import kill_marked; print(kill_marked({str(tmp_path)!r}))"
    environ = os.environ | {MARK_ENV: str(tmp_path)}
    ended = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, timeout=30, check=True)
    assert ended.stdout.strip() == b"[]"
