"""One placement from question to decision: look, ask the booking board, and without it decide alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from headrace.base.errors import Unavailable
from headrace.coord.redis.booking_board import Answer, State
from headrace.router.adapters.booker import Booker
from headrace.router.core.candidates import Candidate, Survey
from headrace.router.core.eligibility import Verdict
from headrace.router.core.placement import Decision, Placed, Refused, refused
from headrace.router.core.preference import ranked
from headrace.router.core.replica import Attempt
from headrace.router.core.router import FAMILY_BLOCKS, Router
from headrace.router.core.rules import Policy
from headrace.router.ports import Clock

SHORTLIST = 8
"""Candidates that the booking board chooses among: some of them are free, and packing them takes little."""
SECOND_LOOK = 56
"""As many again when all of those turn out to be taken."""

_VERDICTS = {State.SATURATED: Verdict.SATURATED, State.STALE: Verdict.STALE, State.GONE: Verdict.STALE}


class Placer:
    """Places attempts. Waits for nothing but one call to Redis, and for that no longer than `Booker` allows."""

    def __init__(self, router: Router, booker: Booker, *, clock: Clock) -> None:
        self._router = router
        self._booker = booker
        self._clock = clock
        self._firsts: dict[tuple[str, bytes], asyncio.Event] = {}

    async def place(self, attempt: Attempt) -> tuple[Decision, bool]:
        """The decision, and whether it was made without Redis.

        Siblings that bring the same new prefix at the same moment follow the first of them: asked about together,
        none would know where the others go, and each replica would compute the prefix.
        """
        found = self._router.look(attempt, self._clock())
        news = _news(found)
        if news is None:
            return await self._placed(attempt, found)
        if (first := self._firsts.get(news)) is not None:
            await first.wait()
            return await self._placed(attempt, self._router.look(attempt, self._clock()))
        placed = self._firsts[news] = asyncio.Event()
        try:
            return await self._placed(attempt, found)
        finally:
            del self._firsts[news]
            placed.set()

    async def _placed(self, attempt: Attempt, found: Survey | Refused) -> tuple[Decision, bool]:
        router = self._router
        if isinstance(found, Refused):
            return found, router.view.degraded
        if not found.candidates:
            return refused(found), router.view.degraded
        chance = router.chance(attempt)
        if router.view.degraded or self._booker.open:
            return router.decide(found, chance, self._clock()), True
        try:
            chosen = await self._shared(found, chance)
        except Unavailable:
            # A new look: all who waited for this call had looked before any of them was booked.
            return router.place(attempt, self._clock()), True
        if chosen is not None:
            return router.settle(found, chosen, self._clock()), False
        if router.view.rebuilding(self._clock()):
            return self._from_memory(found, chance)
        return refused(found), False

    async def _shared(self, found: Survey, chance: float) -> Candidate | None:
        """Whom the booking board has booked."""
        order = ranked(found.candidates, found.rules.policy, chance)
        # Drawn anew: the order begins at `chance`, and a second use of it would always hit the same ones.
        tie = chance * 7919 % 1.0
        for part in (order[:SHORTLIST], order[SHORTLIST : SHORTLIST + SECOND_LOOK]):
            if not part:
                break
            answer = await self._booker.book(found.attempt, part, found.rules, tie)
            _note(part, answer)
            if answer.chosen is not None:
                return part[answer.chosen]
        return None

    def _from_memory(self, found: Survey, chance: float) -> tuple[Decision, bool]:
        """Redis has restarted empty: until heartbeats have filled it again, the last view is better than none."""
        for candidate in found.candidates:
            if candidate.verdict is Verdict.STALE:
                candidate.verdict = Verdict.SLOWER
        decision = self._router.decide(found, chance, self._clock())
        return decision, isinstance(decision, Placed)


def _news(found: Survey | Refused) -> tuple[str, bytes] | None:
    """Names the new prefix that the attempt brings, by its deployment and the hash of its first 256 tokens that no
    candidate has or expects; None when it brings less."""
    if isinstance(found, Refused) or found.rules.policy is not Policy.LEAST_COMPLETION_TIME:
        return None
    attempt = found.attempt
    if len(attempt.hashes) < FAMILY_BLOCKS:
        return None
    known = max((c.overlap.cached_tokens for c in found.candidates), default=0) // attempt.block_size
    new = attempt.hashes[known : known + FAMILY_BLOCKS]
    return (attempt.deployment, new[-1]) if len(new) == FAMILY_BLOCKS else None


def _note(part: Sequence[Candidate], answer: Answer) -> None:
    for candidate, seen in zip(part, answer.seen, strict=True):
        state, age_s, sequences, tokens = seen
        candidate.behind(sequences, tokens)
        if state is not State.FREE:
            # Another life is there by now, and has not been read yet.
            candidate.verdict = _VERDICTS.get(state, Verdict.NOT_READY)
        if state is State.STALE:
            candidate.age_s = age_s
