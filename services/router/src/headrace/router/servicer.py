"""RoutingService: messages in, one decision, a word about it everywhere it is looked for."""

from __future__ import annotations

import time
from typing import Any

from opentelemetry import trace

from headrace.api.routing.v1 import routing_service_pb2 as pb
from headrace.api.routing.v1 import routing_service_pb2_grpc as rpc
from headrace.observe.log import get_logger
from headrace.router import metrics
from headrace.router.adapters import wire
from headrace.router.core.placement import Decision, Placed, Refused
from headrace.router.core.replica import Attempt
from headrace.router.core.router import Router
from headrace.router.ports import Clock

log = get_logger(__name__)


class RoutingServicer(rpc.RoutingServiceServicer):
    """No handler waits for anything, so a decision is atomic: nothing can come between view, choice and booking."""

    def __init__(self, router: Router, *, clock: Clock, retry_after_s: float) -> None:
        self._router = router
        self._clock = clock
        self._retry_after_s = retry_after_s

    async def Place(self, request: pb.PlaceRequest, context: Any) -> pb.PlaceResponse:
        """Choose and book a replica."""
        started = time.perf_counter()
        attempt = wire.attempt(request)
        decision = self._router.place(attempt, self._clock())
        degraded = self._router.view.degraded
        metrics.count_decision(decision, time.perf_counter() - started)
        _tell(attempt, decision, degraded)
        if isinstance(decision, Refused):
            raise wire.refusal_error(decision, attempt, degraded=degraded, retry_after_s=self._retry_after_s)
        return wire.placed_message(decision, degraded=degraded)

    async def Release(self, request: pb.ReleaseRequest, context: Any) -> pb.ReleaseResponse:
        """End a booking early."""
        self._router.release(wire.attempt_key(request))
        return pb.ReleaseResponse()

    async def ListReplicas(self, request: pb.ListReplicasRequest, context: Any) -> pb.ListReplicasResponse:
        """Show the view."""
        return wire.list_message(self._router, self._clock())


def _tell(attempt: Attempt, decision: Decision, degraded: bool) -> None:
    """Put the decision with its reasons into the call's span and the log: refusals at info, the rest at debug."""
    reasons = [f"{c.engine_id}={c.verdict.value} age={c.age_s:.3f}" for c in decision.considered]
    span = trace.get_current_span()
    span.set_attribute("headrace.attempt", attempt.key.attempt)
    span.set_attribute("headrace.degraded", degraded)
    span.set_attribute("headrace.considered", reasons)
    facts = {
        "request": attempt.key.request_id,
        "attempt": attempt.key.attempt,
        "degraded": degraded,
        "considered": reasons,
    }
    if isinstance(decision, Placed):
        span.set_attribute("headrace.engine_id", decision.replica.engine_id)
        span.set_attribute("headrace.estimate_s", decision.estimate.total_s)
        log.debug(
            "placement_decided", engine=decision.replica.engine_id, total_s=round(decision.estimate.total_s, 4), **facts
        )
    else:
        log.info("placement_refused", reason=decision.reason.value, **facts)
