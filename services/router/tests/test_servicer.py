"""The word about a decision: in the call's span and in the log."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.trace import TracerProvider
from structlog.testing import capture_logs

from headrace.api.routing.v1 import routing_service_pb2 as pb
from headrace.base.errors import Unavailable
from headrace.coord.redis.booking_board import BookingBoard
from headrace.router.adapters.booker import Booker
from headrace.router.core.router import Router
from headrace.router.core.view import Reading, Record
from headrace.router.memory import Memory
from headrace.router.servicer import RoutingServicer

REQUEST = pb.PlaceRequest(
    request_id="req-1842", attempt=1, deployment="chat", bundle_digest="sb-27", prompt_tokens=140, max_tokens=80
)


class NoBookings(BookingBoard):
    """Stands for a Redis that is away: the booker below is not asked, its breaker being open."""

    def __init__(self) -> None:
        pass


def a_servicer(router: Router, *replicas, ages_s: tuple[float, ...]) -> RoutingServicer:
    records = tuple(Record(seen=r, age_s=age_s, payload=b"") for r, age_s in zip(replicas, ages_s, strict=True))
    router.observed(Reading(asked_at=50.0, records=records), 50.0)
    booker = Booker(NoBookings())
    booker.open = True
    return RoutingServicer(router, booker, Memory(most=10), clock=lambda: 50.0, retry_after_s=1.0)


async def test_a_placement_leaves_the_choice_and_every_reason_in_its_span(a_replica, a_router):
    servicer = a_servicer(a_router(), a_replica("A"), a_replica("B"), ages_s=(12.0, 0.25))
    with TracerProvider(shutdown_on_exit=False).get_tracer("test").start_as_current_span("router.Place") as span:
        placed = await servicer.Place(REQUEST, None)
    assert placed.engine_id == span.attributes["headrace.engine_id"] == "B"
    assert span.attributes["headrace.considered"] == (
        "A=stale age=12.000",
        "B=chosen age=0.250 queue=0.000 prefill=0.280 decode=1.738 cached=0 booked=0",
    )
    assert span.attributes["headrace.estimate_s"] == pytest.approx(placed.estimate.total_s)


async def test_placements_and_refusals_are_one_log_line_each_with_their_reasons(a_replica, a_router):
    with capture_logs() as lines:
        await a_servicer(a_router(), a_replica("A"), ages_s=(0.25,)).Place(REQUEST, None)
        with pytest.raises(Unavailable):
            await a_servicer(a_router(), a_replica("A"), ages_s=(12.0,)).Place(REQUEST, None)
    placed, refused = lines
    assert (placed["event"], placed["log_level"], placed["engine"]) == ("placement_decided", "debug", "A")
    assert (refused["event"], refused["log_level"], refused["reason"]) == ("placement_refused", "info", "ALL_STALE")
    assert refused["considered"] == ["A=stale age=12.000"]
