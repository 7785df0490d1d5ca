"""The answers to one request, from its first attempt to its last message."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from opentelemetry import trace

from headrace.api.common.v1 import answer_pb2
from headrace.gateway.choice import AnswerSettings, Choice, Means
from headrace.gateway.core.progress import Progress
from headrace.gateway.core.recovery import EngineFault
from headrace.gateway.core.step import FinishReason
from headrace.gateway.fleet import Order
from headrace.gateway.merge import Merge
from headrace.gateway.model import Model
from headrace.gateway.submission import Attempt

__all__ = ["Answer", "AnswerSettings", "Event", "Means"]

Event = answer_pb2.AnswerStarted | answer_pb2.AnswerDelta | answer_pb2.AnswerFinished


class Answer:
    """What a client hears: one answer, or n of them interleaved, each with its index."""

    def __init__(
        self, order: Order, answers: Sequence[Progress], model: Model, means: Means, *, traceparent: str
    ) -> None:
        self._order = order
        self._answers = answers
        self._fleet = means.fleet
        self._traceparent = traceparent
        self._choices = [Choice(order, progress, model, means, shown=self._emitted) for progress in answers]

    @property
    def finish_reason(self) -> FinishReason:
        """Why the first answer ended."""
        return self._choices[0].finish_reason

    async def events(self) -> AsyncGenerator[Event, None]:
        """Started, deltas, finished when all have ended; raises what the client is to hear.

        Started leaves while the engine computes the prompt: a message of its own just before the first token would
        hold that up by a millisecond.
        """
        started = False
        deltas = self._choices[0].deltas() if len(self._choices) == 1 else self._merged()
        async with aclosing(deltas) as news:
            async for delta in news:
                if not started:
                    started = True
                    yield self._start()
                if delta is not None:
                    yield delta
        if not started:
            yield self._start()
        yield self._finished()

    async def _merged(self) -> AsyncGenerator[answer_pb2.AnswerDelta | None, None]:
        """All answers' deltas, as they come: submitted together, continued each by itself. None once they are."""
        self._choices[0].require_time()
        attempts: list[Attempt] = []
        firsts: Sequence[Attempt | EngineFault]
        try:
            firsts = attempts = await self._fleet.begin(self._order, self._answers)
        except EngineFault as fault:
            firsts = [fault.again() for _ in self._choices]
        else:
            yield None
        merge = Merge()
        tasks = [
            asyncio.create_task(merge.follow(choice.deltas(first)))
            for choice, first in zip(self._choices, firsts, strict=True)
        ]
        try:
            async with aclosing(merge.deltas(tasks)) as deltas:
                async for delta in deltas:
                    yield delta
        finally:
            for task in tasks:
                task.cancel()
            for attempt in attempts:  # of tasks that were cancelled before they began
                attempt.leave()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _emitted(self) -> int:
        return sum(len(progress.emitted) for progress in self._answers)

    def _start(self) -> answer_pb2.AnswerStarted:
        return answer_pb2.AnswerStarted(
            request_id=self._order.request_id,
            trace_id=_trace_id(self._traceparent),
            model=self._order.deployment,
            prompt_tokens=len(self._answers[0].prompt_ids),
            seed=self._order.seed,
        )

    def _finished(self) -> answer_pb2.AnswerFinished:
        first, emitted = self._choices[0], self._emitted()
        timings = first.progress.timings(time.monotonic())
        attempts = max(progress.attempts for progress in self._answers)
        span = trace.get_current_span()
        span.set_attribute("gen_ai.usage.output_tokens", emitted)
        reasons = tuple(choice.finish_reason.value.lower() for choice in self._choices)
        span.set_attribute("gen_ai.response.finish_reasons", reasons)
        span.set_attribute("headrace.attempts", attempts)
        return answer_pb2.AnswerFinished(
            finish_reason=_wire_reason(first.finish_reason),
            usage=answer_pb2.Usage(
                prompt_tokens=len(first.progress.prompt_ids),
                completion_tokens=emitted,
                cached_tokens=first.progress.cached_tokens,
            ),
            timings=answer_pb2.Timings(
                queue_ms=timings.queue_ms,
                prefill_ms=timings.prefill_ms,
                first_token_ms=timings.first_token_ms,
                inter_token_ms=timings.inter_token_ms,
                total_ms=timings.total_ms,
            ),
            engine_id=first.engine_id,
            attempts=attempts,
            choices=[_end(choice) for choice in self._choices],
            prompt_logprobs=first.progress.prompt_logprobs,
        )


def _end(choice: Choice) -> answer_pb2.ChoiceEnd:
    return answer_pb2.ChoiceEnd(
        index=choice.progress.index,
        finish_reason=_wire_reason(choice.finish_reason),
        completion_tokens=len(choice.progress.emitted),
    )


def _wire_reason(reason: FinishReason) -> answer_pb2.FinishReason.ValueType:
    return answer_pb2.FinishReason.Value(f"FINISH_REASON_{reason.value}")


def _trace_id(traceparent: str) -> str:
    parts = traceparent.split("-")
    return parts[1] if len(parts) == 4 else ""
