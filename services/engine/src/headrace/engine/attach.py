"""One gateway's Attach stream: submissions and cancels in, one columnar message per engine step out."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence

import structlog

from headrace.api.common.v1 import answer_pb2
from headrace.api.engine.v1 import engine_service_pb2 as pb
from headrace.base.deadline import Deadline
from headrace.base.errors import HeadraceError, InvalidRequest, StaleEpoch
from headrace.base.sampling_limit import MAX_ANSWERS
from headrace.engine.core.finish import Finish, Problem
from headrace.engine.core.likelihood import Logprobs
from headrace.engine.core.placement import Placement, Priority
from headrace.engine.core.sampling_plan import SamplingPlan
from headrace.engine.logprobs import logprobs_message
from headrace.engine.metrics import GATEWAYS
from headrace.engine.sampling import answers_wanted, plan_of
from headrace.engine.sequences import Sequences

log = structlog.get_logger(__name__)
_PRIORITIES = {
    pb.PRIORITY_BATCH: Priority.BATCH,
    pb.PRIORITY_STANDARD: Priority.STANDARD,
    pb.PRIORITY_INTERACTIVE: Priority.INTERACTIVE,
}


class AttachSession:
    """The responses of one stream, to be iterated over and then closed (`aclose`), and the state behind them.

    A class: a generator between a step and its write would cost as much as the queue. `welcome` raises when the stream
    may not begin, `refusal` says why new submissions are refused, if they are; `sessions` holds this one while it
    serves. Whatever ends the stream, the gateway's sequences end with it within one step.
    """

    def __init__(
        self,
        sequences: Sequences,
        requests: AsyncIterator[pb.AttachRequest],
        *,
        welcome: Callable[[], pb.Welcome],
        refusal: Callable[[], Problem | None],
        sessions: set[AttachSession],
    ) -> None:
        self._sequences = sequences
        self._requests = requests
        self._welcome = welcome
        self._refusal = refusal
        self._sessions = sessions
        self._slots: dict[int, int] = {}  # slot → sequence id
        self._outgoing: deque[pb.AttachResponse | None] = deque()  # None: the end
        self._wanted: asyncio.Future[None] | None = None
        self._reading: asyncio.Future[None] | None = None  # None before the gateway's hello, and after the end
        self._gateway = ""
        self._steps = 0
        self._failure: HeadraceError | None = None

    @property
    def open_slots(self) -> int:
        """Sequences of this gateway that have not finished."""
        return len(self._slots)

    def deliver(
        self,
        slots: Sequence[int],
        token_ids: Sequence[int],
        logprobs: Sequence[tuple[int, Logprobs]],
        finishes: Sequence[tuple[int, Finish]],
    ) -> None:
        """Queue one step's news. The queue is bounded by the tokens its open sequences may still emit."""
        self._steps += 1
        response = pb.AttachResponse()
        step = response.step  # filled in place: one made by itself would be copied
        step.step = self._steps
        step.slots.extend(slots)
        step.token_ids.extend(token_ids)
        if finishes:
            for slot, _ in finishes:
                self._slots.pop(slot, None)
            step.finishes.extend(_finish_message(*finish) for finish in finishes)
        if logprobs:
            told = (pb.SlotLogprobs(slot=slot, logprobs=logprobs_message(one)) for slot, one in logprobs)
            step.logprobs.extend(told)
        self._send(response)

    def close(self) -> None:
        """End the stream from this side, after what is queued."""
        self._send(None)

    def __aiter__(self) -> AttachSession:
        return self

    async def __anext__(self) -> pb.AttachResponse:
        if self._reading is None:
            return await self._begin()
        while not self._outgoing:
            self._wanted = asyncio.get_running_loop().create_future()
            await self._wanted
        response = self._outgoing.popleft()
        if response is not None:
            return response
        if self._failure is not None:
            raise self._failure
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """End what the stream began; may be called at any time, and twice."""
        self._sessions.discard(self)
        if self._reading is None:
            return
        GATEWAYS.dec()
        self._reading.cancel()
        self._reading = None
        for sequence_id in self._slots.values():
            self._sequences.abort(sequence_id)
        log.info("gateway_detached", gateway=self._gateway, aborted=len(self._slots))

    async def _begin(self) -> pb.AttachResponse:
        welcome = self._welcome()
        self._sessions.add(self)
        hello = await anext(aiter(self._requests), None)
        if hello is None or hello.WhichOneof("message") != "hello":
            raise InvalidRequest("message", "the first message of an Attach stream must be hello")
        if hello.hello.epoch not in (0, welcome.epoch):
            raise StaleEpoch(f"this is epoch {welcome.epoch} of {welcome.engine_id}, not {hello.hello.epoch}")
        self._gateway = hello.hello.gateway_id
        log.info("gateway_attached", gateway=self._gateway)
        GATEWAYS.inc()
        self._reading = asyncio.ensure_future(self._read())
        return pb.AttachResponse(welcome=welcome)

    async def _read(self) -> None:
        try:
            async for request in self._requests:
                kind = request.WhichOneof("message")
                if kind == "submit":
                    self._submit(request.submit)
                elif kind == "cancel":
                    if request.cancel.slot in self._slots:
                        self._sequences.abort(self._slots[request.cancel.slot])
                else:
                    raise InvalidRequest("message", "only submit and cancel may follow hello")
        except HeadraceError as error:
            self._failure = error
        self.close()

    def _submit(self, submit: pb.Submit) -> None:
        # An n out of range takes its slots, too, until they are all refused.
        slots = range(submit.slot, submit.slot + min(max(1, submit.sampling.n), MAX_ANSWERS))
        for slot in slots:
            if slot in self._slots:
                raise InvalidRequest("submit.slot", f"slot {slot} is in use until its finish record has arrived")
        if refusal := self._refusal():
            self._refuse(slots, refusal.reason.value, refusal.message)
            return
        try:
            answers_wanted(submit.sampling)
            plan = plan_of(submit.sampling, default_max_tokens=1)
        except InvalidRequest as invalid:
            self._refuse(slots, invalid.reason, str(invalid), invalid.field or "")
        else:
            self._start(submit, plan, slots)

    def _start(self, submit: pb.Submit, plan: SamplingPlan, slots: Sequence[int]) -> None:
        first = self._sequences.submit(
            self,
            submit.slot,
            submit.token_ids,
            plan,
            request_id=submit.request_id,
            attempt=submit.attempt,
            traceparent=submit.traceparent,
            deadline=Deadline.after(submit.deadline_ms / 1000) if submit.deadline_ms else Deadline.never(),
            n=len(slots),
            emitted_tokens=submit.emitted_tokens,
            placement=_placement(submit),
        )
        for index, slot in enumerate(slots):
            self._slots[slot] = first + index

    def _refuse(self, slots: Sequence[int], reason: str, message: str, field: str = "") -> None:
        finishes = [
            pb.Finish(
                slot=slot,
                reason=answer_pb2.FINISH_REASON_ERROR,
                error_reason=reason,
                error_message=message,
                error_field=field,
            )
            for slot in slots
        ]
        self._steps += 1
        self._send(pb.AttachResponse(step=pb.Step(step=self._steps, finishes=finishes)))

    def _send(self, response: pb.AttachResponse | None) -> None:
        self._outgoing.append(response)
        if self._wanted is not None and not self._wanted.done():
            self._wanted.set_result(None)


def _placement(submit: pb.Submit) -> Placement:
    return Placement(
        priority=_PRIORITIES.get(submit.priority, Priority.STANDARD),
        isolation_domain=submit.isolation_domain,
        adapter_digest=submit.adapter_digest,
    )


def _finish_message(slot: int, finish: Finish) -> pb.Finish:
    problem = finish.problem
    return pb.Finish(
        slot=slot,
        reason=answer_pb2.FinishReason.Value(f"FINISH_REASON_{finish.reason.value}"),
        error_reason=problem.reason.value if problem else "",
        error_message=problem.message if problem else "",
        error_field=problem.field if problem else "",
        queue_ms=finish.queue_ms,
        prefill_ms=finish.prefill_ms,
        later_ms=finish.later_ms,
        prefill_chunks=finish.prefill_chunks,
        preemptions=finish.preemptions,
        cached_tokens=finish.cached_tokens,
        prompt_logprobs=map(logprobs_message, finish.prompt_logprobs),
    )
