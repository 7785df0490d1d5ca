"""A replica that is new is given a growing share of its capacity: its caches are cold, its estimates young."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.router.core.replica import EngineId, Phase, Replica
from headrace.router.core.view import Sighting

LEAST_RAMP = 0.1
"""Below a tenth it would learn nothing of its own speed."""


class SlowStart:
    """Since when each life of a replica has been ready, as far as this router has seen it begin."""

    def __init__(self) -> None:
        self._since: dict[EngineId, tuple[int, float | None]] = {}
        self._watching = False

    def observe(self, sightings: Mapping[EngineId, Sighting], now: float) -> None:
        """Note who is ready at `now`. What is ready at the first look is not new: the router is."""
        ready = {
            i: s.seen.epoch
            for i, s in sightings.items()
            if isinstance(s.seen, Replica) and s.seen.phase is not Phase.WARMING
        }
        self._since = {
            i: self._since[i] if self._knows(i, epoch) else (epoch, now if self._watching else None)
            for i, epoch in ready.items()
        }
        self._watching = True

    def ramp(self, replica: Replica, slow_start_s: float, now: float) -> float:
        """The share of its capacity it is given, `LEAST_RAMP` to 1."""
        epoch, since = self._since.get(replica.engine_id, (0, None))
        if slow_start_s <= 0 or since is None or epoch != replica.epoch:
            return 1.0
        return min(1.0, max(LEAST_RAMP, (now - since) / slow_start_s))

    def _knows(self, engine_id: EngineId, epoch: int) -> bool:
        return engine_id in self._since and self._since[engine_id][0] == epoch
