"""The shell's book of open sequences: who asked for each, and where its tokens go.

One dispatcher reads the worker's events and hands each owner its columns, so that an engine step costs one message
per gateway, whatever the number of sequences (2 us per token against 30 for a message each, measured).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from headrace.base.deadline import Deadline
from headrace.engine.cache_feed import CacheFeed
from headrace.engine.core.finish import ErrorReason, Finish, FinishReason, Problem
from headrace.engine.core.likelihood import Logprobs
from headrace.engine.core.load import LastLoad, Load
from headrace.engine.core.placement import USUAL, Placement
from headrace.engine.core.sampling_plan import SamplingPlan
from headrace.engine.metrics import (
    ACCEPTED,
    CACHED_TOKENS,
    DRAFTED,
    FINISHES,
    OPEN,
    PREEMPTIONS,
    PROMPT_TOKENS,
    TOKENS,
    show_load,
)
from headrace.engine.worker.client import StepEvent, WorkerClient
from headrace.observe.tracing import record_span

WORKER_STALLED = Problem(
    reason=ErrorReason.WORKER_STALLED, message="this replica's worker does not answer; try another replica"
)


class Owner(Protocol):
    """Takes one step's news for its own sequences, named by the slots it chose. Must not wait."""

    def deliver(
        self,
        slots: Sequence[int],
        token_ids: Sequence[int],
        logprobs: Sequence[tuple[int, Logprobs]],
        finishes: Sequence[tuple[int, Finish]],
    ) -> None:
        """`slots[i]` emitted `token_ids[i]`; `logprobs` are (slot, of its token) in their order, for those that asked.

        A slot that emitted several tokens comes once for each, in order.
        `finishes` are (slot, finish), their slots free afterwards.
        """


@dataclass(slots=True, kw_only=True)
class OpenSequence:
    """One sequence in the engine's hands."""

    owner: Owner
    slot: int
    index: int  # which answer of its request
    request_id: str
    attempt: int
    traceparent: str
    prompt_tokens: int
    submitted_ns: int
    tokens: int = 0


@dataclass(slots=True)
class _News:
    """One owner's share of one step."""

    slots: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[tuple[int, Logprobs]] = field(default_factory=list)
    finishes: list[tuple[int, Finish]] = field(default_factory=list)


