"""RoutingService messages in, the core's types out, and back."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from functools import lru_cache

from headrace.api.engine.v1 import engine_service_pb2 as engine_pb
from headrace.api.routing.v1 import routing_service_pb2 as pb
from headrace.base.errors import Exhausted, Forbidden, HeadraceError, InvalidRequest, Unavailable
from headrace.base.prefix import HASH_BYTES
from headrace.router.core.candidates import Considered
from headrace.router.core.ejection import Outcome
from headrace.router.core.eligibility import Verdict
from headrace.router.core.estimate import Estimate
from headrace.router.core.placement import Placed, Reason, Refused
from headrace.router.core.replica import Attempt, AttemptKey, EngineId, Replica
from headrace.router.core.router import Router
from headrace.router.core.rules import Policy
from headrace.router.core.view import Sighting

_LONGEST_ID = 128
_SHORTEST_WAIT_S, _LONGEST_WAIT_S = 0.05, 30.0
"""An estimate outside of these is no hint: sooner it is only asked again, later it is a guess."""

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
    Verdict.TENANT_NOT_PERMITTED: pb.VERDICT_TENANT_NOT_PERMITTED,
    Verdict.EJECTED: pb.VERDICT_EJECTED,
    Verdict.SATURATED: pb.VERDICT_SATURATED,
    Verdict.UNREADABLE: pb.VERDICT_UNREADABLE,
}
_POLICIES = {
    Policy.LEAST_COMPLETION_TIME: pb.POLICY_LEAST_COMPLETION_TIME,
    Policy.LEAST_LOADED: pb.POLICY_LEAST_LOADED,
    Policy.ROUND_ROBIN: pb.POLICY_ROUND_ROBIN,
}
_OUTCOMES = {
    pb.OUTCOME_UNSPECIFIED: Outcome.UNSAID,
    pb.OUTCOME_OK: Outcome.OK,
    pb.OUTCOME_CANCELLED: Outcome.CANCELLED,
    pb.OUTCOME_BUSY: Outcome.BUSY,
    pb.OUTCOME_INVALID: Outcome.INVALID,
    pb.OUTCOME_TRANSPORT: Outcome.TRANSPORT,
    pb.OUTCOME_ENGINE_FAULT: Outcome.ENGINE_FAULT,
}

_MESSAGES = {
    Reason.NO_VIEW: "the replica board has not been read yet",
    Reason.NO_REPLICA: "no replica can serve this deployment and bundle now",
    Reason.NO_ADAPTER: "no replica of this bundle has the adapter loaded",
    Reason.ALL_STALE: "every compatible replica's heartbeat is older than the freshness bound",
    Reason.NONE_READY: "every compatible replica is warming or draining",
    Reason.ALL_EXCLUDED: "every compatible replica has already failed this request",
    Reason.ALL_EJECTED: "every compatible replica has failed lately and not passed a probe since",
    Reason.NONE_MEASURED: "no compatible replica has measured its speed yet",
    Reason.TENANT_NOT_PERMITTED: "the deployment is not open to this tenant",
    Reason.SATURATED: "every replica that could serve this has more waiting than it should",
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
    return Attempt(
        key=key,
        deployment=request.deployment,
        bundle_digest=request.bundle_digest,
        adapter=request.adapter or None,
        prompt_tokens=request.prompt_tokens,
        max_tokens=request.max_tokens,
        sequences=request.sequences or 1,
        excluded=_excluded(request),
        hashes=_hashes(request),
        block_size=request.block_size,
        tenant=request.tenant,
        beyond_share=request.beyond_share,
    )


def _excluded(request: pb.PlaceRequest) -> frozenset[tuple[str, int]]:
    for i, exclusion in enumerate(request.exclusions):
        if not exclusion.engine_id:
            raise InvalidRequest(f"exclusions[{i}].engine_id", "must not be empty")
    return frozenset((exclusion.engine_id, exclusion.epoch) for exclusion in request.exclusions)


def _hashes(request: pb.PlaceRequest) -> list[bytes]:
    """One per full block: more than the prompt has cannot be meant, and is refused rather than cut."""
    flat = request.block_hashes
    if not flat:
        return []
    if len(flat) % HASH_BYTES:
        raise InvalidRequest("block_hashes", f"has {len(flat)} bytes, which is no multiple of {HASH_BYTES}")
    if request.block_size == 0:
        raise InvalidRequest("block_size", "must be at least 1 when there are block hashes")
    if len(flat) // HASH_BYTES * request.block_size > request.prompt_tokens:
        raise InvalidRequest("block_hashes", f"names more blocks than {request.prompt_tokens} tokens fill")
    return list(_cut(len(flat) // HASH_BYTES).unpack(flat))


@lru_cache(1024)
def _cut(blocks: int) -> struct.Struct:
    """Cuts 250 hashes in a quarter of the time of 250 slices."""
    return struct.Struct(f"{HASH_BYTES}s" * blocks)


def outcome(request: pb.ReleaseRequest) -> Outcome:
    """How the attempt went; one that we do not know says nothing."""
    return _OUTCOMES.get(request.outcome, Outcome.UNSAID)


def placed_message(placed: Placed, *, degraded: bool, brief: bool) -> pb.PlaceResponse:
    """The answer to a placement; a brief one has no word about the replicas, which take a tenth of all its time."""
    message = pb.PlaceResponse(
        engine_id=placed.replica.engine_id,
        epoch=placed.replica.epoch,
        address=placed.replica.address,
        degraded=degraded,
        cached_tokens=placed.cached_tokens,
        policy=_POLICIES[placed.policy],
        seats=placed.seats,
        reserve=placed.reserve,
    )
    if placed.estimate is not None:
        _fill_estimate(message.estimate, placed.estimate)
    if not brief:
        fill_considered(message, placed.considered)
    return message


def fill_considered(message: pb.PlaceResponse, considered: Iterable[Considered]) -> None:
    """Add the words about the replicas."""
    add = message.considered.add
    for one in considered:
        _fill_considered(add(), one)


def refusal_error(refused: Refused, placing: Attempt, *, degraded: bool, retry_after_s: float) -> HeadraceError:
    """The error of a refusal: the client's to mend when the prompt fits nowhere, else a matter of time."""
    facts = {"verdicts": refused.counts(), "degraded": str(degraded).lower()}
    reason = refused.reason
    if reason is Reason.CONTEXT_EXCEEDED:
        limit = refused.context_limit
        error = InvalidRequest(
            "prompt",
            f"has {placing.prompt_tokens} tokens; with one token of answer it must fit {limit}",
            reason=reason.value,
        )
        error.metadata.update(facts, context_limit=str(limit), prompt_tokens=str(placing.prompt_tokens))
        return error
    if reason is Reason.TENANT_NOT_PERMITTED:
        return Forbidden(_MESSAGES[reason], reason=reason.value, metadata=facts)
    if reason is Reason.SATURATED:
        wait_s = retry_after_s if refused.wait_s is None else refused.wait_s
        wait_s = min(_LONGEST_WAIT_S, max(_SHORTEST_WAIT_S, wait_s))
        return Exhausted(_MESSAGES[reason], reason=reason.value, retry_after_s=wait_s, metadata=facts)
    return Unavailable(_MESSAGES[reason], reason=reason.value, retry_after_s=retry_after_s, metadata=facts)


