"""RoutingService: messages in, one decision, a word about it everywhere it is looked for."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from opentelemetry import trace

from headrace.api.routing.v1 import routing_service_pb2 as pb
from headrace.api.routing.v1 import routing_service_pb2_grpc as rpc
from headrace.base.errors import NotFound
from headrace.observe.log import get_logger
from headrace.router import metrics
from headrace.router.adapters import wire
from headrace.router.adapters.booker import Booker
from headrace.router.core.candidates import Considered
from headrace.router.core.eligibility import Verdict
from headrace.router.core.placement import Decision, Placed, Refused
from headrace.router.core.replica import Attempt, EngineId
from headrace.router.core.router import Router
from headrace.router.core.sampling import Sampling
from headrace.router.memory import Memory, Remembered
from headrace.router.placer import Placer
from headrace.router.ports import Clock

log = get_logger(__name__)

SPAN_REPLICAS = 8
"""Replicas told of in one span; the chosen one and the candidates come first."""
REASONED_SPANS_PER_S = 20
"""Placements whose spans have the replicas' numbers, too; of the others `Explain` knows them."""


class RoutingServicer(rpc.RoutingServiceServicer):
    """Place waits for the booking board at most; the view, the choice and the booking are one step there."""

    def __init__(self, router: Router, booker: Booker, memory: Memory, *, clock: Clock, retry_after_s: float) -> None:
        self._router = router
        self._booker = booker
        self._placer = Placer(router, booker, clock=clock)
        self._memory = memory
        self._clock = clock
        self._retry_after_s = retry_after_s
        self._telling = Sampling(most_per_s=REASONED_SPANS_PER_S)

    async def Place(self, request: pb.PlaceRequest, context: Any) -> pb.PlaceResponse:
        """Choose and book a replica."""
        started = time.perf_counter()
        attempt = wire.attempt(request)
        decision, degraded = await self._placer.place(attempt)
        took_s = time.perf_counter() - started
        _tell(attempt, decision, degraded, reasons=self._telling.allows(started))
        remembered = Remembered(
            attempt=attempt.key.attempt,
            decided_unix_ns=time.time_ns(),
            asked=request,
            considered=decision.considered,
        )
        # What nobody waits for comes once the answer is on its way: it is a twentieth of a placement's time.
        asyncio.get_running_loop().call_soon(self._note, request, attempt, decision, remembered, took_s)
        if isinstance(decision, Refused):
            error = wire.refusal_error(decision, attempt, degraded=degraded, retry_after_s=self._retry_after_s)
            remembered.refusal = f"{error.reason}: {error.message}"
            raise error
        remembered.placed = wire.placed_message(decision, degraded=degraded, brief=request.brief)
        return remembered.placed

    def _note(
        self, request: pb.PlaceRequest, attempt: Attempt, decision: Decision, remembered: Remembered, seconds: float
    ) -> None:
        metrics.count_decision(decision, attempt.prompt_tokens, seconds)
        request.ClearField("block_hashes")
        self._memory.decided(attempt.key.request_id, remembered)

    async def Release(self, request: pb.ReleaseRequest, context: Any) -> pb.ReleaseResponse:
        """End a booking early, and learn from how the attempt went."""
        key, now = wire.attempt_key(request), self._clock()
        self._booker.release(key)
        outcome = wire.outcome(request)
        ejected = self._router.ended(
            key, EngineId(request.engine_id), request.epoch, outcome, placed_at=now - request.total_s, now=now
        )
        if ejected:
            metrics.count_ejection()
            backoff_s = self._router.ejection.ejected_s(EngineId(request.engine_id), now)
            log.warning(
                "replica_ejected",
                engine=request.engine_id,
                epoch=request.epoch,
                last=outcome.value,
                probe_in_s=backoff_s,
            )
        if request.outcome != pb.OUTCOME_UNSPECIFIED:
            metrics.compare(self._memory.ended(request).message())
        return pb.ReleaseResponse()

    async def Explain(self, request: pb.ExplainRequest, context: Any) -> pb.ExplainResponse:
        """The decisions remembered about one request."""
        decisions = self._memory.of(request.request_id)
        if not decisions:
            raise NotFound(f"no decision about request {request.request_id!r} is remembered here")
        return pb.ExplainResponse(decisions=decisions)

    async def ListReplicas(self, request: pb.ListReplicasRequest, context: Any) -> pb.ListReplicasResponse:
        """Show the view."""
        sightings = self._router.view.sightings
        seen = await self._booker.look([(i, s.seen.epoch) for i, s in sightings.items()])
        booked = {EngineId(i): s.sequences for i, s in seen.items()}
        return wire.list_message(self._router, self._clock(), booked)


def _tell(attempt: Attempt, decision: Decision, degraded: bool, *, reasons: bool) -> None:
    """Put the decision into the call's span and the log: refusals at info, the rest at debug.

    With `reasons`, or when it is a refusal, the replicas' numbers go with it.
    """
    span = trace.get_current_span()
    traced, refused = span.is_recording(), isinstance(decision, Refused)
    told = _reasons(decision.considered) if refused or (traced and reasons) else []
    if traced:
        span.set_attributes(_attributes(attempt, decision, degraded, told))
    facts = {"request": attempt.key.request_id, "attempt": attempt.key.attempt, "degraded": degraded}
    if isinstance(decision, Placed):
        total_s = round(decision.estimate.total_s, 4) if decision.estimate else None
        log.debug("placement_decided", engine=decision.replica.engine_id, total_s=total_s, considered=told, **facts)
    else:
        log.info("placement_refused", reason=decision.reason.value, considered=told, **facts)


def _attributes(
    attempt: Attempt, decision: Decision, degraded: bool, reasons: list[str]
) -> dict[str, str | bool | int | float | list[str]]:
    told: dict[str, str | bool | int | float | list[str]] = {
        "headrace.attempt": attempt.key.attempt,
        "headrace.degraded": degraded,
    }
    if reasons:
        told["headrace.considered"] = reasons
    if isinstance(decision, Placed):
        told["headrace.engine_id"] = decision.replica.engine_id
        told["headrace.cached_tokens"] = decision.cached_tokens
        told["headrace.policy"] = decision.policy.value
        if decision.estimate:
            told["headrace.estimate_s"] = decision.estimate.total_s
    return told


_FIRST_TOLD = {verdict: 3 for verdict in Verdict} | {Verdict.CHOSEN: 0, Verdict.SLOWER: 1, Verdict.SATURATED: 2}


def _reasons(considered: tuple[Considered, ...]) -> list[str]:
    told = sorted(considered, key=lambda c: _FIRST_TOLD[c.verdict])[:SPAN_REPLICAS]
    return sorted(map(_reason, told))


def _reason(considered: Considered) -> str:
    engine_id, verdict, age_s, estimate, cached_tokens, bookings, *_ = considered
    if estimate is None:
        return f"{engine_id}={verdict.value} age={age_s:.3f}"
    queue_s, prefill_s, decode_s = estimate
    return (
        f"{engine_id}={verdict.value} age={age_s:.3f} queue={queue_s:.3f} prefill={prefill_s:.3f}"
        f" decode={decode_s:.3f} cached={cached_tokens} booked={bookings}"
    )
