"""What a decision says: who runs the attempt or why nobody does, and a word about every replica looked at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from operator import itemgetter

from headrace.router.core.candidates import Candidate, Considered, Survey
from headrace.router.core.eligibility import Verdict
from headrace.router.core.estimate import Estimate
from headrace.router.core.preference import choose
from headrace.router.core.replica import EngineId, Replica
from headrace.router.core.rules import Policy
from headrace.router.core.view import Sighting


class Reason(Enum):
    """Why nothing was chosen."""

    NO_VIEW = "NO_VIEW"
    NO_REPLICA = "NO_REPLICA"
    NO_ADAPTER = "NO_ADAPTER"
    TENANT_NOT_PERMITTED = "TENANT_NOT_PERMITTED"
    ALL_STALE = "ALL_STALE"
    NONE_READY = "NONE_READY"
    ALL_EXCLUDED = "ALL_EXCLUDED"
    ALL_EJECTED = "ALL_EJECTED"
    NONE_MEASURED = "NONE_MEASURED"
    CONTEXT_EXCEEDED = "CONTEXT_EXCEEDED"
    SATURATED = "SATURATED"


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """`replica` runs the attempt; `considered` holds every replica looked at, by id.

    `estimate` is None when it is not measured and the policy does not ask for it. All that could run it run `seats`
    sequences at once, of which `reserve` are the replicas' reserves; of a fleet of which not all were looked at, as
    many times as that.
    """

    replica: Replica
    policy: Policy
    estimate: Estimate | None
    considered: tuple[Considered, ...]
    cached_tokens: int = 0
    seats: int = 0
    reserve: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Nobody runs it now. `context_limit`: the longest context among those it does not fit, if any.

    `wait_s`: when all are saturated, how long the shortest queue takes by its replica's own rates.
    """

    reason: Reason
    considered: tuple[Considered, ...] = ()
    context_limit: int | None = None
    wait_s: float | None = None

    def counts(self) -> str:
        """Verdicts and how often, most frequent first: ``stale=2,not_ready=1``."""
        counted = Counter(c.verdict.value for c in self.considered)
        return ",".join(f"{verdict}={n}" for verdict, n in sorted(counted.items(), key=lambda kv: (-kv[1], kv[0])))


Decision = Placed | Refused


def decide(survey: Survey, chance: float) -> Decision:
    """Choose by what the survey knows of bookings; what is saturated is passed over."""
    free = []
    for candidate in survey.candidates:
        if candidate.verdict is Verdict.SLOWER:
            if candidate.saturated:
                candidate.verdict = Verdict.SATURATED
            else:
                free.append(candidate)
    return placed(survey, choose(free, survey.rules.policy, chance)) if free else refused(survey)


def placed(survey: Survey, chosen: Candidate) -> Placed:
    """The decision for one of the survey's candidates."""
    chosen.verdict = Verdict.CHOSEN
    sizes = [candidate.replica.max_num_seqs for candidate in survey.candidates]
    return Placed(
        replica=chosen.replica,
        policy=survey.rules.policy,
        estimate=chosen.estimate if chosen.replica.rates else None,
        considered=_all_of(survey),
        cached_tokens=chosen.overlap.cached_tokens,
        seats=round(survey.times * sum(sizes)),
        reserve=round(survey.times * sum(map(survey.rules.saturation.reserved, sizes))),
    )


def refused(survey: Survey) -> Refused:
    """The decision when none of the candidates can take it."""
    considered = _all_of(survey)
    verdicts = {c.verdict for c in considered}
    too_small = [c.engine_id for c in considered if c.verdict is Verdict.CONTEXT_TOO_SMALL]
    waits = [c.estimate.queue_s for c in considered if c.verdict is Verdict.SATURATED and c.estimate]
    return Refused(
        reason=_reason(verdicts),
        considered=considered,
        context_limit=_longest(too_small, survey.sightings),
        wait_s=min(waits, default=None),
    )


_ONLY = {
    Verdict.STALE: Reason.ALL_STALE,
    Verdict.NOT_READY: Reason.NONE_READY,
    Verdict.EXCLUDED: Reason.ALL_EXCLUDED,
    Verdict.EJECTED: Reason.ALL_EJECTED,
    Verdict.UNMEASURED: Reason.NONE_MEASURED,
    Verdict.TENANT_NOT_PERMITTED: Reason.TENANT_NOT_PERMITTED,
}
_INCOMPATIBLE = {Verdict.OTHER_BUNDLE, Verdict.UNREADABLE, Verdict.NO_ADAPTER, Verdict.CONTEXT_TOO_SMALL}


_BY_ID = itemgetter(0)  # the first of a `Considered`


def _all_of(survey: Survey) -> tuple[Considered, ...]:
    words = [*survey.passed_over, *(c.considered() for c in survey.candidates)]
    return tuple(sorted(words, key=_BY_ID))


def _reason(verdicts: set[Verdict]) -> Reason:
    """Compatible replicas that cannot serve now, if there are any, explain it; else what makes the others unfit."""
    if Verdict.SATURATED in verdicts:
        return Reason.SATURATED  # all that could serve are
    compatible = verdicts - _INCOMPATIBLE
    if len(compatible) == 1:
        return _ONLY[compatible.pop()]
    if not compatible and Verdict.CONTEXT_TOO_SMALL in verdicts:
        return Reason.CONTEXT_EXCEEDED
    if not compatible and Verdict.NO_ADAPTER in verdicts:
        return Reason.NO_ADAPTER
    return Reason.NO_REPLICA


def _longest(engine_ids: Iterable[EngineId], sightings: Mapping[EngineId, Sighting]) -> int | None:
    seen = [sightings[i].seen for i in engine_ids if i in sightings]
    limits = [s.context_limit for s in seen if isinstance(s, Replica)]
    return max((limit for limit in limits if limit is not None), default=None)
