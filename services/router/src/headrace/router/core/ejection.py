"""Who has failed too often lately: taken out on what gateways report, let in again by a probe.

Only what speaks against a replica counts: it could not be reached, its stream broke, it went quiet or said what cannot
be true. That it was busy, that a request was invalid or that a client left says nothing about it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from enum import Enum

from headrace.router.core.replica import EngineId

FAILURES = 3
"""Consecutive ones that eject. One is a stream that broke, which happens; three in a row without an answer do not."""
FIRST_BACKOFF_S = 1.0
LONGEST_BACKOFF_S = 30.0
FORGIVEN_AFTER_S = 60.0
"""In service so long after a probe, and the next ejection is a first one again."""


class Outcome(Enum):
    """How an attempt went."""

    UNSAID = "unsaid"
    OK = "ok"
    CANCELLED = "cancelled"
    BUSY = "busy"
    INVALID = "invalid"
    TRANSPORT = "transport"
    ENGINE_FAULT = "engine_fault"

    @property
    def failed(self) -> bool:
        """Whether it speaks against the replica."""
        return self in (Outcome.TRANSPORT, Outcome.ENGINE_FAULT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What is held against one life of a replica."""

    epoch: int
    failures: int = 0
    ejections: int = 0  # in a row: each doubles the back-off
    ejected: bool = False
    probe_at: float = 0.0
    in_service_since: float = 0.0

    @property
    def backoff_s(self) -> float:
        """How long it stays out after its newest ejection."""
        return float(min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2 ** (self.ejections - 1)))


class Ejection:
    """The standing of all replicas against which anything is held. Instants are local monotonic seconds."""

    def __init__(self) -> None:
        self._standings: dict[EngineId, Standing] = {}

    def report(self, engine_id: EngineId, epoch: int, outcome: Outcome, *, placed_at: float, now: float) -> bool:
        """An attempt placed at `placed_at` ended so; whether the replica is ejected by it.

        What was placed before the replica passed its probe is news of the past, and changes nothing.
        """
        known = self._of(engine_id, epoch)
        if known.ejected or placed_at < known.in_service_since:
            return False
        if outcome is Outcome.OK:
            self._standings[engine_id] = replace(known, failures=0)
            self._forget_if_clean(engine_id, now)
        if not outcome.failed:
            return False
        failed = replace(known, failures=known.failures + 1)
        if failed.failures >= FAILURES:
            failed = _out(failed, now)
        self._standings[engine_id] = failed
        return failed.ejected

    def due(self, now: float) -> list[tuple[EngineId, int]]:
        """Lives whose back-off is over: to be probed, one probe each; reports go to `probed`."""
        return [(i, s.epoch) for i, s in self._standings.items() if s.ejected and s.probe_at <= now]

    def probed(self, engine_id: EngineId, epoch: int, *, answered: bool, now: float) -> None:
        """The probe ended: back into service, or out for twice as long."""
        known = self._standings.get(engine_id)
        if known is None or known.epoch != epoch or not known.ejected:
            return
        back = replace(known, ejected=False, failures=0, in_service_since=now)
        self._standings[engine_id] = back if answered else _out(known, now)

    def settle(self, epochs: Iterable[tuple[EngineId, int]]) -> None:
        """Forget all lives but these: another life is another replica."""
        alive = set(epochs)
        self._standings = {i: s for i, s in self._standings.items() if (i, s.epoch) in alive}

    def barred(self, fleet: Collection[EngineId]) -> frozenset[EngineId]:
        """Who of `fleet`, the replicas that could serve, must not: never more than half of it.

        When more have failed, it is not the replicas: those who failed last are asked all the same.
        """
        out = sorted((s.probe_at - s.backoff_s, i) for i, s in self._standings.items() if s.ejected and i in fleet)
        return frozenset(i for _, i in out[: len(fleet) // 2])

    def ejected_s(self, engine_id: EngineId, now: float) -> float:
        """Seconds until it may be probed; 0 when it is not ejected."""
        known = self._standings.get(engine_id)
        # While a probe runs the time is up, but it is still out.
        return max(0.001, known.probe_at - now) if known and known.ejected else 0.0

    def __len__(self) -> int:
        """Replicas ejected."""
        return sum(s.ejected for s in self._standings.values())

    def _of(self, engine_id: EngineId, epoch: int) -> Standing:
        known = self._standings.get(engine_id)
        return known if known and known.epoch == epoch else Standing(epoch=epoch)

    def _forget_if_clean(self, engine_id: EngineId, now: float) -> None:
        known = self._standings[engine_id]
        if not known.ejections or now - known.in_service_since > FORGIVEN_AFTER_S:
            del self._standings[engine_id]


def _out(standing: Standing, now: float) -> Standing:
    out = replace(standing, ejected=True, ejections=standing.ejections + 1)
    return replace(out, probe_at=now + out.backoff_s)
