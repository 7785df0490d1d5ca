"""What was placed but no heartbeat shows yet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.router.core.estimate import NOTHING_BOOKED, Booked
from headrace.router.core.replica import Attempt, AttemptKey, EngineId, Replica
from headrace.router.core.view import Sighting

ARRIVAL_S = 0.1
"""From a placement until the engine counts the sequence: the gateway answers, submits, the engine queues. A
heartbeat written sooner than that after the booking may not show it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Booking:
    """One placed attempt."""

    engine_id: EngineId
    epoch: int
    prompt_tokens: int
    made_at: float


class Bookings:
    """Live bookings, at most one per attempt.

    Each ends by itself: when a heartbeat of its replica shows it, when its replica has restarted or is gone, or
    at the freshness bound, when the replica would be stale anyhow. While heartbeats are missing they stay, so
    a router without Redis still spreads its load. Releasing only makes it earlier.
    """

    def __init__(self, *, longest_s: float) -> None:
        self._longest_s = longest_s
        self._of: dict[AttemptKey, Booking] = {}
        self._sums: dict[EngineId, Booked] | None = None

    def __len__(self) -> int:
        return len(self._of)

    def book(self, attempt: Attempt, replica: Replica, now: float) -> None:
        """File `attempt` under `replica`, instead of wherever it was before."""
        self._of[attempt.key] = Booking(
            engine_id=replica.engine_id, epoch=replica.epoch, prompt_tokens=attempt.prompt_tokens, made_at=now
        )
        self._sums = None

    def release(self, key: AttemptKey) -> bool:
        """End a booking early; False when there was none."""
        self._sums = None
        return self._of.pop(key, None) is not None

    def settle(self, sightings: Mapping[EngineId, Sighting], now: float) -> None:
        """End what has ended by `now`."""
        self._of = {k: b for k, b in self._of.items() if self._live(b, sightings.get(b.engine_id), now)}
        self._sums = None

    def on(self, engine_id: EngineId) -> Booked:
        """The sum of live bookings on one replica."""
        if self._sums is None:
            self._sums = _summed(self._of)
        return self._sums.get(engine_id, NOTHING_BOOKED)

    def _live(self, booking: Booking, sighting: Sighting | None, now: float) -> bool:
        if sighting is None or sighting.seen.epoch != booking.epoch:
            return False
        shown = sighting.written_at >= booking.made_at + ARRIVAL_S
        return not shown and now < booking.made_at + self._longest_s


def _summed(bookings: Mapping[AttemptKey, Booking]) -> dict[EngineId, Booked]:
    sums: dict[EngineId, Booked] = {}
    for booking in bookings.values():
        one = sums.get(booking.engine_id, NOTHING_BOOKED)
        sums[booking.engine_id] = Booked(
            sequences=one.sequences + 1, prompt_tokens=one.prompt_tokens + booking.prompt_tokens
        )
    return sums
