"""What the controller counts; `deployment` is a label as deployments are few and named by operators."""

from __future__ import annotations

from headrace.observe.metrics import counter, gauge, histogram

DESIRED = gauge("headrace_controller_desired_replicas", "Replicas wanted.", ("deployment",))
READY = gauge("headrace_controller_ready_replicas", "Replicas ready by fresh heartbeat.", ("deployment",))
SATURATED = gauge(
    "headrace_controller_saturated_replicas",
    "Ready replicas at the saturation threshold; absent when it is not known.",
    ("deployment",),
)
LEADING = gauge("headrace_controller_leading", "1 while this controller is the one that acts.")
STARTS = counter("headrace_controller_engine_starts_total", "Engine processes started.", ("deployment",))
EXITS = counter(
    "headrace_controller_engine_exits_total", "Engine processes seen to have ended.", ("deployment", "expected")
)
FAILED_ACTIONS = counter("headrace_controller_failed_actions_total", "Actions that failed.", ("action",))
BLIND_TURNS = counter(
    "headrace_controller_blind_turns_total", "Turns without a decision or with one on missing evidence.", ("missing",)
)
INVALID_INTENT = counter("headrace_controller_invalid_intent_total", "Values in etcd that could not be used.")
RECONCILE_S = histogram("headrace_controller_reconcile_seconds", "One turn: look, decide, act.")
