"""What the controller wants and what it sees, as values."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NewType

EngineId = NewType("EngineId", str)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """What a replica runs. Replicas of equal specs are interchangeable; any difference asks for a replacement."""

    bundle_digest: str
    backend: str
    settings: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A deployment as intended; with a `problem`, its last good value, as the newest one cannot be read."""

    spec: Spec
    replicas: int
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreadable:
    """A deployment that exists and whose intent was never read: not deleted, and not known."""

    problem: str


Intent = Wanted | Unreadable


class Phase(Enum):
    """Where a replica says it is in its life."""

    WARMING = "warming"
    READY = "ready"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """A replica's newest word on itself. `epoch_ns` is unix nanoseconds at its start, `age_s` by the store's clock."""

    deployment: str
    bundle_digest: str
    backend: str
    epoch_ns: int
    pid: int
    phase: Phase
    age_s: float


class Life(Enum):
    """What the process table says of an engine we started."""

    RUNNING = "running"
    STOPPING = "stopping"
    """Told to drain, not gone yet."""
    STOPPED = "stopped"
    """Gone, as told."""
    CRASHED = "crashed"
    """Gone, and nobody told it to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One engine process as recorded; `pid` and `started_at` (unix seconds) together name one life of it.

    `failures` counts the starts in a row, before this one, that ended in a crash. `refused` marks an exit with
    which the engine refused its own settings, so that trying again at once is of no use.
    """

    engine_id: EngineId
    deployment: str
    spec: Spec
    pid: int
    started_at: float
    life: Life
    starts: int = 1
    failures: int = 0
    last_exit: str = ""
    refused: bool = False
    log_path: str = ""
