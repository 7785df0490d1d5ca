"""What the router counts."""

from __future__ import annotations

import math

from headrace.observe.metrics import counter, gauge, histogram
from headrace.router.core.placement import Decision, Placed
from headrace.router.core.router import Router
from headrace.router.core.view import State

_DECISIONS = counter("headrace_router_placements_total", "Placement decisions: placed, or why not.", ("outcome",))
_VERDICTS = counter("headrace_router_verdicts_total", "What became of each replica in each decision.", ("verdict",))
_SECONDS = histogram(
    "headrace_router_place_seconds",
    "Time to decide one placement.",
    buckets=(0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.25),
)
_REPLICAS = gauge("headrace_router_replicas", "Replicas in the view, by state.", ("state",))
_BOOKINGS = gauge("headrace_router_bookings", "Placements that no heartbeat shows yet.")
_DEGRADED = gauge("headrace_router_degraded", "1 while the replica board cannot be read.")
_VIEW_AGE = gauge("headrace_router_view_age_seconds", "Time since the replica board was last read; NaN before.")
_UNREADABLE = counter("headrace_router_unreadable_records_total", "Heartbeats that could not be understood.")
_READS = counter("headrace_router_board_reads_total", "Reads of the replica board.", ("outcome",))

_VIEW_AGE.set(math.nan)


def count_decision(decision: Decision, seconds: float) -> None:
    """One placement decided, in `seconds`."""
    _DECISIONS.labels("placed" if isinstance(decision, Placed) else decision.reason.value).inc()
    for considered in decision.considered:
        _VERDICTS.labels(considered.verdict.value).inc()
    _SECONDS.observe(seconds)


def count_read(outcome: str) -> None:
    """One read of the board: ``ok`` or ``failed``."""
    _READS.labels(outcome).inc()


def count_unreadable() -> None:
    """One heartbeat that could not be understood."""
    _UNREADABLE.inc()


def show_view(router: Router, now: float) -> None:
    """Set the gauges to what the router knows at `now`."""
    states = list(router.view.states(now, router.freshness_s).values())
    for state in State:
        _REPLICAS.labels(state.value).set(states.count(state))
    _BOOKINGS.set(len(router.bookings))
    _DEGRADED.set(router.view.degraded)
    if router.view.read_at is not None:
        _VIEW_AGE.set(now - router.view.read_at)
