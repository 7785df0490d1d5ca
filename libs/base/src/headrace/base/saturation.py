"""When a replica is saturated: the one threshold that router, gateway and controller share.

With thresholds of their own they work against each other: a router that sheds at 70 % never lets a controller see the
80 % at which it would add a replica.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

MOST_WAITING = 1000.0
# Bookings of the last 0.1 s before a heartbeat count twice, and a router's view is up to 0.35 s old: one that kept to
# the seat would leave a fifth of a busy replica's seats empty.
_LATE = 0.25
_BEGINNING = 1 / 8
_LEAST_SHARED = 4  # of fewer seats a reserve would be a third and more


@dataclass(frozen=True, slots=True, kw_only=True)
class Saturation:
    """Bounds beyond which more work would only wait; a replica at either one is saturated.

    `waiting`: sequences waiting, as a share of the most that run at once. `pressure`: how full its KV cache is for
    admission, 0 to 1. `reserve`: of the most that run at once, the share that a tenant beyond its fair share leaves
    free for others. ValueError for bounds that mean nothing.
    """

    waiting: float = 1.0
    pressure: float = 0.95
    reserve: float = 1 / 8

    def __post_init__(self) -> None:
        if not 0.0 <= self.waiting <= MOST_WAITING:  # false for NaN, too
            raise ValueError(f"saturation.waiting must be from 0 to {MOST_WAITING:.0f}, not {self.waiting}")
        if not 0.0 < self.pressure <= 1.0:
            raise ValueError(f"saturation.pressure must be above 0 and at most 1, not {self.pressure}")
        if not 0.0 <= self.reserve <= 0.5:
            raise ValueError(f"saturation.reserve must be from 0 to 0.5, not {self.reserve}")

    def allowance(self, *, waiting: int, running: int, max_num_seqs: int, pressure: float) -> int:
        """How many more sequences make it saturated; 0 when it is already.

        Those that find a free slot do not wait. A pressure that is not known counts as full: unknown is not idle.
        """
        bound, free = max(1, math.ceil(self.waiting * max_num_seqs)), max(0, max_num_seqs - running)
        # Beside free slots a few are merely seen between two steps: they begin with the next one.
        beginning = min(waiting, free, max(1, math.floor(_BEGINNING * max_num_seqs)))
        waits = waiting - beginning
        if waits >= bound or not pressure < self.pressure:
            return 0
        return bound - waits + max(0, free - waiting)

    def reserved(self, max_num_seqs: int) -> int:
        """How many seats of a replica are the reserve: the share, rounded up, but none of fewer than four seats."""
        return math.ceil(self.reserve * max_num_seqs) if max_num_seqs >= _LEAST_SHARED else 0

    def allowance_beyond_share(self, *, waiting: int, running: int, max_num_seqs: int, pressure: float) -> int:
        """How many more sequences of tenants beyond their fair share it takes: those let next to nothing wait there."""
        most = min(self.waiting, _LATE)
        bounds = self if most == self.waiting else replace(self, waiting=most)
        return bounds.allowance(waiting=waiting, running=running, max_num_seqs=max_num_seqs, pressure=pressure)

    def reached(self, *, waiting: int, running: int, max_num_seqs: int, pressure: float) -> bool:
        """Whether a replica with this load is saturated."""
        return not self.allowance(waiting=waiting, running=running, max_num_seqs=max_num_seqs, pressure=pressure)
