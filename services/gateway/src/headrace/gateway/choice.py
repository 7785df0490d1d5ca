"""One of the answers to a request, over as many attempts as it takes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from itertools import pairwise

import structlog

from headrace.api.common.v1 import answer_pb2
from headrace.base.errors import DeadlinePassed, HeadraceError, Unavailable
from headrace.gateway import metrics
from headrace.gateway.core.budget import RetryBudget
from headrace.gateway.core.outbox import Batch
from headrace.gateway.core.progress import Progress
from headrace.gateway.core.recovery import (
    NO_TIME_LEFT,
    SUSPICIOUS,
    Action,
    EngineFault,
    Fault,
    Situation,
    client_error,
    recover,
)
from headrace.gateway.core.step import Finish, FinishReason
from headrace.gateway.fleet import Fleet, Order
from headrace.gateway.model import Model
from headrace.gateway.submission import Attempt
from headrace.observe.metrics import observe_all
from headrace.text.answer import AnswerText

log = structlog.get_logger(__name__)

_RETRY_AFTER_S = 1.0
_COUNT_AT_ONCE = 64  # tokens per look at the metrics: counted one by one they would cost 2 µs each


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerSettings:
    """Limits of one request; times in seconds.

    `least_time_s`: with less than this left, no attempt is worth making. `place_wait_s`: longest wait in all for
    routers to have a replica; `resume_wait_s`: the same for a request that has lost its engine, which may be on its
    way back. `confirm_s`: how long the end of an answer cut at a stop text waits for the engine's
    own account of it, about two steps.
    """

    max_attempts: int = 3
    stall_s: float = 10.0
    least_time_s: float = 0.02
    confirm_s: float = 0.1
    place_wait_s: float = 2.0
    resume_wait_s: float = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """What answers are made with."""

    fleet: Fleet
    budget: RetryBudget
    settings: AnswerSettings


class Choice:
    """Answer `progress.index` of a request. `shown` counts the tokens of all its answers that left for the client."""

    def __init__(
        self, order: Order, progress: Progress, model: Model, means: Means, *, shown: Callable[[], int]
    ) -> None:
        self._fleet = means.fleet
        self._budget = means.budget
        self._settings = means.settings
        self._order = order
        self._model = model
        self._shown = shown
        self._text = AnswerText(model.tokenizer, order.sampling.stop, min_tokens=order.sampling.min_tokens or 0)
        self._last_fault: EngineFault | None = None
        self._counted = 0
        self.progress = progress
        self.engine_id = ""
        self.finish_reason = FinishReason.UNSPECIFIED

    async def deltas(
        self, first: Attempt | EngineFault | None = None
    ) -> AsyncGenerator[answer_pb2.AnswerDelta | None, None]:
        """Attempt after attempt until the answer ends; what one has emitted, the next continues.

        None whenever an engine has been given it, then what that emits. `first` is the first attempt, or what came of
        it, where it was made together with the other answers'.
        """
        try:
            while self.finish_reason is FinishReason.UNSPECIFIED:
                self.require_time()
                try:
                    attempt = await self._attempt(first)
                    with attempt.held():
                        self.engine_id = attempt.engine_id
                        yield None
                        async with aclosing(self._follow(attempt)) as deltas:
                            async for delta in deltas:
                                yield delta
                except EngineFault as fault:
                    self._recover(fault)
                except Unavailable as refusal:
                    raise self._no_replica(refusal) from None
                first = None
        finally:
            self._count()
        if tail := self._text.finish():
            yield answer_pb2.AnswerDelta(text=tail, index=self.progress.index)

    async def _attempt(self, first: Attempt | EngineFault | None) -> Attempt:
        if isinstance(first, EngineFault):
            raise first
        if first is not None:
            return first
        (attempt,) = await self._fleet.begin(self._order, [self.progress])
        return attempt

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
                self.progress.note_finish(batch.finish)
                if self.finish_reason is FinishReason.UNSPECIFIED:
                    raise _engine_fault(batch.finish, self._order.prompt_field)
        if batch.finish is None:
            await self._confirm(attempt)

    async def _next(self, attempt: Attempt) -> Batch:
        """Whatever is pending, however much: it all goes into one message.

        Before an attempt's first token silence may be a queue or a long prefill, and only the deadline ends it.
        """
        running = len(self.progress.emitted) > attempt.emitted_before
        left_s = self._order.deadline.remaining_s()
        try:
            return await attempt.sequence.next(min(left_s, self._settings.stall_s) if running else left_s)
        except TimeoutError:
            if self._order.deadline.remaining_s() <= 0:
                raise self._too_late() from None
            raise EngineFault(Fault.STALLED, f"{attempt.engine_id} stopped sending tokens") from None

    def _absorbed(self, batch: Batch) -> answer_pb2.AnswerDelta | None:
        """Take in a batch up to the answer's end, and make the delta that shows it."""
        count, piece = self._text.push_all(batch.token_ids)
        token_ids = batch.token_ids[:count]
        if token_ids:
            self.progress.note_tokens(token_ids, batch.arrived_at[:count])
            if not self._counted or len(self.progress.emitted) - self._counted >= _COUNT_AT_ONCE:
                self._count()
        if piece.stopped:
            self.finish_reason = FinishReason.STOP
        elif batch.finish is not None and batch.finish.reason in (FinishReason.STOP, FinishReason.LENGTH):
            self.finish_reason = batch.finish.reason
        if not piece.text and not token_ids:
            return None
        return answer_pb2.AnswerDelta(
            text=piece.text, token_ids=token_ids, index=self.progress.index, logprobs=batch.logprobs[:count]
        )

    def _count(self) -> None:
        """Bring the metrics up to the last token."""
        arrived_at, before = self.progress.arrived_at, self._counted
        self._counted = len(arrived_at)
        if not before and arrived_at:
            metrics.FIRST_TOKEN_SECONDS.observe(arrived_at[0] - self.progress.admitted_at)
        gaps = [later - earlier for earlier, later in pairwise(arrived_at[max(0, before - 1) :])]
        observe_all(metrics.INTER_TOKEN_SECONDS, gaps)
        metrics.TOKENS_OUT.inc(self._counted - before)

    async def _confirm(self, attempt: Attempt) -> None:
        """Wait a little for the engine's account of a cancelled sequence; an answer is complete without it.

        Not without the prompt's log-probabilities, though: they come with that account.
        """
        wanted = self._order.sampling.prompt_logprobs is not None and self.progress.index == 0
        wait_s = self._settings.stall_s if wanted else self._settings.confirm_s
        try:
            async with asyncio.timeout(wait_s):
                while True:
                    batch = await attempt.sequence.next(wait_s)
                    if batch.finish is not None:
                        self.progress.note_finish(batch.finish)
                        return
        except (TimeoutError, EngineFault):
            pass

    def _recover(self, fault: EngineFault) -> None:
        """Return when another attempt is to be made or the answer turns out complete; else raise the client's error."""
        if self._is_complete():
            return
        now, progress = time.monotonic(), self.progress
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
            raise client_error(fault, tokens_emitted=self._shown(), retry_after_s=_RETRY_AFTER_S) from None
        if not fault.loss.charged:
            fault.loss.charged = True
            self._budget.spend(now)
        self._last_fault = fault
        if decision.action is Action.MIGRATE or fault.fault in SUSPICIOUS:
            progress.place_wait_left_s = self._settings.resume_wait_s
        elif fault.fault is Fault.QUEUE_FULL:
            progress.place_wait_left_s = 0.0  # the others are asked once; then the client is told to come back

    def _is_complete(self) -> bool:
        """Whether an attempt was lost between its last token and its finish record."""
        emitted, sampling = self.progress.emitted, self._order.sampling
        ends = set(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            ends |= self._model.tokenizer.eos_ids
        if emitted and emitted[-1] in ends:
            self.finish_reason = FinishReason.STOP
        elif self.progress.tokens_left == 0:
            self.finish_reason = FinishReason.LENGTH
        return self.finish_reason is not FinishReason.UNSPECIFIED

    def _no_replica(self, refusal: Unavailable) -> HeadraceError:
        """What the client hears when no replica can be placed on: the cause, if an attempt had failed before."""
        emitted = self._shown()
        if emitted or (self._last_fault is not None and self._last_fault.fault is Fault.QUEUE_FULL):
            fault = self._last_fault or EngineFault(Fault.UNREACHABLE, refusal.message)
            return client_error(fault, tokens_emitted=emitted, retry_after_s=_RETRY_AFTER_S)
        return refusal

    def require_time(self) -> None:
        """DeadlinePassed when no attempt is worth making any more."""
        if self._order.deadline.remaining_s() < self._settings.least_time_s:
            raise self._too_late()

    def _too_late(self) -> DeadlinePassed:
        emitted = self._shown()
        return DeadlinePassed(
            f"the deadline passed after {emitted} tokens of the answer", metadata={"tokens_emitted": str(emitted)}
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
    why = finish.error_message.removeprefix(finish.error_field).lstrip()  # the client's error names the field itself
    return EngineFault(fault, why or finish.error_reason, field=field, reason=finish.error_reason)
