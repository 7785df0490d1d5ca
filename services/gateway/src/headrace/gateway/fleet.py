"""One attempt: a replica found, attached, given the sequence; and all of it given back on every way out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import structlog
from opentelemetry.trace import Span, StatusCode, use_span

from headrace.api.common.v1 import sampling_pb2
from headrace.api.engine.v1 import engine_service_pb2 as engine_pb2
from headrace.api.routing.v1 import routing_service_pb2 as routing_pb2
from headrace.base.deadline import Deadline
from headrace.base.errors import Unavailable
from headrace.gateway import metrics
from headrace.gateway.adapters.pool import AttachPool
from headrace.gateway.adapters.routers import NO_ROUTER, Placement, Routers
from headrace.gateway.adapters.sequence import AttachedSequence
from headrace.gateway.core.ask import Sampling
from headrace.gateway.core.progress import Progress
from headrace.gateway.core.quarantine import Quarantine
from headrace.gateway.core.recovery import SUSPICIOUS, EngineFault, Fault
from headrace.observe.tracing import current_traceparent, get_tracer

log = structlog.get_logger(__name__)

_UINT32_MAX = 2**32 - 1
_DEFAULT_RETRY_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What every attempt of one request has in common.

    `sampling` has every default filled in; `prompt_field` is where the prompt stood in the request.
    """

    request_id: str
    deployment: str
    bundle_digest: str
    prompt_field: str
    sampling: Sampling
    seed: int
    max_tokens: int
    deadline: Deadline


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A sequence under way at an engine."""

    engine_id: str
    sequence: AttachedSequence
    emitted_before: int


@dataclass(slots=True, kw_only=True)
class Fleet:
    """The routers and engines, as one request sees them.

    Engines in `quarantine` sent garbage and are never asked. Those in `suspects` are asked only when no other can be:
    the router's freshness bound is 10 s, and until then it may place one request after another on a dead engine.
    """

    routers: Routers
    pool: AttachPool
    quarantine: Quarantine
    suspects: Quarantine

    @asynccontextmanager
    async def attempt(self, order: Order, progress: Progress) -> AsyncIterator[Attempt]:
        """Start the next attempt of a request from where it stands.

        Leaving the block cancels the sequence unless it has ended, and gives up the booking; neither waits, so both
        happen even while the caller is being cancelled. EngineFault, raised here or by the body, excludes the engine
        from the request's next attempts.
        """
        number = progress.begin_attempt()
        placement = await self._place(order, progress, number)
        outcome = "CANCELLED"
        try:
            async with self._attached(placement, order, progress, number) as sequence:
                yield Attempt(
                    engine_id=placement.engine.engine_id, sequence=sequence, emitted_before=len(progress.emitted)
                )
            outcome = "OK"
        except EngineFault as fault:
            outcome = fault.fault.value
            progress.excluded.add(placement.engine.engine_id)
            self._remember(fault.fault, placement.engine.engine_id)
            raise
        finally:
            metrics.ATTEMPTS.labels(outcome).inc()
            self.routers.release(placement, order.request_id, number)

    @asynccontextmanager
    async def _attached(
        self, placement: Placement, order: Order, progress: Progress, number: int
    ) -> AsyncIterator[AttachedSequence]:
        # Not the current span: a generator that is closed from another task could not take it back.
        span = get_tracer().start_span("gateway.stream", attributes={"headrace.attempt": number})
        span.set_attribute("headrace.engine_id", placement.engine.engine_id)
        try:
            connection = await self.pool.connection(placement.engine, order.bundle_digest, order.deadline)
            sequence = connection.submit(_submission(order, progress, number, span))
            progress.note_submitted(time.monotonic())
            try:
                yield sequence
            finally:
                sequence.cancel()
        except EngineFault as fault:
            span.set_attribute("error.type", fault.fault.value)
            span.set_status(StatusCode.ERROR, fault.fault.value)
            raise
        finally:
            span.end()

    async def _place(self, order: Order, progress: Progress, number: int) -> Placement:
        """Ask for a replica; routers that have none say when to ask again, as long as the request may wait for one."""
        with get_tracer().start_as_current_span("gateway.place", attributes={"headrace.attempt": number}) as span:
            while True:
                try:
                    placement = await self._asked(order, progress, number)
                except Unavailable as refusal:
                    wait_s = _DEFAULT_RETRY_S if refusal.retry_after_s is None else refusal.retry_after_s
                    refusal.retry_after_s = wait_s
                    if wait_s > min(progress.place_wait_left_s, order.deadline.remaining_s()):
                        raise
                    progress.place_wait_left_s -= wait_s
                    await asyncio.sleep(wait_s)
                else:
                    span.set_attribute("headrace.engine_id", placement.engine.engine_id)
                    span.set_attribute("headrace.degraded", placement.degraded)
                    return placement

    async def _asked(self, order: Order, progress: Progress, number: int) -> Placement:
        now = time.monotonic()
        barred = progress.excluded | self.quarantine.engine_ids(now)
        suspects = self.suspects.engine_ids(now) - barred
        try:
            return await self.routers.place(_question(order, progress, number, barred | suspects), order.deadline)
        except Unavailable as refusal:
            if not suspects or refusal.reason == NO_ROUTER:
                raise
        return await self.routers.place(_question(order, progress, number, barred), order.deadline)

    def _remember(self, fault: Fault, engine_id: str) -> None:
        if fault is Fault.GARBAGE:
            self.quarantine.add(engine_id, time.monotonic())
        elif fault in SUSPICIOUS:
            self.suspects.add(engine_id, time.monotonic())


def _question(order: Order, progress: Progress, number: int, excluded: set[str]) -> routing_pb2.PlaceRequest:
    return routing_pb2.PlaceRequest(
        request_id=order.request_id,
        attempt=number,
        deployment=order.deployment,
        bundle_digest=order.bundle_digest,
        prompt_tokens=len(progress.prompt_ids) + len(progress.emitted),
        max_tokens=progress.tokens_left,
        excluded=sorted(excluded),
    )


def _submission(order: Order, progress: Progress, number: int, span: Span) -> engine_pb2.Submit:
    sampling = order.sampling
    with use_span(span, end_on_exit=False):
        traceparent = current_traceparent()
    return engine_pb2.Submit(
        request_id=order.request_id,
        attempt=number,
        token_ids=progress.token_ids,
        emitted_tokens=len(progress.emitted),
        sampling=sampling_pb2.SamplingParams(
            max_tokens=progress.tokens_left,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            seed=order.seed,
            stop_token_ids=sampling.stop_token_ids,
            ignore_eos=sampling.ignore_eos,
        ),
        deadline_ms=min(_UINT32_MAX, max(1, int(1000 * order.deadline.remaining_s()))),
        traceparent=traceparent,
    )
