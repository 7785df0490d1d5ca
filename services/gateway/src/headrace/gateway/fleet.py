"""From an order to sequences under way: a replica found, attached, given them; all given back on every way out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence, Set
from dataclasses import dataclass

import structlog
from opentelemetry.trace import Span, use_span

from headrace.api.engine.v1 import engine_service_pb2 as engine_pb2
from headrace.api.routing.v1 import routing_service_pb2 as routing_pb2
from headrace.base.deadline import Deadline
from headrace.base.errors import Exhausted, Unavailable
from headrace.gateway import metrics
from headrace.gateway.adapters.pool import AttachPool
from headrace.gateway.adapters.routers import NO_ROUTER, Placement, Routers
from headrace.gateway.adapters.sequence import AttachedSequence
from headrace.gateway.adapters.wire import params_of
from headrace.gateway.core.ask import Sampling
from headrace.gateway.core.fair_queue import Ticket
from headrace.gateway.core.life import Life
from headrace.gateway.core.principal import Priority
from headrace.gateway.core.progress import Progress
from headrace.gateway.core.quarantine import Quarantine
from headrace.gateway.core.recovery import SUSPICIOUS, EngineFault, Fault
from headrace.gateway.model import Model
from headrace.gateway.prefixes import SHARED_DOMAIN, Prefixes
from headrace.gateway.queue import SATURATED, RequestQueue
from headrace.gateway.submission import Attempt, Report, Submission, Tally
from headrace.observe.tracing import current_span, current_traceparent, get_tracer

log = structlog.get_logger(__name__)

_UINT32_MAX = 2**32 - 1
_UINT64_MAX = 2**64 - 1
_DEFAULT_RETRY_S = 0.5


_PRIORITIES = {
    Priority.BATCH: engine_pb2.PRIORITY_BATCH,
    Priority.STANDARD: engine_pb2.PRIORITY_STANDARD,
    Priority.INTERACTIVE: engine_pb2.PRIORITY_INTERACTIVE,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What every attempt of one request has in common.

    `sampling` has every default filled in; answer i of its n has seed `seed` + i. `prompt_field` is where the prompt
    stood in the request. `ticket` is its place in `queue`; `tally` counts what engines send for it.
    """

    request_id: str
    deployment: str
    model: Model
    prompt_field: str
    tenant: str
    sampling: Sampling
    seed: int
    max_tokens: int
    deadline: Deadline
    queue: RequestQueue
    ticket: Ticket
    tally: Tally

    @property
    def bundle_digest(self) -> str:
        """Bundle that the prompt was tokenized for."""
        return self.model.bundle_digest

    @property
    def domain(self) -> str:
        """Isolation domain of its prefixes."""
        return SHARED_DOMAIN if self.model.shared_prefixes else self.tenant


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
    prefixes: Prefixes

    async def begin(self, order: Order, answers: Sequence[Progress]) -> list[Attempt]:
        """Submit the next attempt of some answers of one request, from where they stand, as one sequence each.

        Several at once are answers 0 to n - 1, of which nothing was emitted yet. Every attempt returned must be left;
        leaving cancels its sequence unless that has ended, and the last one gives up the booking. An EngineFault,
        raised here or while an attempt is held, excludes the engine from the request's next attempts.
        """
        number = answers[0].trail.next_attempt()
        for progress in answers:
            progress.begin_attempt()
        placement = await self._place(order, answers, number)
        submission = self._submission(order, answers, placement, number)
        sequences: list[AttachedSequence] = []
        try:
            connection = await self.pool.connection(placement.engine, order.bundle_digest, order.deadline)
            sequences = connection.submit(_message(order, answers, number, submission.span), submission)
        except EngineFault as fault:
            submission.fail(fault)
            raise
        finally:
            if not sequences:
                submission.never_began()
        now = time.monotonic()
        for progress in answers:
            progress.note_submitted(now)
        return [
            Attempt(sequence=sequence, emitted_before=len(progress.emitted), submission=submission)
            for sequence, progress in zip(sequences, answers, strict=True)
        ]

    def _submission(self, order: Order, answers: Sequence[Progress], placement: Placement, number: int) -> Submission:
        # Not the current span: a generator that is closed from another task could not take it back.
        span = get_tracer().start_span("gateway.stream", attributes={"headrace.attempt": number})
        span.set_attribute("headrace.engine_id", placement.engine.engine_id)
        life = placement.engine.life
        order.tally.attempt(number, life.engine_id, life.epoch)

        def blame(fault: EngineFault) -> None:
            answers[0].trail.excluded.add(life)
            self._remember(fault.fault, life)

        def close(report: Report) -> None:
            metrics.ATTEMPTS.labels(report.outcome).inc()
            # Whoever asked when the engine had ended it, and before the router knew, asks again.
            self.routers.release(placement, order.request_id, number, report, order.queue.note_room)

        return Submission(
            number=number,
            life=life,
            span=span,
            blame=blame,
            close=close,
            tally=order.tally,
            open=len(answers),
            placed_at=time.monotonic(),
        )

    async def _place(self, order: Order, answers: Sequence[Progress], number: int) -> Placement:
        """A replica; routers that have none say when to ask again, as long as the request may wait for one.

        In turn for a request's first attempt; later ones have waited their turn already. Nobody sleeps while it is his
        turn: a queue's head asks once and lets the next one try.
        """
        progress, question = answers[0], self._question(order, answers, number)

        async def ask() -> Placement:
            question.beyond_share = number == 1 and order.queue.beyond_share(order.ticket)
            found = await self._asked(question, progress.trail.excluded, order.deadline)
            order.queue.note_fleet(found.seats, found.reserve)
            return found

        with current_span("gateway.place", {"headrace.attempt": number}) as span:
            while True:
                try:
                    placement = await (order.queue.placed(order.ticket, ask) if number == 1 else ask())
                    break
                except Exhausted as full:
                    if number == 1 or full.reason != SATURATED:
                        raise
                    refusal = Unavailable(full.message, reason=full.reason, retry_after_s=full.retry_after_s)
                except Unavailable as none:
                    refusal = none
                wait_s = _DEFAULT_RETRY_S if refusal.retry_after_s is None else refusal.retry_after_s
                refusal.retry_after_s = wait_s
                if wait_s > min(progress.place_wait_left_s, order.deadline.remaining_s()):
                    raise refusal
                progress.place_wait_left_s -= wait_s
                await asyncio.sleep(wait_s)
            span.set_attribute("headrace.engine_id", placement.engine.engine_id)
            span.set_attribute("headrace.degraded", placement.degraded)
            return placement

    async def _asked(self, question: routing_pb2.PlaceRequest, failed: Set[Life], deadline: Deadline) -> Placement:
        now = time.monotonic()
        barred = failed | self.quarantine.lives(now)
        suspects = self.suspects.lives(now) - barred
        _exclude(question, barred | suspects)
        try:
            return await self.routers.place(question, deadline)
        except Unavailable as refusal:
            if not suspects or refusal.reason == NO_ROUTER:
                raise
        _exclude(question, barred)
        return await self.routers.place(question, deadline)

    def _remember(self, fault: Fault, life: Life) -> None:
        if fault is Fault.GARBAGE:
            self.quarantine.add(life, time.monotonic())
        elif fault in SUSPICIOUS:
            self.suspects.add(life, time.monotonic())

    def _question(self, order: Order, answers: Sequence[Progress], number: int) -> routing_pb2.PlaceRequest:
        token_ids = answers[0].token_ids
        return routing_pb2.PlaceRequest(
            request_id=order.request_id,
            attempt=number,
            deployment=order.deployment,
            bundle_digest=order.bundle_digest,
            prompt_tokens=len(token_ids),
            max_tokens=max(progress.tokens_left for progress in answers),
            block_hashes=self.prefixes.hashes(
                token_ids, bundle_digest=order.bundle_digest, domain=order.domain, block_size=order.model.block_size
            ),
            block_size=order.model.block_size,
            tenant=order.tenant,
            sequences=len(answers),
            brief=True,
        )


def _exclude(question: routing_pb2.PlaceRequest, lives: Set[Life]) -> None:
    """Bar these and no others."""
    del question.exclusions[:]
    for life in sorted(lives):
        question.exclusions.add(engine_id=life.engine_id, epoch=life.epoch)


def _message(order: Order, answers: Sequence[Progress], number: int, span: Span) -> engine_pb2.Submit:
    first = answers[0]
    with use_span(span, end_on_exit=False):
        traceparent = current_traceparent()
    asks_prompt = first.index == 0 and not first.prompt_logprobs  # the answers' prompt is one and the same
    return engine_pb2.Submit(
        request_id=order.request_id,
        attempt=number,
        token_ids=first.token_ids,
        emitted_tokens=len(first.emitted),
        sampling=params_of(
            order.sampling,
            max_tokens=first.tokens_left,
            seed=(order.seed + first.index) & _UINT64_MAX,
            n=len(answers),
            prompt_logprobs=order.sampling.prompt_logprobs if asks_prompt else None,
        ),
        deadline_ms=min(_UINT32_MAX, max(1, int(1000 * order.deadline.remaining_s()))),
        traceparent=traceparent,
        isolation_domain=order.domain,
        priority=_PRIORITIES[order.ticket.priority],
    )