def list_message(router: Router, now: float, booked: Mapping[EngineId, int]) -> pb.ListReplicasResponse:
    """The whole view at `now`, by engine id; an unreadable record shows its id, epoch and sequence only.

    `booked` are the bookings of all routers; where it has none, this router's own are shown.
    """
    return pb.ListReplicasResponse(
        replicas=[
            _replica(router, sighting, now, booked.get(engine_id))
            for engine_id, sighting in sorted(router.view.sightings.items())
        ],
        degraded=router.view.degraded,
    )


def _replica(router: Router, sighting: Sighting, now: float, booked: int | None) -> pb.Replica:
    seen, age_s = sighting.seen, sighting.age_s(now)
    message = pb.Replica(
        heartbeat=_heartbeat(sighting),
        age_s=age_s,
        bookings=router.bookings.on(seen.engine_id).sequences if booked is None else max(0, booked),
        indexed_blocks=router.index.indexed_blocks(seen.engine_id),
        ejected_s=router.ejection.ejected_s(seen.engine_id, now),
    )
    if isinstance(seen, Replica):
        rules = router.rules_of(seen.deployment)
        message.fresh = age_s <= rules.freshness_s
        message.ramp = router.slow_start.ramp(seen, rules.slow_start_s, now)
    return message


def _heartbeat(sighting: Sighting) -> engine_pb.Heartbeat:
    seen = sighting.seen
    if isinstance(seen, Replica):
        return engine_pb.Heartbeat.FromString(sighting.payload)
    return engine_pb.Heartbeat(engine_id=seen.engine_id, epoch=seen.epoch, sequence=seen.sequence)


def considered_message(considered: Considered) -> pb.Considered:
    """The word about one replica."""
    message = pb.Considered()
    _fill_considered(message, considered)
    return message


def _fill_considered(message: pb.Considered, considered: Considered) -> None:
    # Field by field takes 40 % of the time of a constructor with keywords, and a decision fills one per replica.
    engine_id, verdict, age_s, estimate, cached_tokens, bookings, running, waiting, ramp = considered
    message.engine_id = engine_id
    message.verdict = _VERDICTS[verdict]
    message.age_s = age_s
    if estimate is not None:
        _fill_estimate(message.estimate, estimate)
    message.cached_tokens = cached_tokens
    message.bookings = max(0, bookings)  # below 0: more have ended than were booked since its heartbeat
    message.running = running
    message.waiting = waiting
    message.ramp = ramp


def _fill_estimate(message: pb.Estimate, estimate: Estimate) -> None:
    queue_s, prefill_s, decode_s = estimate
    message.queue_s = queue_s
    message.prefill_s = prefill_s
    message.decode_s = decode_s
    message.total_s = queue_s + prefill_s + decode_s
