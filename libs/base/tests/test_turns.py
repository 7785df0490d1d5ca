"""Whose turn it is on a busy core."""

from __future__ import annotations

import os
import subprocess
import sys

_TELL = "import os; from headrace.base.turns import slice_ns; print(slice_ns(), os.nice(0))"


def _told(script: str) -> tuple[int, int]:
    """Slice and niceness that a fresh process reports at the end of `script`."""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=True)
    nanoseconds, nice = done.stdout.split()
    return int(nanoseconds), int(nice)


def _knows_slices() -> bool:
    release = tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2])
    return os.uname().sysname == "Linux" and release >= (6, 12)


def test_short_turns_are_inherited_until_a_process_takes_the_usual_ones_again() -> None:
    usual, _ = _told(_TELL)
    take = "from headrace.base.turns import *; take_short_turns(); "
    usually = "from headrace.base.turns import *; take_usual_turns(); " + _TELL
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {_TELL!r}], check=True)"
    back = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {usually!r}], check=True)"
    short = 200_000 if _knows_slices() else usual
    assert _told(take + _TELL)[0] == short
    assert _told(take + child)[0] == short
    assert _told(take + back)[0] == usual


def test_taking_short_turns_keeps_the_niceness() -> None:
    _, nice = _told("import os; os.nice(3); from headrace.base.turns import *; take_short_turns(); " + _TELL)
    assert nice == os.nice(0) + 3


def test_standing_back_gives_way_to_processes_that_are_awaited() -> None:
    _, nice = _told("from headrace.base.turns import *; stand_back(); " + _TELL)
    assert nice == os.nice(0) + 5
