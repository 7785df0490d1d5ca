"""Growing, jittered delays between tries."""

from __future__ import annotations

import random
from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class Backoff:
    """Delays from `first_s`, doubling up to `longest_s`, each shortened by up to half at random.

    Half-jitter keeps a lower bound (no hot loop) and still spreads a crowd of retriers.
    """

    first_s: float = 0.1
    longest_s: float = 5.0
    random: random.Random = field(default_factory=random.Random)
    _next_s: float = 0.0

    def next_s(self) -> float:
        """The delay before the next try."""
        self._next_s = min(self._next_s * 2 or self.first_s, self.longest_s)
        return self._next_s * self.random.uniform(0.5, 1.0)

    def reset(self) -> None:
        """Start from `first_s` again, after a success."""
        self._next_s = 0.0
