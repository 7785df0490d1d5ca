"""An answer in text, straight from this engine: the path of people who debug one."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from headrace.api.common.v1 import answer_pb2, sampling_pb2
from headrace.api.engine.v1 import engine_service_pb2 as pb
from headrace.base.errors import DeadlinePassed, Exhausted, HeadraceError, InternalError, InvalidRequest
from headrace.engine.core.finish import ErrorReason, Finish, FinishReason
from headrace.engine.sampling import plan_of
from headrace.engine.sequences import Sequences
from headrace.observe.tracing import current_traceparent
from headrace.rpc.context import CallContext
from headrace.text.answer import AnswerText
from headrace.text.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 1024


class Inbox:
    """One sequence's tokens and end, as they come."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[int | Finish] = asyncio.Queue()

    def deliver(self, slots: Sequence[int], token_ids: Sequence[int], finishes: Sequence[tuple[int, Finish]]) -> None:
        """Queue this sequence's news; bounded by its max_tokens."""
        for token_id in token_ids:
            self._queue.put_nowait(token_id)
        for _, finish in finishes:
            self._queue.put_nowait(finish)

    async def next(self) -> int | Finish:
        """The next token id, or the end."""
        return await self._queue.get()


@dataclass(slots=True)
class Watch:
    """Times of one answer on the monotonic clock."""

    started: float = field(default_factory=time.monotonic)
    first: float | None = None
    last: float = 0.0
    gaps_ms: list[float] = field(default_factory=list)

    def token(self) -> None:
        """A token has come."""
        now = time.monotonic()
        if self.first is None:
            self.first = now
        else:
            self.gaps_ms.append((now - self.last) * 1000)
        self.last = now

    def timings(self, finish: Finish | None) -> answer_pb2.Timings:
        """The record; `finish` None when the shell itself ended the answer at a stop text."""
        return answer_pb2.Timings(
            queue_ms=finish.queue_ms if finish else 0.0,
            prefill_ms=finish.prefill_ms if finish else 0.0,
            first_token_ms=((self.first or time.monotonic()) - self.started) * 1000,
            inter_token_ms=self.gaps_ms,
            total_ms=(time.monotonic() - self.started) * 1000,
        )


async def prompt_ids(tokenizer: Tokenizer, request: pb.GenerateRequest) -> list[int]:
    """Token ids of the request's prompt or conversation; InvalidRequest names the field."""
    if bool(request.prompt) == bool(request.messages):
        raise InvalidRequest("prompt", "set exactly one of prompt and messages, and not to nothing")
    if request.messages:
        return await asyncio.to_thread(tokenizer.encode_chat, request.messages)
    return await asyncio.to_thread(tokenizer.encode, request.prompt)


def with_defaults(sampling: sampling_pb2.SamplingParams) -> sampling_pb2.SamplingParams:
    """A copy with the seed drawn, when it has none."""
    filled = sampling_pb2.SamplingParams()
    filled.CopyFrom(sampling)
    if not filled.HasField("seed"):
        filled.seed = secrets.randbits(63)
    return filled


async def stream_answer(
    sequences: Sequences, tokenizer: Tokenizer, request: pb.GenerateRequest, call: CallContext, engine_id: str
) -> AsyncIterator[pb.GenerateResponse]:
    """Started, deltas, finished; leaving it early aborts the sequence."""
    ids = await prompt_ids(tokenizer, request)
    sampling = with_defaults(request.sampling)
    text = AnswerText(tokenizer, sampling.stop)
    watch, inbox = Watch(), Inbox()
    traceparent = current_traceparent()
    sequence_id = sequences.submit(
        inbox,
        0,
        ids,
        plan_of(sampling, default_max_tokens=DEFAULT_MAX_TOKENS),
        request_id=call.request_id,
        attempt=1,
        traceparent=traceparent,
        deadline=call.deadline,
    )
    started = answer_pb2.AnswerStarted(
        request_id=call.request_id,
        trace_id=traceparent[3:35],
        prompt_tokens=len(ids),
        seed=sampling.seed,
    )
    count, stopped = 0, False
    finish: Finish | None = None
    try:
        yield pb.GenerateResponse(started=started)
        while finish is None:
            news = await inbox.next()
            if isinstance(news, Finish):
                finish = news
            elif not stopped:
                watch.token()
                count += 1
                piece = text.push(news)
                yield pb.GenerateResponse(delta=answer_pb2.AnswerDelta(text=piece.text, token_ids=[news]))
                if piece.stopped:
                    stopped = True
                    sequences.abort(sequence_id)
    finally:
        sequences.abort(sequence_id)
    if not stopped:
        raise_problem(finish)
        rest = text.finish()
        if rest:
            yield pb.GenerateResponse(delta=answer_pb2.AnswerDelta(text=rest))
    reason = FinishReason.STOP if stopped else finish.reason
    yield pb.GenerateResponse(
        finished=answer_pb2.AnswerFinished(
            finish_reason=answer_pb2.FinishReason.Value(f"FINISH_REASON_{reason.value}"),
            usage=answer_pb2.Usage(prompt_tokens=len(ids), completion_tokens=count),
            timings=watch.timings(finish),
            engine_id=engine_id,
            attempts=1,
        )
    )


_INVALID = {
    ErrorReason.EMPTY_PROMPT,
    ErrorReason.TOKEN_OUT_OF_RANGE,
    ErrorReason.CONTEXT_EXCEEDED,
    ErrorReason.CACHE_EXCEEDED,
    ErrorReason.INVALID_FIELD,
}


def raise_problem(finish: Finish) -> None:
    """Raise what the core refused as an error of the house's tree; a good finish passes."""
    problem = finish.problem
    if problem is None:
        return
    if problem.reason in _INVALID:
        field_name = "prompt" if problem.field.startswith("token_ids") else problem.field
        raise InvalidRequest(field_name, problem.message, reason=problem.reason.value)
    errors: dict[ErrorReason, HeadraceError] = {
        ErrorReason.DEADLINE_EXCEEDED: DeadlinePassed(problem.message),
        ErrorReason.QUEUE_FULL: Exhausted(problem.message, reason="QUEUE_FULL", retry_after_s=1.0),
    }
    raise errors.get(problem.reason) or InternalError(problem.message, reason=problem.reason.value)