class Sequences:
    """All open sequences of this process. Belongs to the event loop."""

    def __init__(self, worker: WorkerClient, cache: CacheFeed) -> None:
        self._worker = worker
        self.cache = cache
        self._open: dict[int, OpenSequence] = {}
        self._given_up: set[int] = set()  # ended here, and perhaps not yet in the worker
        self._load: LastLoad | None = None
        self._uncounted = 0  # tokens that TOKENS has yet to show

    def __len__(self) -> int:
        return len(self._open)

    @property
    def load(self) -> Load | None:
        """What to say of the load now; None before the worker is ready."""
        return self._load.at(time.monotonic()) if self._load else None

    def begin(self, load: Load) -> None:
        """The worker is ready, and has measured itself."""
        self._load = LastLoad(load)

    def submit(
        self,
        owner: Owner,
        slot: int,
        token_ids: Sequence[int],
        plan: SamplingPlan,
        *,
        request_id: str,
        attempt: int,
        traceparent: str,
        deadline: Deadline,
        n: int = 1,
        emitted_tokens: int = 0,
        placement: Placement = USUAL,
    ) -> int:
        """Hand a request to the worker: `n` sequences that share its prompt, in slots `slot` to ``slot + n - 1``.

        Sequence i has the id returned plus i, for `abort`, and the plan's seed plus i. Refusals come to the owner as
        finishes.
        """
        first = self._worker.submit(
            token_ids, plan, deadline=deadline, n=n, emitted_tokens=emitted_tokens, placement=placement
        )
        for index in range(n):
            self._open[first + index] = OpenSequence(
                owner=owner,
                slot=slot + index,
                index=index,
                request_id=request_id,
                attempt=attempt,
                traceparent=traceparent,
                prompt_tokens=len(token_ids),
                submitted_ns=time.time_ns(),
            )
        OPEN.inc(n)
        PROMPT_TOKENS.inc(len(token_ids))
        return first

    def abort(self, sequence_id: int) -> None:
        """End a sequence early; its finish follows. Unknown ids have finished already."""
        if sequence_id in self._open:
            self._worker.abort(sequence_id)

    def give_up_unstarted(self) -> None:
        """End with an error, as far as their owners know, the sequences that have no token yet: the worker is silent.

        Elsewhere they may start at once. The worker hears of it when it goes on, and what it still says of them is
        dropped.
        """
        shares: dict[int, tuple[Owner, _News]] = {}
        for sequence_id, sequence in list(self._open.items()):
            if not sequence.tokens:
                finish = Finish(sequence_id=sequence_id, reason=FinishReason.ERROR, problem=WORKER_STALLED)
                self._worker.abort(sequence_id)
                self._given_up.add(sequence_id)
                self._end(shares, finish)
        _deliver(shares)

    async def dispatch(self) -> None:
        """Hand out the worker's events until it is stopped; raises WorkerDied when it ends by itself."""
        await self._worker.follow(self._take)

    def _take(self, event: StepEvent) -> None:
        if event.load is not None:
            self._note(event.load)
        if event.cache_events:
            self.cache.apply(event.cache_events)
        self._hand_out(event)

    def _note(self, load: Load) -> None:
        if self._load is not None:
            self._load.note(load, time.monotonic())
        show_load(load)

    def _hand_out(self, event: StepEvent) -> None:
        shares: dict[int, tuple[Owner, _News]] = {}
        owner: Owner | None = None
        news = _News()
        for sequence_id, token_id in zip(event.sequence_ids, event.token_ids, strict=True):
            if self._given_up and sequence_id in self._given_up:
                continue
            sequence = self._open[sequence_id]
            sequence.tokens += 1
            if sequence.owner is not owner:  # mostly there is one gateway
                owner = sequence.owner
                news = _share(shares, owner)
            news.slots.append(sequence.slot)
            news.token_ids.append(token_id)
        self._count(event)
        for sequence_id, logprobs in event.logprobs:
            if sequence_id in self._given_up:
                continue
            sequence = self._open[sequence_id]
            _share(shares, sequence.owner).logprobs.append((sequence.slot, logprobs))
        for finish in event.finishes:
            if finish.sequence_id in self._given_up:
                self._given_up.remove(finish.sequence_id)
            else:
                self._end(shares, finish)
        _deliver(shares)

    def _count(self, event: StepEvent) -> None:
        """Counters cost a step more than its tokens do, so they move with the load: 20 times a second."""
        self._uncounted += len(event.token_ids)
        if event.load is not None and self._uncounted:
            TOKENS.inc(self._uncounted)
            self._uncounted = 0
        if event.drafted:
            DRAFTED.inc(event.drafted)
            ACCEPTED.inc(event.accepted)

    def _end(self, shares: dict[int, tuple[Owner, _News]], finish: Finish) -> None:
        sequence = self._open.pop(finish.sequence_id)
        _share(shares, sequence.owner).finishes.append((sequence.slot, finish))
        _record(sequence, finish)


def _share(shares: dict[int, tuple[Owner, _News]], owner: Owner) -> _News:
    known = shares.get(id(owner))
    if known is None:
        known = shares[id(owner)] = owner, _News()
    return known[1]


def _deliver(shares: dict[int, tuple[Owner, _News]]) -> None:
    for owner, news in shares.values():
        owner.deliver(news.slots, news.token_ids, news.logprobs, news.finishes)


def _record(sequence: OpenSequence, finish: Finish) -> None:
    """Count the end, and write the sequence's spans: its times are known only now."""
    OPEN.dec()
    problem = finish.problem.reason.value if finish.problem else ""
    FINISHES.labels(finish.reason.value, problem).inc()
    PREEMPTIONS.inc(finish.preemptions)
    if sequence.index == 0:  # the answers of one request share the prompt
        CACHED_TOKENS.inc(finish.cached_tokens)
    if not sequence.traceparent:
        return
    start, end = sequence.submitted_ns, time.time_ns()
    prefill = min(start + int(finish.queue_ms * 1e6), end)
    first = min(prefill + int(finish.prefill_ms * 1e6), end)
    own = record_span(
        "engine.sequence",
        start,
        end,
        sequence.traceparent,
        {
            "headrace.request_id": sequence.request_id,
            "headrace.attempt": sequence.attempt,
            "gen_ai.usage.input_tokens": sequence.prompt_tokens,
            "gen_ai.usage.output_tokens": sequence.tokens,
            "gen_ai.response.finish_reasons": finish.reason.value.lower(),
            "headrace.prefill_chunks": finish.prefill_chunks,
            "headrace.preemptions": finish.preemptions,
            "headrace.cached_tokens": finish.cached_tokens,
        },
        problem or None if finish.reason is FinishReason.ERROR else None,
    )
    record_span("engine.queue", start, prefill, own, {})
    if finish.prefill_ms:
        record_span("engine.prefill", prefill, first, own, {})
    if sequence.tokens > 1:
        record_span("engine.decode", first, end, own, {"headrace.tokens": sequence.tokens - 1})
