"""When a replica is saturated: the one threshold that router, gateway and controller share.

With thresholds of their own they work against each other: a router that sheds at 70 % never lets a controller see the
80 % at which it would add a replica.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MOST_WAITING = 1000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Saturation:
    """Bounds beyond which more work would only wait; a replica at either one is saturated.

    `waiting`: sequences waiting, as a share of the most that run at once. `pressure`: how full its KV cache is for
    admission, 0 to 1. ValueError for bounds that mean nothing.
    """

    waiting: float = 1.0
    pressure: float = 0.95

    def __post_init__(self) -> None:
        if not 0.0 <= self.waiting <= MOST_WAITING:  # false for NaN, too
            raise ValueError(f"saturation.waiting must be from 0 to {MOST_WAITING:.0f}, not {self.waiting}")
        if not 0.0 < self.pressure <= 1.0:
            raise ValueError(f"saturation.pressure must be above 0 and at most 1, not {self.pressure}")

    def allowance(self, *, waiting: int, running: int, max_num_seqs: int, pressure: float) -> int:
        """How many more sequences make it saturated; 0 when it is already.

        Those that find a free slot do not wait. A pressure that is not known counts as full: unknown is not idle.
        """
        bound = max(1, math.ceil(self.waiting * max_num_seqs))
        if waiting >= bound or not pressure < self.pressure:
            return 0
        return bound - waiting + max(0, max_num_seqs - running - waiting)

    def reached(self, *, waiting: int, running: int, max_num_seqs: int, pressure: float) -> bool:
        """Whether a replica with this load is saturated."""
        return not self.allowance(waiting=waiting, running=running, max_num_seqs=max_num_seqs, pressure=pressure)
