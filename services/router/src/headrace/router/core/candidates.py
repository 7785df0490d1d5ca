"""One look at the fleet for one attempt: who may run it, what it would cost there, and what stands in others' way."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from headrace.router.core.eligibility import Verdict, obstacle
from headrace.router.core.estimate import (
    NO_OVERLAP,
    Booked,
    Cost,
    Estimate,
    Overlapped,
    Standing,
    cost_of,
    standing_of,
)
from headrace.router.core.overlap import NOTHING, Overlaps
from headrace.router.core.replica import Attempt, EngineId, Rates, Replica
from headrace.router.core.rules import Rules
from headrace.router.core.view import Sighting

_UNMEASURED = Rates(prefill_tokens_per_s=1.0, itl_s=1.0)
"""Stands in where the policy does not read rates; no estimate is shown for it."""


class Considered(NamedTuple):
    """One replica as the decision saw it; `estimate` is None when it was not eligible, or not measured.

    A tuple: a decision makes one per replica.
    """

    engine_id: EngineId
    verdict: Verdict
    age_s: float
    estimate: Estimate | None = None
    cached_tokens: int = 0
    bookings: int = 0
    running: int = 0
    waiting: int = 0
    ramp: float = 1.0


@dataclass(slots=True)
class Candidate:
    """One that may run the attempt. `booked` is what this router knows, until the booking board has said.

    Made in the order of its fields: a decision makes one per replica, and names take a fifth of that time.
    """

    replica: Replica
    age_s: float
    cost: Cost
    overlap: Overlapped
    ramp: float
    allowance: int
    booked: Booked
    uncached_tokens: int
    verdict: Verdict = Verdict.SLOWER
    _estimate: Estimate | None = None

    @property
    def saturated(self) -> bool:
        """Whether what is booked has used up its allowance."""
        return self.booked.sequences >= self.allowance

    @property
    def estimate(self) -> Estimate:
        """The estimate behind what is booked."""
        if self._estimate is None:
            self._estimate = self.cost.at(self.booked)
        return self._estimate

    def behind(self, sequences: int, prompt_tokens: int) -> None:
        """The booking board has said what is booked."""
        if self.booked != (sequences, prompt_tokens):
            self.booked, self._estimate = Booked(sequences, prompt_tokens), None

    def considered(self) -> Considered:
        """The word about it."""
        replica = self.replica
        return Considered(
            replica.engine_id,
            self.verdict,
            self.age_s,
            self.estimate if replica.rates else None,
            self.overlap.cached_tokens,
            self.booked.sequences,
            replica.running,
            replica.waiting,
            self.ramp,
        )


class Standings:
    """The standings of all replicas, each worked out once per heartbeat for the attempts of one sequence."""

    def __init__(self) -> None:
        self._known: dict[EngineId, tuple[Replica, float, Rules, Standing, int]] = {}

    def of(self, replica: Replica, ramp: float, rules: Rules, sequences: int) -> tuple[Standing, int]:
        """A replica's standing, and how many sequences may be booked there before it is saturated."""
        known = self._known.get(replica.engine_id)
        if known and sequences == 1 and known[0] is replica and known[1] == ramp and known[2] is rules:
            return known[3], known[4]
        standing = standing_of(replica, replica.rates or _UNMEASURED, sequences, ramp)
        allowance = rules.saturation.allowance(
            waiting=replica.waiting,
            running=replica.running,
            max_num_seqs=replica.max_num_seqs,
            pressure=replica.pressure,
        )
        if sequences == 1:
            self._known[replica.engine_id] = replica, ramp, rules, standing, allowance
        return standing, allowance

    def settle(self, engine_ids: Container[EngineId]) -> None:
        """Forget all but these."""
        self._known = {i: known for i, known in self._known.items() if i in engine_ids}


@dataclass(slots=True, kw_only=True)
class Survey:
    """Everyone looked at for one attempt: candidates, and the others with what stands in their way.

    The fleet has `times` as many replicas as were looked at.
    """

    attempt: Attempt
    rules: Rules
    candidates: list[Candidate]
    passed_over: list[Considered]
    sightings: Mapping[EngineId, Sighting]
    times: float = 1.0


def survey(
    looked_at: Iterable[Sighting],
    attempt: Attempt,
    rules: Rules,
    *,
    now: float,
    ejected: Container[EngineId],
    overlaps: Overlaps | None,
    booked_on: Callable[[EngineId], Booked],
    ramp_of: Callable[[Replica, float, float], float],
    standings: Standings,
    sightings: Mapping[EngineId, Sighting],
) -> Survey:
    """Look at each of `looked_at`; `overlaps` None counts no reuse anywhere."""
    candidates: list[Candidate] = []
    passed_over: list[Considered] = []
    for sighting in looked_at:
        seen = sighting.seen
        age_s = now - sighting.written_at
        if age_s < 0.0:
            age_s = 0.0
        verdict = obstacle(seen, age_s, attempt, rules, ejected)
        if verdict is not None or not isinstance(seen, Replica):
            passed_over.append(_passed_over(sighting, verdict or Verdict.UNREADABLE, age_s))
            continue
        overlap = _overlap(seen, attempt, overlaps) if overlaps is not None else NO_OVERLAP
        ramp = ramp_of(seen, rules.slow_start_s, now) if rules.slow_start_s else 1.0
        standing, allowance = standings.of(seen, ramp, rules, attempt.sequences)
        if attempt.beyond_share:
            allowance = _beyond_share(seen, rules)
        uncached = attempt.prompt_tokens - overlap.cached_tokens
        candidates.append(
            Candidate(
                seen,
                age_s,
                cost_of(seen, seen.rates or _UNMEASURED, attempt, standing, overlap),
                overlap,
                ramp,
                allowance,
                booked_on(seen.engine_id),
                uncached if uncached > 0 else 1,
            )
        )
    return Survey(attempt=attempt, rules=rules, candidates=candidates, passed_over=passed_over, sightings=sightings)


def _beyond_share(replica: Replica, rules: Rules) -> int:
    return rules.saturation.allowance_beyond_share(
        waiting=replica.waiting, running=replica.running, max_num_seqs=replica.max_num_seqs, pressure=replica.pressure
    )


def _overlap(replica: Replica, attempt: Attempt, overlaps: Overlaps) -> Overlapped:
    """In doubt nothing: blocks of another size are other blocks, those of another life are gone."""
    found = overlaps.of(replica.engine_id)
    if found is NOTHING or found.epoch != replica.epoch or replica.block_size != attempt.block_size:
        return NO_OVERLAP
    size = attempt.block_size
    on_their_way = found.predicted_blocks * size
    cached = min(found.blocks * size + on_their_way, attempt.prompt_tokens - 1)
    return Overlapped(cached_tokens=cached, on_their_way=min(on_their_way, cached))


def _passed_over(sighting: Sighting, verdict: Verdict, age_s: float) -> Considered:
    seen = sighting.seen
    if not isinstance(seen, Replica):
        return Considered(engine_id=seen.engine_id, verdict=verdict, age_s=age_s)
    return Considered(
        engine_id=seen.engine_id, verdict=verdict, age_s=age_s, running=seen.running, waiting=seen.waiting
    )
