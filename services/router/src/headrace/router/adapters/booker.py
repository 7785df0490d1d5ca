"""The way to the booking board: all that wait go in one call, and a Redis that is away costs one wait in all."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from headrace.base.errors import HeadraceError, Unavailable
from headrace.coord.redis.booking_board import Answer, BookingBoard, Candidate, Preference, Seen, Wish
from headrace.coord.redis.store import TIMEOUT_S
from headrace.observe.log import get_logger
from headrace.observe.metrics import counter, histogram
from headrace.router.core import candidates as core
from headrace.router.core.replica import Attempt, AttemptKey
from headrace.router.core.rules import Policy, Rules

log = get_logger(__name__)

MOST_PER_CALL = 64
"""Placements in one call: 64 take the server about 2 ms, in which it does nothing else."""
MOST_RELEASES = 4096

_CALLS = counter("headrace_router_booking_calls_total", "Calls of the booking function.", ("outcome",))
_SUCCEEDED = _CALLS.labels("ok")
_SIZES = histogram(
    "headrace_router_booking_batch", "Placements in one call of the booking function.", buckets=(1, 2, 4, 8, 16, 32, 64)
)

_PREFERENCES = {
    Policy.LEAST_COMPLETION_TIME: Preference.LEAST_COST,
    Policy.LEAST_LOADED: Preference.LEAST_LOADED,
    Policy.ROUND_ROBIN: Preference.IN_ORDER,
}


class Booker:
    """Books over one connection, one call at a time; those who come meanwhile share the next call.

    After a call that failed nobody waits for Redis until `close_breaker`: the reader of the replica board says when
    it answers again, so no placement is spent on finding out.
    """

    def __init__(self, board: BookingBoard) -> None:
        self._board = board
        self._wishes: deque[tuple[Wish, asyncio.Future[Answer]]] = deque()
        self._releases: deque[tuple[str, int]] = deque(maxlen=MOST_RELEASES)
        self._woken = asyncio.Event()
        self._calling = False
        self.open = False

    async def book(self, attempt: Attempt, candidates: Sequence[core.Candidate], rules: Rules, chance: float) -> Answer:
        """Choose among `candidates` and book; Unavailable when Redis cannot be asked."""
        if self.open:
            raise _away("Redis did not answer lately")
        wish = wish_of(attempt, candidates, rules, chance)
        if not (self._calling or self._wishes):
            return await self._alone(wish)
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._wishes.append((wish, answer))
        self._woken.set()
        return await answer

    async def _alone(self, wish: Wish) -> Answer:
        """Ask in the caller's own task: nobody else waits, and two changes of task would take a tenth of the time."""
        self._calling = True
        releases = self._next_releases()
        try:
            (answer,) = await self._board.book([wish], releases)  # within `TIMEOUT_S`
        except HeadraceError as error:
            self._trip(error)
            raise _away("bookings cannot be shared now") from error
        except asyncio.CancelledError:  # whoever asked is gone, and may be booked; ending what has ended is no error
            self._releases.extend([*releases, (wish.request_id, wish.attempt)])
            raise
        finally:
            self._calling = False
            if self._wishes or self._releases:
                self._woken.set()
        _SUCCEEDED.inc()
        _SIZES.observe(1)
        return answer

    def release(self, key: AttemptKey) -> None:
        """End a booking, with the next call. While Redis is away it is left to end by itself."""
        if not self.open:
            self._releases.append((key.request_id, key.attempt))
            self._woken.set()

    async def look(self, replicas: Sequence[tuple[str, int]]) -> dict[str, Seen]:
        """The bookings of all routers on lives of replicas; nothing when Redis cannot be asked."""
        if self.open or not replicas:
            return {}
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await self._board.look(replicas)
        except (HeadraceError, TimeoutError):
            return {}

    def close_breaker(self) -> None:
        """Redis has answered."""
        if self.open:
            log.info("bookings_shared_again")
        self.open = False

    async def run(self) -> None:
        """Send what waits, until cancelled."""
        try:
            while True:
                await self._woken.wait()
                self._woken.clear()
                while (self._wishes or self._releases) and not self._calling:  # whoever calls wakes this again
                    self._calling = True
                    try:
                        await self._send()
                    finally:
                        self._calling = False
        finally:
            self._refuse(list(self._wishes))

    async def _send(self) -> None:
        batch = [self._wishes.popleft() for _ in range(min(MOST_PER_CALL, len(self._wishes)))]
        batch = [(wish, waiting) for wish, waiting in batch if not waiting.done()]
        releases = self._next_releases()
        if not batch and not releases:
            return
        try:
            answers = await self._board.book([wish for wish, _ in batch], releases)  # within `TIMEOUT_S`
        except HeadraceError as error:
            self._trip(error)
            self._refuse(batch)
            return
        except asyncio.CancelledError:
            self._refuse(batch)
            raise
        _SUCCEEDED.inc()
        _SIZES.observe(len(batch))
        for (wish, waiting), answer in zip(batch, answers, strict=True):
            if not waiting.done():
                waiting.set_result(answer)
            elif answer.chosen is not None:  # whoever asked is gone
                self._releases.append((wish.request_id, wish.attempt))

    def _next_releases(self) -> list[tuple[str, int]]:
        return [self._releases.popleft() for _ in range(min(4 * MOST_PER_CALL, len(self._releases)))]

    def _trip(self, error: Exception) -> None:
        _CALLS.labels("failed").inc()
        if not self.open:
            log.warning("bookings_not_shared", error=str(error))
        self.open = True
        self._releases.clear()
        self._refuse(list(self._wishes))
        self._wishes.clear()

    def _refuse(self, batch: Sequence[tuple[Wish, asyncio.Future[Answer]]]) -> None:
        for _, waiting in batch:
            if not waiting.done():
                waiting.set_exception(_away("bookings cannot be shared now"))


def _away(why: str) -> Unavailable:
    """A new one each time: an exception that is raised again keeps the frames of all times before."""
    return Unavailable(why, reason="REDIS_UNAVAILABLE", retry_after_s=1.0)


def wish_of(attempt: Attempt, candidates: Sequence[core.Candidate], rules: Rules, chance: float) -> Wish:
    """What the booking board is asked."""
    return Wish(
        request_id=attempt.key.request_id,
        attempt=attempt.key.attempt,
        sequences=attempt.sequences,
        candidates=[
            # A `Cost` is the same as the board's `Terms`, field by field.
            Candidate(c.replica.engine_id, c.replica.epoch, c.uncached_tokens, c.cost, c.allowance)
            for c in candidates
        ],
        preference=_PREFERENCES[rules.policy],
        freshness_s=rules.freshness_s,
        chance=chance,
    )
