"""Engines that failed a request, kept out of the placement of others for a while."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.gateway.core.life import Life

_NOBODY: frozenset[Life] = frozenset()


@dataclass(slots=True, kw_only=True)
class Quarantine:
    """Until when each life is kept out; bounded by the number of engines that ever misbehaved at once."""

    duration_s: float = 10.0
    _until: dict[Life, float] = field(default_factory=dict)

    def add(self, life: Life, now: float) -> None:
        """Keep `life` out for `duration_s` from now."""
        self._until[life] = now + self.duration_s

    def lives(self, now: float) -> frozenset[Life]:
        """Those kept out now."""
        if not self._until:
            return _NOBODY
        self._until = {life: until for life, until in self._until.items() if until > now}
        return frozenset(self._until)
