"""One decision: eligibility, then preference, and a word about every replica."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from headrace.router.core.eligibility import Verdict, obstacle
from headrace.router.core.estimate import Booked, Estimate, crowding, estimate
from headrace.router.core.replica import Attempt, EngineId, Replica, Unreadable
from headrace.router.core.view import Sighting

NEAR_TIE = 0.05
"""Estimates closer than this are equal for all we know: measured rates wander by about as much."""

BookedOn = Callable[[EngineId], Booked]
Pick = Callable[[int], int]
"""Chance, handed in: an index below n, e.g. `random.Random().randrange`."""


class Reason(Enum):
    """Why nothing was chosen."""

    NO_VIEW = "NO_VIEW"
    NO_REPLICA = "NO_REPLICA"
    NO_ADAPTER = "NO_ADAPTER"
    ALL_STALE = "ALL_STALE"
    NONE_READY = "NONE_READY"
    ALL_EXCLUDED = "ALL_EXCLUDED"
    NONE_MEASURED = "NONE_MEASURED"
    CONTEXT_EXCEEDED = "CONTEXT_EXCEEDED"


@dataclass(frozen=True, slots=True, kw_only=True)
class Considered:
    """One replica as the decision saw it; `estimate` is None when it was not eligible."""

    engine_id: EngineId
    verdict: Verdict
    age_s: float
    estimate: Estimate | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """`replica` runs the attempt; `considered` holds every replica known, by id."""

    replica: Replica
    estimate: Estimate
    considered: tuple[Considered, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Nobody runs it now. `context_limit`: the longest context among those it does not fit, if any."""

    reason: Reason
    considered: tuple[Considered, ...] = ()
    context_limit: int | None = None

    def counts(self) -> str:
        """Verdicts and how often, most frequent first: ``stale=2,not_ready=1``."""
        counted = Counter(c.verdict.value for c in self.considered)
        return ",".join(f"{verdict}={n}" for verdict, n in sorted(counted.items(), key=lambda kv: (-kv[1], kv[0])))


Decision = Placed | Refused


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    replica: Replica
    estimate: Estimate
    crowding: float

    @property
    def preference(self) -> tuple[float, float]:
        return self.estimate.queue_s, self.crowding


def decide(
    *,
    now: float,
    sightings: Mapping[EngineId, Sighting],
    booked_on: BookedOn,
    attempt: Attempt,
    freshness_s: float,
    pick: Pick,
) -> Decision:
    """Choose the eligible replica with the least estimated completion.

    Within `NEAR_TIE` of the least: the shorter queue, then the emptier batch, then chance.
    """
    passed_over: dict[EngineId, Considered] = {}
    candidates: list[_Candidate] = []
    for engine_id, sighting in sightings.items():
        age_s = sighting.age_s(now)
        verdict = obstacle(sighting.seen, age_s, attempt, freshness_s)
        if verdict is None:
            candidates.append(_candidate(sighting.seen, booked_on(engine_id), attempt))
            verdict = Verdict.SLOWER
        passed_over[engine_id] = Considered(engine_id=engine_id, verdict=verdict, age_s=age_s)
    if not candidates:
        return _refuse(_by_id(passed_over), sightings)
    for c in candidates:
        engine_id = c.replica.engine_id
        passed_over[engine_id] = replace(passed_over[engine_id], estimate=c.estimate)
    best = _best(candidates, pick)
    chosen = best.replica.engine_id
    passed_over[chosen] = replace(passed_over[chosen], verdict=Verdict.CHOSEN)
    return Placed(replica=best.replica, estimate=best.estimate, considered=_by_id(passed_over))


def _candidate(seen: Replica | Unreadable, booked: Booked, attempt: Attempt) -> _Candidate:
    assert isinstance(seen, Replica)  # both are what eligibility has established
    assert seen.rates is not None
    return _Candidate(
        replica=seen, estimate=estimate(seen, seen.rates, booked, attempt), crowding=crowding(seen, booked)
    )


def _best(candidates: Sequence[_Candidate], pick: Pick) -> _Candidate:
    least_s = min(c.estimate.total_s for c in candidates)
    near = [c for c in candidates if c.estimate.total_s <= least_s * (1 + NEAR_TIE)]
    preferred = min(c.preference for c in near)
    equal = [c for c in near if c.preference == preferred]
    return equal[pick(len(equal))]


def _by_id(considered: Mapping[EngineId, Considered]) -> tuple[Considered, ...]:
    return tuple(considered[engine_id] for engine_id in sorted(considered))


_ONLY = {
    Verdict.STALE: Reason.ALL_STALE,
    Verdict.NOT_READY: Reason.NONE_READY,
    Verdict.EXCLUDED: Reason.ALL_EXCLUDED,
    Verdict.UNMEASURED: Reason.NONE_MEASURED,
}
_INCOMPATIBLE = {Verdict.OTHER_BUNDLE, Verdict.UNREADABLE, Verdict.NO_ADAPTER, Verdict.CONTEXT_TOO_SMALL}


def _refuse(considered: tuple[Considered, ...], sightings: Mapping[EngineId, Sighting]) -> Refused:
    verdicts = {c.verdict for c in considered}
    too_small = [c.engine_id for c in considered if c.verdict is Verdict.CONTEXT_TOO_SMALL]
    return Refused(
        reason=_reason(verdicts), considered=considered, context_limit=_longest(sightings[i] for i in too_small)
    )


def _reason(verdicts: set[Verdict]) -> Reason:
    """Compatible replicas that cannot serve now, if there are any, explain it; else what makes the others unfit."""
    compatible = verdicts - _INCOMPATIBLE
    if len(compatible) == 1:
        return _ONLY[compatible.pop()]
    if not compatible and Verdict.CONTEXT_TOO_SMALL in verdicts:
        return Reason.CONTEXT_EXCEEDED
    if not compatible and Verdict.NO_ADAPTER in verdicts:
        return Reason.NO_ADAPTER
    return Reason.NO_REPLICA


def _longest(sightings: Iterable[Sighting]) -> int | None:
    seen = [s.seen.context_limit for s in sightings if isinstance(s.seen, Replica)]
    return max((limit for limit in seen if limit is not None), default=None)
