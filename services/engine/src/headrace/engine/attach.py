"""One gateway's Attach stream: submissions and cancels in, one columnar message per engine step out."""

from __future__ import annotations

import asyncio
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
    """The state of one stream. `refusal` says why new submissions are refused, if they are."""

    def __init__(self, sequences: Sequences, refusal: Callable[[], Problem | None]) -> None:
        self._sequences = sequences
        self._refusal = refusal
        self._slots: dict[int, int] = {}  # slot → sequence id
        self._outgoing: asyncio.Queue[pb.Step | None] = asyncio.Queue()
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
        for slot, _ in finishes:
            self._slots.pop(slot, None)
        step = pb.Step(slots=slots, token_ids=token_ids, finishes=[_finish_message(*finish) for finish in finishes])
        step.logprobs.extend(pb.SlotLogprobs(slot=slot, logprobs=logprobs_message(one)) for slot, one in logprobs)
        self._send(step)

    def close(self) -> None:
        """End the stream from this side, after what is queued."""
        self._outgoing.put_nowait(None)

    async def run(
        self, requests: AsyncIterator[pb.AttachRequest], welcome: pb.Welcome
    ) -> AsyncIterator[pb.AttachResponse]:
        """Serve the stream; whatever ends it, the gateway's sequences end with it within one step."""
        hello = await anext(aiter(requests), None)
        if hello is None or hello.WhichOneof("message") != "hello":
            raise InvalidRequest("message", "the first message of an Attach stream must be hello")
        if hello.hello.epoch not in (0, welcome.epoch):
            raise StaleEpoch(f"this is epoch {welcome.epoch} of {welcome.engine_id}, not {hello.hello.epoch}")
        log.info("gateway_attached", gateway=hello.hello.gateway_id)
        GATEWAYS.inc()
        reading = asyncio.ensure_future(self._read(requests))
        try:
            yield pb.AttachResponse(welcome=welcome)
            while (step := await self._outgoing.get()) is not None:
                yield pb.AttachResponse(step=step)
            if self._failure is not None:
                raise self._failure
        finally:
            GATEWAYS.dec()
            reading.cancel()
            for sequence_id in self._slots.values():
                self._sequences.abort(sequence_id)
            log.info("gateway_detached", gateway=hello.hello.gateway_id, aborted=len(self._slots))

    async def _read(self, requests: AsyncIterator[pb.AttachRequest]) -> None:
        try:
            async for request in requests:
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
        self._send(pb.Step(finishes=finishes))

    def _send(self, step: pb.Step) -> None:
        self._steps += 1
        step.step = self._steps
        self._outgoing.put_nowait(step)


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
