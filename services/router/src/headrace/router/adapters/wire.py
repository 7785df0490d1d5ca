"""RoutingService messages in, the core's types out, and back."""

from __future__ import annotations

from headrace.api.engine.v1 import engine_service_pb2 as engine_pb
from headrace.api.routing.v1 import routing_service_pb2 as pb
from headrace.base.errors import HeadraceError, InvalidRequest, Unavailable
from headrace.router.core.eligibility import Verdict
from headrace.router.core.estimate import Estimate
from headrace.router.core.placement import Considered, Placed, Reason, Refused
from headrace.router.core.replica import Attempt, AttemptKey, Replica
from headrace.router.core.router import Router
from headrace.router.core.view import Sighting, State

_LONGEST_ID = 128

_VERDICTS = {
    Verdict.CHOSEN: pb.VERDICT_CHOSEN,
    Verdict.SLOWER: pb.VERDICT_SLOWER,
    Verdict.STALE: pb.VERDICT_STALE,
    Verdict.NOT_READY: pb.VERDICT_NOT_READY,
    Verdict.OTHER_BUNDLE: pb.VERDICT_OTHER_BUNDLE,
    Verdict.NO_ADAPTER: pb.VERDICT_NO_ADAPTER,
    Verdict.CONTEXT_TOO_SMALL: pb.VERDICT_CONTEXT_TOO_SMALL,
    Verdict.EXCLUDED: pb.VERDICT_EXCLUDED,
    Verdict.UNMEASURED: pb.VERDICT_UNMEASURED,
    # Nothing in such a record is known, its rates included.
    Verdict.UNREADABLE: pb.VERDICT_UNMEASURED,
}

_MESSAGES = {
    Reason.NO_VIEW: "the replica board has not been read yet",
    Reason.NO_REPLICA: "no replica can serve this deployment and bundle now",
    Reason.NO_ADAPTER: "no replica of this bundle has the adapter loaded",
    Reason.ALL_STALE: "every compatible replica's heartbeat is older than the freshness bound",
    Reason.NONE_READY: "every compatible replica is warming or draining",
    Reason.ALL_EXCLUDED: "every compatible replica has already failed this request",
    Reason.NONE_MEASURED: "no compatible replica has measured its speed yet",
}


def attempt_key(request: pb.PlaceRequest | pb.ReleaseRequest) -> AttemptKey:
    """The attempt a request is about; InvalidRequest when it names none."""
    if not 0 < len(request.request_id) <= _LONGEST_ID:
        raise InvalidRequest("request_id", f"must have 1 to {_LONGEST_ID} characters")
    if request.attempt == 0:
        raise InvalidRequest("attempt", "attempts count from 1")
    return AttemptKey(request.request_id, request.attempt)


def attempt(request: pb.PlaceRequest) -> Attempt:
    """The attempt to place; InvalidRequest names the field at fault."""
    key = attempt_key(request)
    for name in ("deployment", "bundle_digest"):
        if not getattr(request, name):
            raise InvalidRequest(name, "must not be empty")
    for name in ("prompt_tokens", "max_tokens"):
        if getattr(request, name) == 0:
            raise InvalidRequest(name, "must be at least 1")
    for i, engine_id in enumerate(request.excluded):
        if not engine_id:
            raise InvalidRequest(f"excluded[{i}]", "must not be empty")
    return Attempt(
        key=key,
        deployment=request.deployment,
        bundle_digest=request.bundle_digest,
        adapter=request.adapter or None,
        prompt_tokens=request.prompt_tokens,
        max_tokens=request.max_tokens,
        excluded=frozenset(request.excluded),
    )


def placed_message(placed: Placed, *, degraded: bool) -> pb.PlaceResponse:
    """The answer to a placement."""
    return pb.PlaceResponse(
        engine_id=placed.replica.engine_id,
        epoch=placed.replica.epoch,
        address=placed.replica.address,
        estimate=_estimate(placed.estimate),
        considered=[_considered(c) for c in placed.considered],
        degraded=degraded,
    )


def refusal_error(refused: Refused, placing: Attempt, *, degraded: bool, retry_after_s: float) -> HeadraceError:
    """The error of a refusal: the client's to mend when the prompt fits nowhere, else a matter of time."""
    facts = {"verdicts": refused.counts(), "degraded": str(degraded).lower()}
    if refused.reason is Reason.CONTEXT_EXCEEDED:
        limit = refused.context_limit
        error = InvalidRequest(
            "prompt",
            f"has {placing.prompt_tokens} tokens; with one token of answer it must fit {limit}",
            reason=refused.reason.value,
        )
        error.metadata.update(facts, context_limit=str(limit), prompt_tokens=str(placing.prompt_tokens))
        return error
    return Unavailable(
        _MESSAGES[refused.reason], reason=refused.reason.value, retry_after_s=retry_after_s, metadata=facts
    )


def list_message(router: Router, now: float) -> pb.ListReplicasResponse:
    """The whole view at `now`, by engine id; an unreadable record shows its id, epoch and sequence only."""
    states = router.view.states(now, router.freshness_s)
    return pb.ListReplicasResponse(
        replicas=[
            pb.Replica(
                heartbeat=_heartbeat(sighting),
                age_s=sighting.age_s(now),
                fresh=states[engine_id] not in (State.STALE, State.UNREADABLE),
                bookings=router.bookings.on(engine_id).sequences,
            )
            for engine_id, sighting in sorted(router.view.sightings.items())
        ],
        degraded=router.view.degraded,
    )


def _heartbeat(sighting: Sighting) -> engine_pb.Heartbeat:
    seen = sighting.seen
    if isinstance(seen, Replica):
        return engine_pb.Heartbeat.FromString(sighting.payload)
    return engine_pb.Heartbeat(engine_id=seen.engine_id, epoch=seen.epoch, sequence=seen.sequence)


def _considered(considered: Considered) -> pb.Considered:
    return pb.Considered(
        engine_id=considered.engine_id,
        verdict=_VERDICTS[considered.verdict],
        age_s=considered.age_s,
        estimate=_estimate(considered.estimate) if considered.estimate else None,
    )


def _estimate(estimate: Estimate) -> pb.Estimate:
    return pb.Estimate(
        queue_s=estimate.queue_s,
        prefill_s=estimate.prefill_s,
        decode_s=estimate.decode_s,
        total_s=estimate.total_s,
    )
