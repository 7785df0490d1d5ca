"""What the controller wants and what it sees, as values."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NewType

from headrace.base.saturation import Saturation

EngineId = NewType("EngineId", str)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """What a replica runs. Replicas of equal specs are interchangeable; any difference asks for a replacement."""

    bundle_digest: str
    backend: str
    settings: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A deployment as intended; with a `problem`, its last good value, as the newest one cannot be read.

    `saturation` is the threshold that routers place by.
    """

    spec: Spec
    replicas: int
    problem: str = ""
    saturation: Saturation = field(default_factory=Saturation)


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
class Load:
    """Work at a replica, in sequences; `booked` ones are on their way. `pressure` of its KV cache, 0 to 1."""

    waiting: int
    running: int
    booked: int
    max_num_seqs: int
    pressure: float

    def reaches(self, bounds: Saturation) -> bool:
        """Whether routers send it nothing more, by the very arithmetic with which they decide that."""
        allowance = bounds.allowance(
            waiting=self.waiting, running=self.running, max_num_seqs=self.max_num_seqs, pressure=self.pressure
        )
        return self.booked >= allowance


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """A replica's newest word on itself. `epoch_ns` is unix nanoseconds at its start, `age_s` by the store's clock.

    `load` is None when it is not known: that is neither idle nor busy.
    """

    deployment: str
    bundle_digest: str
    backend: str
    epoch_ns: int
    pid: int
    phase: Phase
    age_s: float
    load: Load | None = None


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
