"""An answer in text, straight from this engine: the path of people who debug one."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from headrace.api.common.v1 import answer_pb2, sampling_pb2
from headrace.api.engine.v1 import engine_service_pb2 as pb
from headrace.base.errors import DeadlinePassed, Exhausted, HeadraceError, InternalError, InvalidRequest, Unavailable
from headrace.engine.choice import Choice
from headrace.engine.core.finish import ErrorReason, Finish
from headrace.engine.core.likelihood import Logprobs
from headrace.engine.logprobs import logprobs_message
from headrace.engine.sampling import answers_wanted, plan_of
from headrace.engine.sequences import Sequences
from headrace.observe.tracing import current_traceparent
from headrace.rpc.context import CallContext
from headrace.text.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """A token of answer `index`, or its end."""

    index: int
    token_id: int | None = None
    logprobs: Logprobs | None = None
    finish: Finish | None = None


class Inbox:
    """The news of one request's answers, as they come; the slots are the answers' indices."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[News] = asyncio.Queue()

    def deliver(
        self,
        slots: Sequence[int],
        token_ids: Sequence[int],
        logprobs: Sequence[tuple[int, Logprobs]],
        finishes: Sequence[tuple[int, Finish]],
    ) -> None:
        """Queue this request's news; bounded by its max_tokens."""
        asked = {slot for slot, _ in logprobs}
        following = iter(logprobs)
        for slot, token_id in zip(slots, token_ids, strict=True):
            own = next(following)[1] if slot in asked else None
            self._queue.put_nowait(News(index=slot, token_id=token_id, logprobs=own))
        for slot, finish in finishes:
            self._queue.put_nowait(News(index=slot, finish=finish))

    async def next(self) -> News:
        """The next token, or end."""
        return await self._queue.get()


async def prompt_ids(tokenizer: Tokenizer, request: pb.GenerateRequest) -> list[int]:
    """Token ids of the request's prompt or conversation; InvalidRequest names the field."""
    if sum(map(bool, (request.prompt, request.messages, request.token_ids))) != 1:
        raise InvalidRequest("prompt", "set exactly one of prompt, messages and token_ids, and not to nothing")
    if request.token_ids:
        return list(request.token_ids)
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
    """Started, deltas of all n answers as they come, finished; leaving it early aborts the sequences."""
    ids = await prompt_ids(tokenizer, request)
    sampling = with_defaults(request.sampling)
    n = answers_wanted(sampling)
    choices = [Choice(index, tokenizer, sampling) for index in range(n)]
    inbox, traceparent = Inbox(), current_traceparent()
    first = sequences.submit(
        inbox,
        0,
        ids,
        plan_of(sampling, default_max_tokens=DEFAULT_MAX_TOKENS),
        request_id=call.request_id,
        attempt=1,
        traceparent=traceparent,
        deadline=call.deadline,
        n=n,
    )
    started = answer_pb2.AnswerStarted(
        request_id=call.request_id, trace_id=traceparent[3:35], prompt_tokens=len(ids), seed=sampling.seed
    )
    try:
        yield pb.GenerateResponse(started=started)
        while any(choice.finish is None for choice in choices):
            news = await inbox.next()
            choice = choices[news.index]
            delta = _absorbed(choice, news)
            if delta is not None:
                yield pb.GenerateResponse(delta=delta)
            if choice.stopped:
                sequences.abort(first + choice.index)
    finally:
        for index in range(n):
            sequences.abort(first + index)
    yield pb.GenerateResponse(finished=_finished(choices, len(ids), engine_id))


def _absorbed(choice: Choice, news: News) -> answer_pb2.AnswerDelta | None:
    """What one piece of news adds to its answer's text."""
    if news.finish is not None:
        if not choice.stopped:
            raise_problem(news.finish)
        rest = choice.end(news.finish)
        return answer_pb2.AnswerDelta(text=rest, index=choice.index) if rest else None
    if choice.stopped or news.token_id is None:  # on its way when the sequence was aborted
        return None
    logprobs = [] if news.logprobs is None else [logprobs_message(news.logprobs)]
    text = choice.push(news.token_id)
    return answer_pb2.AnswerDelta(text=text, token_ids=[news.token_id], index=choice.index, logprobs=logprobs)


def _finished(choices: Sequence[Choice], prompt_tokens: int, engine_id: str) -> answer_pb2.AnswerFinished:
    finish = choices[0].finish
    assert finish is not None
    return answer_pb2.AnswerFinished(
        finish_reason=choices[0].message().finish_reason,
        usage=answer_pb2.Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=sum(choice.tokens for choice in choices),
            cached_tokens=finish.cached_tokens,
        ),
        timings=choices[0].timings(),
        engine_id=engine_id,
        attempts=1,
        choices=[choice.message() for choice in choices],
        prompt_logprobs=[logprobs_message(one) for one in finish.prompt_logprobs],
    )


_INVALID = {
    ErrorReason.EMPTY_PROMPT,
    ErrorReason.TOKEN_OUT_OF_RANGE,
    ErrorReason.CONTEXT_EXCEEDED,
    ErrorReason.CACHE_EXCEEDED,
    ErrorReason.INVALID_FIELD,
    ErrorReason.NO_TOKEN_ALLOWED,
}


def raise_problem(finish: Finish) -> None:
    """Raise what the core refused as an error of the house's tree; a good finish passes."""
    problem = finish.problem
    if problem is None:
        return
    if problem.reason in _INVALID:
        field_name = "prompt" if problem.field.startswith("token_ids") else problem.field or "sampling"
        why = problem.message.removeprefix(problem.field).lstrip()  # the error names the field itself
        raise InvalidRequest(field_name, why, reason=problem.reason.value)
    errors: dict[ErrorReason, HeadraceError] = {
        ErrorReason.DEADLINE_EXCEEDED: DeadlinePassed(problem.message),
        ErrorReason.QUEUE_FULL: Exhausted(problem.message, reason="QUEUE_FULL", retry_after_s=1.0),
        ErrorReason.WORKER_STALLED: Unavailable(problem.message, reason="WORKER_STALLED", retry_after_s=1.0),
    }
    raise errors.get(problem.reason) or InternalError(problem.message, reason=problem.reason.value)
