"""One answer, from its first attempt to its last message."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

import structlog
from opentelemetry import trace

from headrace.api.common.v1 import answer_pb2
from headrace.base.errors import DeadlinePassed, HeadraceError, Unavailable
from headrace.gateway import metrics
from headrace.gateway.core.budget import RetryBudget
from headrace.gateway.core.outbox import Batch
from headrace.gateway.core.progress import Progress
from headrace.gateway.core.recovery import (
    NO_TIME_LEFT,
    Action,
    EngineFault,
    Fault,
    Situation,
    client_error,
    recover,
)
from headrace.gateway.core.step import Finish, FinishReason
from headrace.gateway.fleet import Attempt, Fleet, Order
from headrace.gateway.model import Model
from headrace.text.answer import AnswerText

log = structlog.get_logger(__name__)

Event = answer_pb2.AnswerStarted | answer_pb2.AnswerDelta | answer_pb2.AnswerFinished

_RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerSettings:
    """Limits of one request; times in seconds.

    `least_time_s`: with less than this left, no attempt is worth making. `place_wait_s`: longest wait in all for
    routers to have a replica. `confirm_s`: how long the end of an answer cut at a stop text waits for the engine's
    own account of it, about two steps.
    """

    max_attempts: int = 3
    stall_s: float = 10.0
    least_time_s: float = 0.02
    confirm_s: float = 0.1
    place_wait_s: float = 2.0


class Answer:
    """One answer being made, over as many attempts as it takes."""

    def __init__(
        self,
        order: Order,
        progress: Progress,
        model: Model,
        *,
        traceparent: str,
        fleet: Fleet,
        budget: RetryBudget,
        settings: AnswerSettings,
    ) -> None:
        self._fleet = fleet
        self._budget = budget
        self._settings = settings
        self._order = order
        self._model = model
        self._progress = progress
        self._traceparent = traceparent
        self._text = AnswerText(model.tokenizer, order.sampling.stop)
        self._started = False
        self._engine_id = ""
        self._last_fault: EngineFault | None = None
        self.finish_reason = FinishReason.UNSPECIFIED

    async def events(self) -> AsyncGenerator[Event, None]:
        """Attempt after attempt until the answer ends; what one has emitted, the next continues."""
        while self.finish_reason is FinishReason.UNSPECIFIED:
            self._require_time()
            try:
                async with self._fleet.attempt(self._order, self._progress) as attempt:
                    self._engine_id = attempt.engine_id
                    async with aclosing(self._follow(attempt)) as deltas:
                        async for delta in deltas:
                            if not self._started:
                                yield self._start()
                            yield delta
            except EngineFault as fault:
                self._recover(fault)
            except Unavailable as refusal:
                raise self._no_replica(refusal) from None
        if not self._started:
            yield self._start()
        if tail := self._text.finish():
            yield answer_pb2.AnswerDelta(text=tail)
        yield self._finished()

    async def _follow(self, attempt: Attempt) -> AsyncGenerator[answer_pb2.AnswerDelta, None]:
        """Pass on what one attempt emits until the answer ends; EngineFault when the attempt fails first."""
        while self.finish_reason is FinishReason.UNSPECIFIED:
            batch = await self._next(attempt)
            delta = self._absorbed(batch)
            if self.finish_reason is not FinishReason.UNSPECIFIED:
                attempt.sequence.cancel()  # a stop text: the engine knows nothing of it
            if delta is not None:
                yield delta
            if batch.finish is not None:
                self._progress.note_finish(batch.finish)
                if self.finish_reason is FinishReason.UNSPECIFIED:
                    raise _engine_fault(batch.finish, self._order.prompt_field)
        if batch.finish is None:
            await self._confirm(attempt)

    async def _next(self, attempt: Attempt) -> Batch:
        """Whatever is pending, however much: it all goes into one message.

        Before an attempt's first token silence may be a queue or a long prefill, and only the deadline ends it.
        """
        running = len(self._progress.emitted) > attempt.emitted_before
        left_s = self._order.deadline.remaining_s()
        try:
            return await attempt.sequence.next(min(left_s, self._settings.stall_s) if running else left_s)
        except TimeoutError:
            if self._order.deadline.remaining_s() <= 0:
                raise self._too_late() from None
            raise EngineFault(Fault.STALLED, f"{attempt.engine_id} stopped sending tokens") from None

    def _absorbed(self, batch: Batch) -> answer_pb2.AnswerDelta | None:
        """Take in a batch up to the answer's end, and make the delta that shows it."""
        text, token_ids = "", []
        for token_id, arrived_at in zip(batch.token_ids, batch.arrived_at, strict=True):
            self._observe(arrived_at)
            self._progress.note_token(token_id, arrived_at)
            piece = self._text.push(token_id)
            text += piece.text
            token_ids.append(token_id)
            if piece.stopped:
                self.finish_reason = FinishReason.STOP
                break
        else:
            if batch.finish is not None and batch.finish.reason in (FinishReason.STOP, FinishReason.LENGTH):
                self.finish_reason = batch.finish.reason
        metrics.TOKENS_OUT.inc(len(token_ids))
        return answer_pb2.AnswerDelta(text=text, token_ids=token_ids) if text or token_ids else None

    def _observe(self, arrived_at: float) -> None:
        if self._progress.arrived_at:
            metrics.INTER_TOKEN_SECONDS.observe(arrived_at - self._progress.arrived_at[-1])
        else:
            metrics.FIRST_TOKEN_SECONDS.observe(arrived_at - self._progress.admitted_at)

    async def _confirm(self, attempt: Attempt) -> None:
        """Wait a little for the engine's account of a cancelled sequence; an answer is complete without it."""
        try:
            async with asyncio.timeout(self._settings.confirm_s):
                while True:
                    batch = await attempt.sequence.next(self._settings.confirm_s)
                    if batch.finish is not None:
                        self._progress.note_finish(batch.finish)
                        return
        except (TimeoutError, EngineFault):
            pass

    def _recover(self, fault: EngineFault) -> None:
        """Return when another attempt is to be made or the answer turns out complete; else raise the client's error."""
        if self._is_complete():
            return
        now, progress = time.monotonic(), self._progress
        situation = Situation(
            attempts=progress.attempts,
            max_attempts=self._settings.max_attempts,
            tokens_emitted=len(progress.emitted),
            time_left_s=self._order.deadline.remaining_s(),
            least_time_s=self._settings.least_time_s,
            budget_allows=fault.loss.charged or self._budget.allows(now),
        )
        decision = recover(fault.fault, situation)
        metrics.RECOVERIES.labels(decision.action.value, decision.reason).inc()
        log.warning(
            "attempt_failed",
            request=self._order.request_id,
            attempt=progress.attempts,
            why=fault.message,
            tokens_emitted=len(progress.emitted),
            action=decision.action.value,
            reason=decision.reason,
        )
        if decision.reason == NO_TIME_LEFT:
            raise self._too_late()
        if decision.action is Action.GIVE_UP:
            raise client_error(fault, tokens_emitted=len(progress.emitted), retry_after_s=_RETRY_AFTER_S) from None
        if not fault.loss.charged:
            fault.loss.charged = True
            self._budget.spend(now)
        self._last_fault = fault
        if fault.fault is Fault.QUEUE_FULL:
            progress.place_wait_left_s = 0.0  # the others are asked once; then the client is told to come back

    def _is_complete(self) -> bool:
        """Whether an attempt was lost between its last token and its finish record."""
        emitted, sampling = self._progress.emitted, self._order.sampling
        ends = set(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            ends |= self._model.tokenizer.eos_ids
        if emitted and emitted[-1] in ends:
            self.finish_reason = FinishReason.STOP
        elif self._progress.tokens_left == 0:
            self.finish_reason = FinishReason.LENGTH
        return self.finish_reason is not FinishReason.UNSPECIFIED

    def _no_replica(self, refusal: Unavailable) -> HeadraceError:
        """What the client hears when no replica can be placed on: the cause, if an attempt had failed before."""
        emitted = len(self._progress.emitted)
        if emitted or (self._last_fault is not None and self._last_fault.fault is Fault.QUEUE_FULL):
            fault = self._last_fault or EngineFault(Fault.UNREACHABLE, refusal.message)
            return client_error(fault, tokens_emitted=emitted, retry_after_s=_RETRY_AFTER_S)
        return refusal

    def _require_time(self) -> None:
        if self._order.deadline.remaining_s() < self._settings.least_time_s:
            raise self._too_late()

    def _too_late(self) -> DeadlinePassed:
        emitted = len(self._progress.emitted)
        return DeadlinePassed(
            f"the deadline passed after {emitted} tokens of the answer", metadata={"tokens_emitted": str(emitted)}
        )

    def _start(self) -> answer_pb2.AnswerStarted:
        self._started = True
        return answer_pb2.AnswerStarted(
            request_id=self._order.request_id,
            trace_id=_trace_id(self._traceparent),
            model=self._order.deployment,
            prompt_tokens=len(self._progress.prompt_ids),
            seed=self._order.seed,
        )

    def _finished(self) -> answer_pb2.AnswerFinished:
        timings, emitted = self._progress.timings(time.monotonic()), len(self._progress.emitted)
        span = trace.get_current_span()
        span.set_attribute("gen_ai.usage.output_tokens", emitted)
        span.set_attribute("gen_ai.response.finish_reasons", (self.finish_reason.value.lower(),))
        span.set_attribute("headrace.attempts", self._progress.attempts)
        return answer_pb2.AnswerFinished(
            finish_reason=answer_pb2.FinishReason.Value(f"FINISH_REASON_{self.finish_reason.value}"),
            usage=answer_pb2.Usage(prompt_tokens=len(self._progress.prompt_ids), completion_tokens=emitted),
            timings=answer_pb2.Timings(
                queue_ms=timings.queue_ms,
                prefill_ms=timings.prefill_ms,
                first_token_ms=timings.first_token_ms,
                inter_token_ms=timings.inter_token_ms,
                total_ms=timings.total_ms,
            ),
            engine_id=self._engine_id,
            attempts=self._progress.attempts,
        )


def _engine_fault(finish: Finish, prompt_field: str) -> EngineFault:
    """The failure behind a finish record that ended no answer; the engine's `token_ids` are the client's prompt."""
    if finish.error_reason == "DEADLINE_EXCEEDED":
        fault = Fault.DEADLINE
    elif finish.error_reason == "QUEUE_FULL":
        fault = Fault.QUEUE_FULL
    else:
        fault = Fault.REQUEST if finish.error_field else Fault.ENGINE
    field = prompt_field if finish.error_field.startswith("token_ids") else finish.error_field
    return EngineFault(fault, finish.error_message or finish.error_reason, field=field, reason=finish.error_reason)


def _trace_id(traceparent: str) -> str:
    parts = traceparent.split("-")
    return parts[1] if len(parts) == 4 else ""
