"""What the router counts."""

from __future__ import annotations

import math
from collections import Counter as Counted
from functools import cache
from operator import itemgetter

from headrace.api.routing.v1 import routing_service_pb2 as pb
from headrace.observe.metrics import counter, gauge, histogram
from headrace.router.core.eligibility import Verdict
from headrace.router.core.placement import Decision, Placed
from headrace.router.core.replica import Phase, Replica
from headrace.router.core.router import Router
from headrace.router.core.view import State

_DECISIONS = counter("headrace_router_placements_total", "Placement decisions: placed, or why not.", ("outcome",))
_PLACED = _DECISIONS.labels("placed")
_VERDICTS = counter("headrace_router_verdicts_total", "What became of each replica in each decision.", ("verdict",))
_SECONDS = histogram(
    "headrace_router_place_seconds",
    "Time to decide one placement, Redis included.",
    buckets=(0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.05, 0.25),
)
_REUSED = counter("headrace_router_cached_tokens_total", "Prompt tokens believed to be cached where they were placed.")
_PROMPTS = counter("headrace_router_prompt_tokens_total", "Prompt tokens placed.")
_REPLICAS = gauge("headrace_router_replicas", "Replicas in the view, by state.", ("state",))
_SATURATION = gauge(
    "headrace_router_saturation",
    "Share of a deployment's fresh, ready replicas that are saturated; 1 when there is none.",
    ("deployment",),
)
_BOOKINGS = gauge("headrace_router_bookings", "This router's placements that no heartbeat shows yet.")
_DEGRADED = gauge("headrace_router_degraded", "1 while the replica board cannot be read.")
_VIEW_AGE = gauge("headrace_router_view_age_seconds", "Time since the replica board was last read; NaN before.")
_UNREADABLE = counter("headrace_router_unreadable_records_total", "Heartbeats that could not be understood.")
_READS = counter("headrace_router_board_reads_total", "Reads of the replica board.", ("outcome",))
_EJECTIONS = counter("headrace_router_ejections_total", "Replicas taken out after failed attempts.")
_RATIO = histogram(
    "headrace_router_estimate_ratio",
    "What an attempt took, divided by its estimate: 1 is right, above 1 it took longer.",
    ("deployment", "part"),
    buckets=(0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0, 100.0),
)

_STATES = [(state, _REPLICAS.labels(state.value)) for state in State]
_READ_OUTCOMES = {outcome: _READS.labels(outcome) for outcome in ("ok", "failed")}
_VERDICT_OF = itemgetter(1)  # the second of a `Considered`

_VIEW_AGE.set(math.nan)
_shown: set[str] = set()  # deployments that have a saturation gauge: one whose replicas are gone must not keep its last


def count_decision(decision: Decision, prompt_tokens: int, seconds: float) -> None:
    """One prompt's placement decided, in `seconds`."""
    for verdict, n in Counted(map(_VERDICT_OF, decision.considered)).items():
        _verdict(verdict).inc(n)
    if isinstance(decision, Placed):
        _PLACED.inc()
        _REUSED.inc(decision.cached_tokens)
        _PROMPTS.inc(prompt_tokens)
    else:
        _DECISIONS.labels(decision.reason.value).inc()
    _SECONDS.observe(seconds)


@cache
def _verdict(verdict: Verdict):  # type: ignore[no-untyped-def]  # a labelled child has no public type
    return _VERDICTS.labels(verdict.value)


def compare(decision: pb.Decision) -> None:
    """An attempt has been reported: what it took against what was estimated, where both are known.

    An answer that ended early is compared with the estimate for as many tokens as it had.
    """
    outcome, estimate = decision.outcome, decision.placed.estimate
    if outcome.outcome != pb.OUTCOME_OK or not decision.placed.HasField("estimate"):
        return
    deployment = decision.asked.deployment
    first_s = estimate.queue_s + estimate.prefill_s
    if outcome.first_token_s > 0 and first_s > 0:
        _RATIO.labels(deployment, "first_token").observe(outcome.first_token_s / first_s)
    most = decision.asked.max_tokens
    if outcome.total_s > 0 and outcome.output_tokens and most:
        expected_s = first_s + estimate.decode_s * min(1.0, outcome.output_tokens / most)
        if expected_s > 0:
            _RATIO.labels(deployment, "total").observe(outcome.total_s / expected_s)


def count_ejection() -> None:
    """A replica was taken out."""
    _EJECTIONS.inc()


def count_read(outcome: str) -> None:
    """One read of the board: ``ok`` or ``failed``."""
    _READ_OUTCOMES[outcome].inc()


def count_unreadable() -> None:
    """One heartbeat that could not be understood."""
    _UNREADABLE.inc()


def show_view(router: Router, now: float, states: list[State]) -> None:
    """Set the gauges to what the router knows at `now`."""
    for state, replicas in _STATES:
        replicas.set(states.count(state))
    deployments = set(router.deployments())
    for deployment in deployments:
        _SATURATION.labels(deployment).set(saturation(router, deployment, now))
    for gone in _shown - deployments:
        _SATURATION.remove(gone)
    _shown.clear()
    _shown.update(deployments)
    _BOOKINGS.set(len(router.bookings))
    _DEGRADED.set(router.view.degraded)
    if router.view.read_at is not None:
        _VIEW_AGE.set(now - router.view.read_at)


def saturation(router: Router, deployment: str, now: float) -> float:
    """The share of a deployment's serving replicas that are saturated. Nobody to serve is no idle fleet: 1."""
    rules, bookings = router.rules_of(deployment), router.bookings
    serving = [
        s.seen
        for s in router.fleet(deployment)
        if isinstance(s.seen, Replica) and s.seen.phase is Phase.READY and s.age_s(now) <= rules.freshness_s
    ]
    full = sum(
        bookings.on(r.engine_id).sequences
        >= rules.saturation.allowance(
            waiting=r.waiting, running=r.running, max_num_seqs=r.max_num_seqs, pressure=r.pressure
        )
        for r in serving
    )
    return full / len(serving) if serving else 1.0
