"""How an engine ended, in one line for people."""

from __future__ import annotations

import json
import signal
from pathlib import Path

REFUSED = 2
"""Exit status of a process that refused its command line: every argument parser's convention."""

_LONGEST = 300
_TAIL_BYTES = 8192


def describe_exit(status: int | None, last_line: str) -> str:
    """E.g. "exit code 1: <last line>"; `status` as subprocess has it, None when nobody was there to take it."""
    if status is None:
        said = "an exit nobody watched"
    elif status < 0:
        said = f"killed by {_signal_name(-status)}"
    else:
        said = f"exit code {status}"
    # What a process logged before SIGKILL has nothing to do with its end.
    return f"{said}: {last_line}" if last_line and status != -signal.SIGKILL else said


def last_line(log_path: Path, offset: int) -> str:
    """The last line that is not empty after `offset` in a log; "" when there is none or no log."""
    try:
        with log_path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(offset, size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    line = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return _plain(line)[:_LONGEST]


def _plain(line: str) -> str:
    """A JSON log line cut down to its event and error; any other line as it is."""
    try:
        entry = json.loads(line)
    except ValueError:
        return line
    if not isinstance(entry, dict) or "event" not in entry:
        return line
    return ": ".join(str(entry[key]) for key in ("event", "reason", "error") if entry.get(key))


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
