"""What this router has placed and no heartbeat shows yet: its own part of what the booking board in Redis holds.

It orders the shortlist, and while Redis is away it is all there is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.router.core.estimate import NOTHING_BOOKED, Booked
from headrace.router.core.replica import AttemptKey, EngineId
from headrace.router.core.view import Sighting

ARRIVAL_S = 0.1
"""From a placement until the engine counts the sequence: the gateway answers, submits, the engine queues. A
heartbeat written sooner than that after the booking may not show it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Booking:
    """One placed attempt: how many sequences, and prompt tokens that are not cached."""

    engine_id: EngineId
    epoch: int
    sequences: int
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
        self._sums: dict[EngineId, Booked] = {}

    def __len__(self) -> int:
        return len(self._of)

    def book(self, key: AttemptKey, booking: Booking) -> None:
        """File an attempt, instead of wherever it was before."""
        self.release(key)
        self._of[key] = booking
        self._add(booking.engine_id, booking.sequences, booking.prompt_tokens)

    def release(self, key: AttemptKey) -> bool:
        """End a booking early; False when there was none."""
        ended = self._of.pop(key, None)
        if ended is not None:
            self._add(ended.engine_id, -ended.sequences, -ended.prompt_tokens)
        return ended is not None

    def settle(self, sightings: Mapping[EngineId, Sighting], now: float) -> None:
        """End what has ended by `now`."""
        for key in [k for k, b in self._of.items() if not self._live(b, sightings.get(b.engine_id), now)]:
            self.release(key)

    def on(self, engine_id: EngineId) -> Booked:
        """The sum of live bookings on one replica."""
        return self._sums.get(engine_id, NOTHING_BOOKED)

    def _add(self, engine_id: EngineId, sequences: int, prompt_tokens: int) -> None:
        before = self.on(engine_id)
        after = Booked(sequences=before.sequences + sequences, prompt_tokens=before.prompt_tokens + prompt_tokens)
        if after.sequences:
            self._sums[engine_id] = after
        else:
            self._sums.pop(engine_id, None)

    def _live(self, booking: Booking, sighting: Sighting | None, now: float) -> bool:
        if sighting is None or sighting.seen.epoch != booking.epoch:
            return False
        shown = sighting.written_at >= booking.made_at + ARRIVAL_S
        return not shown and now < booking.made_at + self._longest_s
