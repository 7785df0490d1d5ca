"""Among those who may: whom to ask first. `headrace.coord.redis.booking_board` chooses by the same rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import log, log1p

from headrace.router.core.candidates import Candidate
from headrace.router.core.rules import Policy

NEAR_TIE = 0.05
"""Estimates closer than this are equal for all we know: measured rates wander by about as much."""

Chance = Callable[[], float]
"""Handed in: a number in [0, 1), e.g. `random.Random().random`."""

_PER_BIN = 1 / log1p(NEAR_TIE)
_LEAST_S = 1e-9
_BINS = 1 << 12
"""More than there are between `_LEAST_S` and a year."""


def ranked(candidates: Sequence[Candidate], policy: Policy, chance: float) -> list[Candidate]:
    """The most promising first, by what this router knows; `chance` says with whom equals begin.

    Near ties are equal here, too: if the first few of a fleet of equals were always the same, every router would look
    at no others.
    """
    if policy is Policy.ROUND_ROBIN:
        return list(candidates)
    start = int(chance * len(candidates))
    return sorted([*candidates[start:], *candidates[:start]], key=_load if policy is Policy.LEAST_LOADED else _time)


def choose(free: Sequence[Candidate], policy: Policy, chance: float) -> Candidate:
    """The one of `free`, at least one, that the policy prefers.

    Least completion time: the least; within `NEAR_TIE` of it the soonest first token, where a cached prefix shows most
    clearly; within `NEAR_TIE` of that the emptiest batch, and then chance.
    """
    if policy is Policy.ROUND_ROBIN:
        return free[0]
    near = list(free)
    if policy is Policy.LEAST_COMPLETION_TIME:
        times = {id(c): c.cost.preference(c.estimate) for c in near}
        for i in (0, 1):
            bound = min(times[id(c)][i] for c in near) * (1 + NEAR_TIE)
            near = [c for c in near if times[id(c)][i] <= bound]
    least = min(c.cost.crowding(c.booked) for c in near)
    equal = [c for c in near if c.cost.crowding(c.booked) == least]
    return equal[int(chance * len(equal))]


def _load(candidate: Candidate) -> tuple[bool, float]:
    return candidate.saturated, candidate.cost.crowding(candidate.booked)


def _time(candidate: Candidate) -> int:
    """Saturated or not, the bin of the completion, the bin of the first token, as one number: it is compared faster."""
    total_s, first_s = candidate.cost.preference(candidate.estimate)
    total = int(log(total_s if total_s > _LEAST_S else _LEAST_S) * _PER_BIN)
    first = int(log(first_s if first_s > _LEAST_S else _LEAST_S) * _PER_BIN)
    bins = total * _BINS + first
    return bins if candidate.booked[0] < candidate.allowance else bins + _BINS * _BINS
