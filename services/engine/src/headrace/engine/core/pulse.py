"""Whether the worker still works, judged by its silence."""

from __future__ import annotations

from enum import Enum


class Vital(Enum):
    """What its silence says of a worker."""

    WORKING = "WORKING"
    STALLED = "STALLED"  # silent for longer than any step takes: no new work until it is heard
    LOST = "LOST"  # silent for so long that waiting helps nobody


class Pulse:
    """The silence of one worker. `listen` is called every `period_s` or so; instants are monotonic seconds.

    A worker that works is never silent for long: it reports each step, answers a ping between steps, and says before a
    long step how long that may take. Only time in which somebody listened counts: when this whole process was stopped,
    the worker may have spoken all the while.
    """

    def __init__(self, *, period_s: float, stall_s: float, lost_s: float) -> None:
        self._period_s = period_s
        self._stall_s = stall_s
        self._lost_s = lost_s
        self._listened_at: float | None = None
        self._granted_s = 0.0
        self.silent_s = 0.0

    def heard(self, silent_s: float = 0.0) -> None:
        """It spoke; `silent_s` is how much longer than usual it may be silent from now on."""
        self.silent_s = 0.0
        self._granted_s = silent_s

    def listen(self, now: float) -> Vital:
        """Count the time since the last call as silence, unless it spoke since then; what that means."""
        if self._listened_at is not None:
            self.silent_s += min(now - self._listened_at, 2 * self._period_s)
        self._listened_at = now
        silent_s = self.silent_s - self._granted_s
        if silent_s > self._lost_s:
            return Vital.LOST
        return Vital.STALLED if silent_s > self._stall_s else Vital.WORKING
