"""Timers that are set more often than they ring.

Both keep the instant beside their timer and never ask it: for what is due within half a millisecond uvloop gives a
handle that has no `when`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable


class Alarm:
    """Rings once when the time set last has passed, unless it was stopped before; belongs to the running loop.

    One timer serves all settings: it is left to fire, and fires again at the time that is due by then.
    `asyncio.timeout` makes and cancels a timer for each wait, which costs 3 µs (measured), this one 0.3.
    """

    __slots__ = ("_at", "_fires_at", "_loop", "_ring", "_timer")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._at = 0.0
        self._fires_at = math.inf
        self._ring: Callable[[], None] | None = None
        self._timer: asyncio.Handle | None = None

    def set(self, delay_s: float, ring: Callable[[], None]) -> None:
        """Call `ring` in `delay_s` seconds; forget what was set before."""
        self._ring = ring
        self._at = at = self._loop.time() + delay_s
        if at < self._fires_at:
            self._start(at)

    def stop(self) -> None:
        """Do not ring. The timer stays for the next setting; `close` comes last."""
        self._ring = None

    def close(self) -> None:
        """Do not ring, and leave nothing behind in the loop."""
        self._ring = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer, self._fires_at = None, math.inf

    def _start(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._fires_at = self._loop.call_at(at, self._fire), at

    def _fire(self) -> None:
        self._timer, self._fires_at = None, math.inf
        if self._ring is None:
            return
        if self._at > self._loop.time():
            self._start(self._at)
        else:
            ring, self._ring = self._ring, None
            ring()


class Soonest:
    """Rings at the soonest of the instants asked for, once; then, or when stopped, it has forgotten all of them.

    Instants are seconds of `time.monotonic`, as the loops' own are. It may ring a millisecond early: loops round.
    """

    __slots__ = ("_ring", "_timer", "at")

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._timer: asyncio.Handle | None = None
        self.at = math.inf
        """When it rings; infinite while nothing is asked for."""

    def by(self, at: float) -> None:
        """Ring at `at`, or sooner if that was asked for."""
        if at >= self.at:
            return
        self.stop()
        self.at, self._timer = at, asyncio.get_running_loop().call_at(at, self._fire)

    def stop(self) -> None:
        """Do not ring."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self.at = None, math.inf

    def _fire(self) -> None:
        self._timer, self.at = None, math.inf
        self._ring()
