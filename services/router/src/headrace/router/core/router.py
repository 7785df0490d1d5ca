"""The router's whole state, a view and the bookings on it, and what may happen to it."""

from __future__ import annotations

from headrace.router.core.bookings import Bookings
from headrace.router.core.placement import Decision, Pick, Placed, Reason, Refused, decide
from headrace.router.core.replica import Attempt, AttemptKey
from headrace.router.core.view import Reading, View, after_failure, after_reading


class Router:
    """Takes readings of the board, places attempts. Instants are local monotonic seconds."""

    def __init__(self, *, freshness_s: float, pick: Pick) -> None:
        self.freshness_s = freshness_s
        self.view = View()
        self.bookings = Bookings(longest_s=freshness_s)
        self._pick = pick

    def observed(self, reading: Reading, now: float) -> None:
        """A read of the board succeeded."""
        self.view = after_reading(self.view, reading)
        self.bookings.settle(self.view.sightings, now)

    def unobserved(self, now: float) -> None:
        """A read of the board failed."""
        self.view = after_failure(self.view)
        self.bookings.settle(self.view.sightings, now)

    def place(self, attempt: Attempt, now: float) -> Decision:
        """Decide and book. The same attempt again moves its booking: its answer was lost, it did not double."""
        self.bookings.release(attempt.key)
        if self.view.read_at is None:
            return Refused(reason=Reason.NO_VIEW)
        decision = decide(
            now=now,
            sightings=self.view.sightings,
            booked_on=self.bookings.on,
            attempt=attempt,
            freshness_s=self.freshness_s,
            pick=self._pick,
        )
        if isinstance(decision, Placed):
            self.bookings.book(attempt, decision.replica, now)
        return decision

    def release(self, key: AttemptKey) -> None:
        """End a booking early; an unknown one is no error."""
        self.bookings.release(key)
