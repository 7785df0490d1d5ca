"""`headrace logs`: a service's log, from its file."""

from __future__ import annotations

import collections
import os
import sys
import time
from pathlib import Path
from typing import IO

from headrace.base.errors import StartError
from headrace.cli.home import Home

FOLLOW_PERIOD_S = 0.1


def log_path(home: Home, service: str) -> Path:
    """The log of a service, of a replica by its id, or of the first replica for "engine"."""
    exact = home.logs / f"{service}.log"
    known = sorted(path.stem for path in home.logs.glob("*.log"))
    if exact.parent == home.logs and service in known:
        return exact
    if service == "engine":
        services = {"gateway", "router", "controller", "telemetry", "etcd", "redis"}
        replicas = [name for name in known if name not in services]
        if replicas:
            return home.logs / f"{replicas[0]}.log"
    there = ", ".join(known) or "none yet"
    raise StartError(f"no log of {service!r} in {home.logs}; there are: {there}")


def show(path: Path, *, lines: int, follow: bool) -> None:
    """Print the last `lines`, then what is appended, until interrupted; a new start's new file is followed, too."""
    file = path.open(errors="replace")
    try:
        sys.stdout.writelines(collections.deque(file, maxlen=lines))
        sys.stdout.flush()
        while follow:
            text = file.read()
            if text:
                sys.stdout.write(text)
                sys.stdout.flush()
                continue
            time.sleep(FOLLOW_PERIOD_S)
            if _replaced(path, file):
                file.close()
                file = path.open(errors="replace")
    finally:
        file.close()


def _replaced(path: Path, file: IO[str]) -> bool:
    """Whether `path` is another file by now; not while it is away, between one stack's end and the next one's start."""
    try:
        return not os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False
