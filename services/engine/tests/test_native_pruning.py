"""The folder of packed models stays within bounds, and what a running engine uses stays in it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headrace.base.errors import StartError
from headrace.engine.packed.pruning import MOST_BYTES_VARIABLE, most_bytes, prune

NOW = 1_900_000_000.0
DAY = 86400.0


def put(folder: Path, name: str, *, unused_days: float, size: int = 100) -> Path:
    path = folder / name
    path.write_bytes(b"x" * size)
    os.utime(path, (NOW - unused_days * DAY, NOW - 90 * DAY))
    return path


@contextmanager
def another_process_holding(path: Path) -> Iterator[None]:
    """As an engine that has the file mapped."""
    program = (
        "import os, sys; from headrace.engine.packed.pruning import hold;"
        "hold(os.open(sys.argv[1], os.O_RDONLY)); print('held', flush=True); sys.stdin.read()"
    )
    engine = subprocess.Popen(
        [sys.executable, "-c", program, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with engine:
        assert engine.stdout is not None
        assert engine.stdin is not None
        assert engine.stdout.readline() == "held\n"
        yield
        engine.stdin.close()


def left(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_what_nobody_used_for_a_month_goes(tmp_path: Path) -> None:
    old = put(tmp_path, "old.bin", unused_days=31)
    put(tmp_path, "new.bin", unused_days=29)
    assert prune(tmp_path, wanted=0, most=10_000, now=NOW) == [old]
    assert left(tmp_path) == {"new.bin"}


def test_the_longest_unused_make_room_for_a_new_one(tmp_path: Path) -> None:
    for days in (1, 2, 3, 4):
        put(tmp_path, f"{days}.bin", unused_days=days)
    prune(tmp_path, wanted=150, most=400, now=NOW)
    assert left(tmp_path) == {"1.bin", "2.bin"}
    prune(tmp_path, wanted=1_000, most=400, now=NOW)  # more than there is room for: it will be there alone
    assert left(tmp_path) == set()


def test_what_another_process_uses_stays(tmp_path: Path) -> None:
    used = put(tmp_path, "used.bin", unused_days=40)
    put(tmp_path, "idle.bin", unused_days=1)
    with another_process_holding(used):
        prune(tmp_path, wanted=0, most=0, now=NOW)
        assert left(tmp_path) == {"used.bin"}
    prune(tmp_path, wanted=0, most=0, now=NOW)
    assert left(tmp_path) == set()


def test_what_a_killed_engine_had_begun_goes_after_an_hour_and_locks_stay(tmp_path: Path) -> None:
    put(tmp_path, ".made.abc", unused_days=0.5)
    begun = put(tmp_path, ".made.def", unused_days=0)
    os.utime(begun, (NOW - 60, NOW - 60))
    put(tmp_path, "made.lock", unused_days=50)
    prune(tmp_path, wanted=0, most=0, now=NOW)
    assert left(tmp_path) == {".made.def", "made.lock"}


def test_the_bound_is_the_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    assert most_bytes() == 20 << 30
    monkeypatch.setenv(MOST_BYTES_VARIABLE, "5000")
    assert most_bytes() == 5000
    monkeypatch.setenv(MOST_BYTES_VARIABLE, "5 GB")
    with pytest.raises(StartError, match="'5 GB' is not a number of bytes"):
        most_bytes()
