"""The router's whole state, a view, the bookings on it and who is in disgrace, and what may happen to it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from itertools import islice

from headrace.router.core.bookings import Booking, Bookings
from headrace.router.core.candidates import Candidate, Standings, Survey, survey
from headrace.router.core.ejection import Ejection, Outcome
from headrace.router.core.overlap import Overlaps
from headrace.router.core.placement import Decision, Placed, Reason, Refused, decide, placed
from headrace.router.core.preference import Chance
from headrace.router.core.prefix_index import PrefixIndex
from headrace.router.core.replica import Attempt, AttemptKey, EngineId, Phase, Replica
from headrace.router.core.rules import Policy, Rules, RulesOf
from headrace.router.core.slow_start import SlowStart
from headrace.router.core.view import Reading, Sighting, View, after_failure, after_reading

LOOKED_AT = 64
"""Replicas that one decision looks at, at most. In a larger fleet they are those that have most of the prompt cached,
and others from a random place: the best of 48 is nearly the best of all, and no two routers draw the same 48."""
BY_CACHE = 16
FAMILY_BLOCKS = 16
"""Prompts that share so many blocks (256 tokens) break ties alike in every router, so that siblings placed by different
routers meet; others by chance."""
FORESEEN_BLOCKS = 64
"""New blocks of a placement that are predicted, 1,024 tokens: siblings share a beginning, what follows is their own."""
MOST_PREDICTIONS = 1024
"""Placements whose predicted blocks can be withdrawn; they live for seconds."""


class Router:
    """Takes readings of the board, places attempts. Instants are local monotonic seconds."""

    def __init__(self, *, rules_of: RulesOf, index: PrefixIndex, chance: Chance, longest_s: float) -> None:
        self.view = View()
        self.bookings = Bookings(longest_s=longest_s)
        self.ejection = Ejection()
        self.slow_start = SlowStart()
        self.index = index
        self.rules_of = rules_of
        self._chance = chance
        self._standings = Standings()
        self._fleets: dict[str, list[Sighting]] | None = None
        self._turns: dict[str, int] = {}
        self._predicted: OrderedDict[AttemptKey, tuple[EngineId, int, Sequence[bytes]]] = OrderedDict()

    # What it learns.

    def observed(self, reading: Reading, now: float) -> None:
        """A read of the board succeeded."""
        before = self.view.sightings
        self.view = after_reading(self.view, reading)
        if self.view.sightings is before and before:  # read more often than written: only time has passed
            self.bookings.settle(before, now)
            return
        self._changed(now)
        self._standings.settle(self.view.sightings)
        self.slow_start.observe(self.view.sightings, now)
        self.ejection.settle((i, s.seen.epoch) for i, s in self.view.sightings.items())

    def unobserved(self, now: float) -> None:
        """A read of the board failed."""
        self.view = after_failure(self.view)
        self._changed(now)

    def ended(
        self, key: AttemptKey, engine_id: EngineId, epoch: int, outcome: Outcome, *, placed_at: float, now: float
    ) -> bool:
        """An attempt ended; whether its replica is ejected by that. Unknown ones are no error."""
        self.bookings.release(key)
        promised = self._predicted.pop(key, None)
        if promised is not None and outcome not in (Outcome.OK, Outcome.UNSAID):
            self.index.withdraw(*promised)
        return bool(engine_id) and self.ejection.report(engine_id, epoch, outcome, placed_at=placed_at, now=now)

    # What it decides.

    def look(self, attempt: Attempt, now: float) -> Survey | Refused:
        """Look at the fleet for one attempt; an earlier booking of the same attempt no longer counts."""
        self.bookings.release(attempt.key)
        if promised := self._predicted.pop(attempt.key, None):
            self.index.withdraw(*promised)
        if self.view.read_at is None:
            return Refused(reason=Reason.NO_VIEW)
        rules = self.rules_of(attempt.deployment)
        cares = attempt.hashes and rules.policy is Policy.LEAST_COMPLETION_TIME
        overlaps = self.index.overlap(attempt.hashes, now) if cares else None
        fleet = self._fleet(attempt.deployment)
        looked_at = self._looked_at(fleet, overlaps)
        found = self._survey(looked_at, attempt, rules, overlaps, now)
        if len(fleet) > len(looked_at):
            if found.candidates:
                found.times = len(fleet) / len(looked_at)
            else:
                found = self._survey(fleet, attempt, rules, overlaps, now)
        if rules.policy is Policy.ROUND_ROBIN and found.candidates:
            self._take_turns(attempt.deployment, found)
        return found

    def chance(self, attempt: Attempt) -> float:
        """What settles ties for `attempt`, in [0, 1)."""
        if len(attempt.hashes) < FAMILY_BLOCKS:
            return self._chance()
        return int.from_bytes(attempt.hashes[FAMILY_BLOCKS - 1][:4], "big") / 2**32

    def decide(self, found: Survey, chance: float, now: float) -> Decision:
        """Choose and book by what this router knows alone."""
        decision = decide(found, chance)
        if isinstance(decision, Placed):
            chosen = next(c for c in found.candidates if c.replica is decision.replica)
            self._book(found.attempt, chosen, now)
        return decision

    def settle(self, found: Survey, chosen: Candidate, now: float) -> Placed:
        """The booking board has booked `chosen`."""
        decision = placed(found, chosen)
        self._book(found.attempt, chosen, now)
        return decision

    def place(self, attempt: Attempt, now: float) -> Decision:
        """Look and decide at once, without the booking board."""
        found = self.look(attempt, now)
        return found if isinstance(found, Refused) else self.decide(found, self.chance(attempt), now)

    def barred(self, fleet: Iterable[Sighting], now: float) -> frozenset[EngineId]:
        """Who of a deployment's replicas is ejected at present."""
        if not len(self.ejection):
            return frozenset()
        serving = {
            s.seen.engine_id
            for s in fleet
            if isinstance(s.seen, Replica)
            and s.seen.phase is Phase.READY
            and s.age_s(now) <= self.rules_of(s.seen.deployment).freshness_s
        }
        return self.ejection.barred(serving)

    def deployments(self) -> Collection[str]:
        """The names of those that have replicas."""
        return self._by_deployment().keys()

    def fleet(self, deployment: str) -> list[Sighting]:
        """The replicas of one deployment."""
        return self._by_deployment().get(deployment, [])

    def _fleet(self, deployment: str) -> Collection[Sighting]:
        """In a small cluster everybody, so that everybody is told of; else the deployment's own."""
        everybody = self.view.sightings
        return everybody.values() if len(everybody) <= LOOKED_AT else self.fleet(deployment)

    def _looked_at(self, fleet: Collection[Sighting], overlaps: Overlaps | None) -> Collection[Sighting]:
        if len(fleet) <= LOOKED_AT:
            return fleet
        known = self.view.sightings
        drawn = {i: known[i] for i in islice(overlaps or (), BY_CACHE) if i in known}
        everybody = list(fleet)
        start = int(self._chance() * len(everybody))
        for at in range(start, start + LOOKED_AT - BY_CACHE):
            sighting = everybody[at % len(everybody)]
            drawn.setdefault(sighting.seen.engine_id, sighting)
        return drawn.values()

    def _survey(
        self, looked_at: Iterable[Sighting], attempt: Attempt, rules: Rules, overlaps: Overlaps | None, now: float
    ) -> Survey:
        return survey(
            looked_at,
            attempt,
            rules,
            now=now,
            ejected=self.barred(self.fleet(attempt.deployment), now),
            overlaps=overlaps,
            booked_on=self.bookings.on,
            ramp_of=self.slow_start.ramp,
            standings=self._standings,
            sightings=self.view.sightings,
        )

    def _take_turns(self, deployment: str, found: Survey) -> None:
        turn = self._turns[deployment] = self._turns.get(deployment, -1) + 1
        by_id = sorted(found.candidates, key=lambda c: c.replica.engine_id)
        first = turn % len(by_id)
        found.candidates = by_id[first:] + by_id[:first]

    def _book(self, attempt: Attempt, chosen: Candidate, now: float) -> None:
        replica = chosen.replica
        booking = Booking(
            engine_id=replica.engine_id,
            epoch=replica.epoch,
            sequences=attempt.sequences,
            prompt_tokens=chosen.uncached_tokens,
            made_at=now,
        )
        self.bookings.book(attempt.key, booking)
        if attempt.hashes and replica.block_size == attempt.block_size:
            cached_tokens, on_their_way = chosen.overlap
            # A tuple of bytes, which the garbage collector need not look into: thousands of these are kept for seconds.
            foreseen = tuple(attempt.hashes[: cached_tokens // replica.block_size + FORESEEN_BLOCKS])
            known = (cached_tokens - on_their_way) // replica.block_size
            self.index.predict(replica.engine_id, replica.epoch, foreseen, now, known)
            self._predicted[attempt.key] = (replica.engine_id, replica.epoch, foreseen)
            if len(self._predicted) > MOST_PREDICTIONS:
                self._predicted.popitem(last=False)

    def _by_deployment(self) -> dict[str, list[Sighting]]:
        if self._fleets is None:
            self._fleets = {}
            for sighting in self.view.sightings.values():
                if isinstance(sighting.seen, Replica):
                    self._fleets.setdefault(sighting.seen.deployment, []).append(sighting)
        return self._fleets

    def _changed(self, now: float) -> None:
        self._fleets = None
        self.bookings.settle(self.view.sightings, now)
