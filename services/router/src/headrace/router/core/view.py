"""The router's view of the fleet: the last good reading of the replica board, growing older by itself.

All instants are local monotonic seconds. A heartbeat's age comes from Redis time when it is read and from the
local clock afterwards, so nothing needs Redis to notice that a replica has gone quiet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from headrace.router.core.replica import EngineId, Phase, Replica, Unreadable

REBUILD_S = 2.0
"""How long records that are missing after an outage are kept: a Redis that restarted empty is filled again by
the next heartbeats (every 0.25 s), and until then the last view is better than none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One record of the board as read: its content, and its age by Redis time."""

    seen: Replica | Unreadable
    age_s: float
    payload: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One read of the whole board, begun at `asked_at`: taken before the question, so no age is understated."""

    asked_at: float
    records: tuple[Record, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """A replica's newest heartbeat, and when it was written."""

    seen: Replica | Unreadable
    written_at: float
    payload: bytes

    def age_s(self, now: float) -> float:
        """Seconds since it was written."""
        return max(0.0, now - self.written_at)


class State(Enum):
    """One word per replica for gauges and logs."""

    READY = "ready"
    WARMING = "warming"
    DRAINING = "draining"
    STALE = "stale"
    UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Every replica known. `degraded`: the last read failed; `read_at` None: none has succeeded yet."""

    sightings: Mapping[EngineId, Sighting] = field(default_factory=dict)
    read_at: float | None = None
    degraded: bool = True
    rebuilding_until: float = 0.0

    def states(self, now: float, freshness_of: Callable[[str], float]) -> dict[EngineId, State]:
        """Each replica's state at `now`; `freshness_of` gives a deployment's bound."""
        return {i: _state(s, now, freshness_of) for i, s in self.sightings.items()}

    def rebuilding(self, now: float) -> bool:
        """Whether records that are missing on the board may only be missing because Redis restarted empty."""
        return now < self.rebuilding_until


def after_reading(view: View, reading: Reading) -> View:
    """The view once `reading` has arrived; with the same `sightings` when it brought nothing new."""
    now = reading.asked_at
    known = view.sightings
    sightings: Mapping[EngineId, Sighting]
    sightings = read = {r.seen.engine_id: _sight(r, known.get(r.seen.engine_id), now) for r in reading.records}
    # Without an outage a missing record was removed on purpose. After one, Redis may have come back empty.
    back = view.degraded and view.read_at is not None
    rebuilding_until = now + REBUILD_S if back else view.rebuilding_until
    if now < rebuilding_until:
        for engine_id, sighting in known.items():
            if engine_id not in read and _may_return(sighting):
                read[engine_id] = sighting
    if len(read) == len(known) and all(known.get(i) is s for i, s in read.items()):
        sightings = known
    return View(sightings=sightings, read_at=now, degraded=False, rebuilding_until=rebuilding_until)


def after_failure(view: View) -> View:
    """The view once a read has failed: everything stays, and ages go on growing."""
    return replace(view, degraded=True)


def _sight(record: Record, known: Sighting | None, now: float) -> Sighting:
    written_at = now - max(0.0, record.age_s)
    if known and _heartbeat(known.seen) == _heartbeat(record.seen):
        # A Redis clock set back must not make a heartbeat that we already hold younger.
        if written_at >= known.written_at and record.seen is known.seen and record.payload == known.payload:
            return known
        written_at = min(written_at, known.written_at)
    return Sighting(seen=record.seen, written_at=written_at, payload=record.payload)


def _heartbeat(seen: Replica | Unreadable) -> tuple[int, int]:
    return seen.epoch, seen.sequence


def _may_return(sighting: Sighting) -> bool:
    return isinstance(sighting.seen, Replica) and sighting.seen.phase is not Phase.DRAINING


def _state(sighting: Sighting, now: float, freshness_of: Callable[[str], float]) -> State:
    if isinstance(sighting.seen, Unreadable):
        return State.UNREADABLE
    if sighting.age_s(now) > freshness_of(sighting.seen.deployment):
        return State.STALE
    return State(sighting.seen.phase.value)
