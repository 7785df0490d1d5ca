"""Engines that failed a request, kept out of the placement of others for a while."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class Quarantine:
    """Engine ids and until when each is kept out; bounded by the number of engines that ever misbehaved at once."""

    duration_s: float = 10.0
    _until: dict[str, float] = field(default_factory=dict)

    def add(self, engine_id: str, now: float) -> None:
        """Keep `engine_id` out for `duration_s` from now."""
        self._until[engine_id] = now + self.duration_s

    def engine_ids(self, now: float) -> frozenset[str]:
        """Those kept out now."""
        self._until = {engine: until for engine, until in self._until.items() if until > now}
        return frozenset(self._until)
