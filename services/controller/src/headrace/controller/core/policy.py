"""The numbers decisions are made with."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Bounds and delays, in seconds."""

    freshness_s: float = 10.0
    """A heartbeat older than this says nothing: the router's bound, so both call the same replicas ready."""
    drain_s: float = 30.0
    """A replica that was told to drain and is still there after this is killed."""
    first_restart_s: float = 0.5
    longest_restart_s: float = 60.0
    refused_restart_s: float = 300.0
    """For an engine that refused its settings: only a new value or a new engine version can change its mind."""
    stable_s: float = 60.0
    """Ready for this long, a replica's earlier crashes are forgotten."""
    clock_slack_s: float = 2.0
    """How much earlier than its process an epoch may seem: both are wall times, read in different ways."""

    def restart_delay_s(self, failures: int) -> float:
        """How long to wait after the crash that made it `failures` in a row: 0.5, 1, 2, 4, … 60 s."""
        # The exponent is bounded because 2.0 ** 1024 overflows and a crash loop can run for days.
        return min(self.first_restart_s * 2.0 ** min(failures - 1, 30), self.longest_restart_s)
