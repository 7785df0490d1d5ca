"""Deadlines: monotonic instants inside a process, durations on the wire."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Deadline:
    """The instant (monotonic seconds) after which an answer is of no use."""

    at: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """`seconds` from now."""
        return cls(time.monotonic() + seconds)

    @classmethod
    def never(cls) -> Deadline:
        """For long-lived streams that keepalive watches instead; nothing else may use it."""
        return cls(math.inf)

    def remaining_s(self) -> float:
        """Seconds left; negative when passed, infinite for `never`."""
        return self.at - time.monotonic()

    def capped(self, seconds: float) -> Deadline:
        """This deadline, or `seconds` from now if that is earlier."""
        return Deadline(min(self.at, time.monotonic() + seconds))

    def timeout_s(self) -> float | None:
        """What gRPC wants as `timeout`: None for `never`, else at least 1 ms."""
        return None if math.isinf(self.at) else max(self.remaining_s(), 0.001)
