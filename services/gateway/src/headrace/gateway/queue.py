"""Where requests wait while the fleet is full, and whose turn it is when it is not.

There is no task and no lock: whoever's turn it is asks for its own place, in its own task, with its own trace and
deadline, and passes the turn on when it is placed, refused or cancelled. While nobody waits, nothing is added.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from headrace.base.alarm import Soonest
from headrace.base.errors import DeadlinePassed, Exhausted, HeadraceError
from headrace.gateway.core.fair_queue import Bounds, Ended, FairQueue, Ticket, Why
from headrace.gateway.core.seats import Seats
from headrace.observe.metrics import counter, gauge, histogram

T = TypeVar("T")
Place = Callable[[], Awaitable[T]]

SATURATED = "SATURATED"
"""Reason of the Exhausted with which a router says that no replica takes more now."""

_LEAST_RETRY_S, _MOST_RETRY_S = 0.02, 1.0
_LEAST_HINT_S, _MOST_HINT_S = 0.1, 30.0

WAITING = gauge("headrace_gateway_queue_waiting", "Requests waiting for a place, by class.", ("priority",))
WAIT_SECONDS = histogram(
    "headrace_gateway_queue_wait_seconds", "Time in the queue of those that were placed, by class.", ("priority",)
)
REFUSALS = counter("headrace_gateway_queue_refusals_total", "Requests that left without a place.", ("reason",))


class RequestQueue:
    """One deployment's queue: its replicas are what can be full."""

    def __init__(self, bounds: Bounds) -> None:
        self._fair = FairQueue(bounds)
        self._seats = Seats()
        self._turns: dict[Ticket, asyncio.Future[Why | None]] = {}
        self._trying: Ticket | None = None
        self._rooms = 0
        self._retry = Soonest(self._grant)
        self._expiry = Soonest(self._expire)
        self._placed_at: float | None = None
        self._interval_s: float | None = None

    def __len__(self) -> int:
        """Requests waiting."""
        return len(self._fair)

    async def placed(self, ticket: Ticket, place: Place[T]) -> T:
        """What `place` returns, called at once if it overtakes nobody who may be placed now, else in turn.

        `place` asks once; with Exhausted SATURATED it is called again later, and whatever else it raises is raised
        here. Exhausted QUEUE_FULL or QUEUE_TIMEOUT with a hint, DeadlinePassed as soon as a place would be too late.
        """
        self._seats.came(ticket, time.monotonic())
        try:
            return await self._placed(ticket, place)
        finally:
            self._seats.left(ticket)

    async def _placed(self, ticket: Ticket, place: Place[T]) -> T:
        if self._may(ticket) and self._fair.may_pass(ticket.priority, time.monotonic(), self._may):
            rooms = self._rooms
            try:
                place_found = await self._asked(place)
            except Exhausted as refusal:
                if refusal.reason != SATURATED:
                    raise
                retry_s = self._retry_s(refusal, rooms)
            else:
                self._fair.placed(ticket, time.monotonic())
                return place_found
            return await self._in_turn(ticket, place, retry_s)
        return await self._in_turn(ticket, place, _MOST_RETRY_S)

    def note_fleet(self, seats: int, reserve: int) -> None:
        """A router said how many sequences the replicas run at once, and how many of those seats are kept free for
        tenants within their share; 0 and 0 from one that does not know."""
        self._seats.fleet(seats, reserve)

    def beyond_share(self, ticket: Ticket) -> bool:
        """Whether the request's tenant holds its fair share of the seats, or more, while others are about."""
        return self._seats.beyond_share(ticket, time.monotonic())

    def note_taken(self, ticket: Ticket) -> None:
        """An attempt of a request is at a replica; `note_room` with the same ticket when it has left."""
        self._seats.took(ticket)

    def note_room(self, ticket: Ticket | None = None) -> None:
        """A request of this gateway left its replica: whoever is next may try at once."""
        if ticket is not None:
            self._seats.gave(ticket)
        self._rooms += 1
        self._grant()

    def charge(self, ticket: Ticket, *, output_tokens: int = 0, cached_tokens: int = 0) -> None:
        """A placed request was served: tokens it emitted now, and once, prompt tokens that turned out to be cached."""
        self._fair.charge(ticket, output_tokens=output_tokens, cached_tokens=cached_tokens)

    async def _in_turn(self, ticket: Ticket, place: Place[T], retry_s: float) -> T:
        turn = self._enter(ticket, retry_s)
        priority = ticket.priority.name.lower()
        entered_at = time.monotonic()
        waiting = WAITING.labels(priority)
        waiting.inc()
        try:
            while True:
                why = await turn
                if why is not None:
                    raise self._refusal(why)
                rooms = self._rooms
                try:
                    place_found = await self._asked(place)
                except Exhausted as refusal:
                    if refusal.reason != SATURATED:
                        raise
                    turn = self._turns[ticket]
                    self._trying = None
                    self._grant_in(self._retry_s(refusal, rooms))
                else:
                    now = time.monotonic()
                    self._fair.placed(ticket, now)
                    self._pace(now)
                    WAIT_SECONDS.labels(priority).observe(now - entered_at)
                    return place_found
        finally:
            waiting.dec()
            self._leave(ticket)

    async def _asked(self, place: Place[T]) -> T:
        self._seats.asks(1)
        try:
            return await place()
        finally:
            self._seats.asks(-1)

    def _may(self, ticket: Ticket) -> bool:
        return self._seats.may_take(ticket, time.monotonic())

    def _enter(self, ticket: Ticket, retry_s: float) -> asyncio.Future[Why | None]:
        """Begin to wait; the future of the ticket's first turn. Each grant replaces it by that of the next."""
        now = time.monotonic()
        for ended in self._fair.push(ticket, now):
            if ended.ticket is ticket:
                raise self._refusal(ended.why)
            self._end(ended)
        turn = self._turns[ticket] = asyncio.get_running_loop().create_future()
        if self._trying is None:
            self._grant_in(retry_s)
        self._watch_expiry()
        return turn

    def _leave(self, ticket: Ticket) -> None:
        """Nothing of the ticket stays; if it was its turn, the next one tries."""
        self._turns.pop(ticket, None)
        self._fair.remove(ticket)
        if self._trying is ticket:
            self._trying = None
            self._grant()
        if not self._turns:
            self._stop_timers()

    def _grant(self) -> None:
        """Give the turn to the head, unless somebody has it."""
        if self._trying is not None or not self._turns:
            return
        self._retry.stop()
        if self._expiry.at <= time.monotonic():
            self._expire()
        head = self._fair.head(time.monotonic(), self._may)
        if head is not None:
            self._trying = head
            turn, self._turns[head] = self._turns[head], asyncio.get_running_loop().create_future()
            if not turn.done():  # cancelled a moment ago: on its way out it passes the turn on
                turn.set_result(None)

    def _grant_in(self, delay_s: float) -> None:
        if delay_s <= 0:
            self._grant()
        else:
            self._retry.by(time.monotonic() + delay_s)

    def _retry_s(self, refusal: Exhausted, rooms: int) -> float:
        """When to try again: at once if there was room since, else when the router thinks so, within bounds."""
        if self._rooms != rooms:
            return 0.0
        hint_s = _MOST_RETRY_S if refusal.retry_after_s is None else refusal.retry_after_s
        return min(max(hint_s, _LEAST_RETRY_S), _MOST_RETRY_S)

    def _watch_expiry(self) -> None:
        """Look again when the next ticket's time will have passed."""
        due = self._fair.next_expiry()
        if due is not None:
            self._expiry.by(due)

    def _expire(self) -> None:
        self._expiry.stop()
        for ended in self._fair.expire(time.monotonic()):
            self._end(ended)
        self._watch_expiry()

    def _end(self, ended: Ended) -> None:
        """Tell its waiter; one that is just trying hears it only if it gets no place."""
        turn = self._turns[ended.ticket]
        if not turn.done():
            turn.set_result(ended.why)

    def _stop_timers(self) -> None:
        self._retry.stop()
        self._expiry.stop()
        self._placed_at = None

    def _pace(self, now: float) -> None:
        """Mean time between two places given to those who wait, the last five counting most."""
        if self._placed_at is not None:
            interval_s = now - self._placed_at
            self._interval_s = interval_s if self._interval_s is None else 0.8 * self._interval_s + 0.2 * interval_s
        self._placed_at = now

    def _refusal(self, why: Why) -> HeadraceError:
        REFUSALS.labels(why.value).inc()
        if why is Why.DEADLINE:
            return DeadlinePassed("the deadline leaves no time to wait for a replica", metadata={"tokens_emitted": "0"})
        estimate_s = (self._interval_s or 1.0) * (len(self._fair) + 1)
        return Exhausted(
            "all replicas are busy and too many requests wait"
            if why is Why.QUEUE_FULL
            else f"no replica became free within {self._fair.bounds.max_wait_s:g} s",
            reason=why.value,
            retry_after_s=min(max(estimate_s, _LEAST_HINT_S), _MOST_HINT_S),
        )


class RequestQueues:
    """The queues of all deployments: a full one holds up none of the others."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._queues: dict[str, RequestQueue] = {}

    def of(self, deployment: str) -> RequestQueue:
        """The deployment's queue; there are as many as deployments that were ever asked for and exist."""
        queue = self._queues.get(deployment)
        if queue is None:
            queue = self._queues[deployment] = RequestQueue(self._bounds)
        return queue
