"""The routers: one long-lived channel to each, the next one asked when one is away."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from headrace.api.routing.v1 import routing_service_pb2 as routing_pb2
from headrace.api.routing.v1 import routing_service_pb2_grpc as routing_grpc
from headrace.base.channel import Keepalive
from headrace.base.deadline import Deadline
from headrace.base.errors import DeadlinePassed, HeadraceError, InternalError, Unavailable
from headrace.gateway.adapters.attach import EngineAddress
from headrace.gateway.core.recovery import Fault
from headrace.gateway.submission import CANCELLED, OK, Report
from headrace.rpc.client import Peer
from headrace.rpc.status import TRANSPORT

log = structlog.get_logger(__name__)

NO_ROUTER = "NO_ROUTER"
"""Reason of the refusal when no router answers."""

_RELEASE_TIMEOUT_S = 1.0
_NO_ROUTER_RETRY_S = 0.5


_OUTCOMES = {
    OK: routing_pb2.OUTCOME_OK,
    CANCELLED: routing_pb2.OUTCOME_CANCELLED,
    Fault.DEADLINE.value: routing_pb2.OUTCOME_CANCELLED,
    Fault.REQUEST.value: routing_pb2.OUTCOME_INVALID,
    Fault.QUEUE_FULL.value: routing_pb2.OUTCOME_BUSY,
    Fault.UNREACHABLE.value: routing_pb2.OUTCOME_TRANSPORT,
    Fault.BROKEN.value: routing_pb2.OUTCOME_TRANSPORT,
    Fault.STALE_EPOCH.value: routing_pb2.OUTCOME_TRANSPORT,
}
"""What else an attempt can end with is the engine's own fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A router's choice, and which router made it: it holds the booking.

    All replicas that could serve it run `seats` sequences at once, of which a tenant beyond its fair share leaves
    `reserve` free.
    """

    engine: EngineAddress
    router: int
    estimated_s: float
    degraded: bool
    seats: int = 0
    reserve: int = 0


class Routers:
    """Build it inside the running loop. The router that answered last is asked first."""

    def __init__(self, addresses: tuple[str, ...], *, keepalive: Keepalive, try_timeout_s: float) -> None:
        self._peers = [Peer(address, keepalive=keepalive) for address in addresses]
        self._stubs = [routing_grpc.RoutingServiceStub(peer.channel) for peer in self._peers]
        self._try_timeout_s = try_timeout_s
        self._first = random.randrange(len(addresses))  # gateways started together must not all pick the same one
        self._releases: set[asyncio.Task[None]] = set()
        self._closed = False

    async def place(self, request: routing_pb2.PlaceRequest, deadline: Deadline) -> Placement:
        """A replica for the request; raises the routers' own refusal, or Unavailable NO_ROUTER when none answers."""
        for offset in range(len(self._peers)):
            index = (self._first + offset) % len(self._peers)
            try:
                answer = await self._peers[index].unary(
                    self._stubs[index].Place, request, deadline=deadline.capped(self._try_timeout_s)
                )
            except HeadraceError as error:
                if deadline.remaining_s() <= 0 or not _router_is_away(error):
                    raise
                log.warning("router_failed", router=self._peers[index].address, reason=error.reason)
                continue
            self._first = index
            return Placement(
                engine=EngineAddress(engine_id=answer.engine_id, epoch=answer.epoch, address=answer.address),
                router=index,
                estimated_s=answer.estimate.total_s,
                degraded=answer.degraded,
                seats=answer.seats,
                reserve=answer.reserve,
            )
        raise Unavailable("no router can be reached", reason=NO_ROUTER, retry_after_s=_NO_ROUTER_RETRY_S)

    def release(
        self, placement: Placement, request_id: str, attempt: int, report: Report, heard: Callable[[], None]
    ) -> None:
        """Give up a booking and report, in the background; `heard` is called when the router knows, or never will.

        A booking that cannot be given up expires by itself.
        """
        if self._closed:  # an answer that the drain's grace did not cover ends after this
            return
        first_s = 0.0 if report.first_token_at is None else report.first_token_at - report.placed_at
        request = routing_pb2.ReleaseRequest(
            request_id=request_id,
            attempt=attempt,
            outcome=_OUTCOMES.get(report.outcome, routing_pb2.OUTCOME_ENGINE_FAULT),
            engine_id=placement.engine.engine_id,
            epoch=placement.engine.epoch,
            first_token_s=first_s,
            total_s=time.monotonic() - report.placed_at,
            output_tokens=report.output_tokens,
            cached_tokens=report.cached_tokens,
        )
        task = asyncio.get_running_loop().create_task(self._release(placement.router, request))
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)
        task.add_done_callback(lambda _: heard())

    async def close(self) -> None:
        """Let the last releases go out, then close the channels."""
        self._closed = True
        if self._releases:
            await asyncio.wait(self._releases)
        for peer in self._peers:
            await peer.close()

    async def _release(self, router: int, request: routing_pb2.ReleaseRequest) -> None:
        deadline = Deadline.after(_RELEASE_TIMEOUT_S)
        try:
            await self._peers[router].unary(self._stubs[router].Release, request, deadline=deadline)
        except HeadraceError as error:
            log.debug("release_failed", router=self._peers[router].address, reason=error.reason)


def _router_is_away(error: HeadraceError) -> bool:
    """Whether another router may do better: this one is unreachable, frozen, draining, broken or has no view yet."""
    if isinstance(error, DeadlinePassed | InternalError):
        return True
    return isinstance(error, Unavailable) and error.reason in (TRANSPORT, "DRAINING", "NO_VIEW")
