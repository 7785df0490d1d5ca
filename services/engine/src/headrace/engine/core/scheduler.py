"""Continuous batching: each step, who computes which tokens, in which blocks.

A step takes running sequences first (decodes, then prefill chunks), then waiting ones, under a budget of tokens.
When a decode needs a block and none is free, the newest sequence gives all of its blocks back and is computed again
later. Time is an argument; the scheduler never looks at a clock.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from headrace.engine.core.block_pool import BlockPool
from headrace.engine.core.finish import ErrorReason, Finish, FinishReason, Problem
from headrace.engine.core.request import Sequence, State
from headrace.engine.core.step import Hold, SequenceSlice, StepOutcome, StepPlan

_CANCELLED = Problem(reason=ErrorReason.CANCELLED, message="the caller cancelled the request")
_LATE = Problem(reason=ErrorReason.DEADLINE_EXCEEDED, message="the request's deadline passed in the engine")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """The bounds of a step and of the queue before it; ValueError names a bound that cannot be.

    A step must have room for one token of every running sequence, or decodes would starve. With chunked prefill off a
    step must also hold the longest sequence the caller submits, or that one waits for ever.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    enable_chunked_prefill: bool
    max_waiting: int

    def __post_init__(self) -> None:
        if not 1 <= self.max_num_seqs <= self.max_num_batched_tokens:
            raise ValueError(
                f"max_num_seqs={self.max_num_seqs} must be from 1 to "
                f"max_num_batched_tokens={self.max_num_batched_tokens}"
            )


class Scheduler:
    """The sequences of one engine. Call `schedule`, compute the plan, call `update`; submit and abort in between."""

    def __init__(self, limits: BatchLimits, pool: BlockPool, eos_ids: frozenset[int]) -> None:
        # Together in the order of arrival: victims are the newest and return to the queue's front, nobody overtakes.
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self.pool = pool
        self.limits = limits
        self._eos_ids = eos_ids
        self._sequences: dict[int, Sequence] = {}
        # Room for the next block of some of those that run; without it an admission is undone by the next step.
        self._watermark = max(1, pool.total_blocks // 100)

    def submit(self, sequence: Sequence, now: float) -> Finish | None:
        """Queue a sequence, or say at once why it can never be served or not now."""
        problem = self._refusal(sequence)
        if problem is not None:
            sequence.state = State.FINISHED
            return sequence.finish(FinishReason.ERROR, now, problem)
        self._sequences[sequence.id] = sequence
        self.waiting.append(sequence)
        return None

    def abort(self, sequence_id: int, now: float) -> Finish | None:
        """End a sequence in whatever state and free its blocks; None when it is not here (any more)."""
        sequence = self._sequences.get(sequence_id)
        if sequence is None:
            return None
        return self._end(sequence, FinishReason.CANCELLED, now, _CANCELLED)

    def schedule(self, now: float) -> StepPlan:
        """Decide the next step; its slices are empty when there is nothing to compute."""
        expired = self._expire(now)
        slices: list[SequenceSlice] = []
        admitted: list[int] = []
        preempted = self._continue_decodes(slices)
        decodes = len(slices)
        budget = self._continue_prefills(slices, self.limits.max_num_batched_tokens - decodes)
        hold = Hold.PREEMPTED if preempted else self._admit(slices, budget, admitted, now)
        return StepPlan(
            slices=tuple(slices),
            decodes=decodes,
            preempted=tuple(preempted),
            admitted=tuple(admitted),
            hold=hold,
            expired=expired,
        )

    def update(self, plan: StepPlan, sampled: Seq[int], now: float) -> StepOutcome:
        """Account for a computed step: `sampled` holds one token per slice that samples, in order."""
        sequence_ids: list[int] = []
        token_ids: list[int] = []
        finishes: list[Finish] = []
        tokens = iter(sampled)
        for piece in plan.slices:
            token = next(tokens) if piece.samples else None
            sequence = self._sequences.get(piece.sequence_id)
            if sequence is None:  # aborted while the step was computed
                continue
            sequence.num_computed_tokens += len(piece.token_ids)
            if token is None:
                continue
            sequence_ids.append(sequence.id)
            token_ids.append(token)
            reason = sequence.append(token, self._eos_ids, now)
            if reason is not None:
                finishes.append(self._end(sequence, reason, now))
        return StepOutcome(sequence_ids=sequence_ids, token_ids=token_ids, finishes=tuple(finishes))

    def next_deadline(self) -> float:
        """The earliest deadline of all sequences; infinite when there is none."""
        return min((s.deadline_at for s in self._sequences.values()), default=math.inf)

    def check(self, also_held: Seq[Seq[int]] = ()) -> None:
        """BlockLeak unless the sequences (and `also_held`) hold exactly the blocks that are not free."""
        self.pool.check([*(s.block_table for s in self._sequences.values()), *also_held])

    def _refusal(self, sequence: Sequence) -> Problem | None:
        needed = self.pool.blocks_for(sequence.longest)
        if needed > self.pool.total_blocks:
            room = self.pool.total_blocks * self.pool.block_size
            return Problem(
                reason=ErrorReason.CACHE_EXCEEDED,
                message=f"prompt and max_tokens come to {sequence.longest} tokens, the KV cache holds {room}",
                field="sampling.max_tokens" if sequence.prompt_length < room else "token_ids",
            )
        if len(self.waiting) >= self.limits.max_waiting:
            return Problem(reason=ErrorReason.QUEUE_FULL, message=f"{len(self.waiting)} sequences are waiting already")
        return None

    def _expire(self, now: float) -> tuple[Finish, ...]:
        late = [s for s in self._sequences.values() if s.deadline_at <= now]
        return tuple(self._end(s, FinishReason.CANCELLED, now, _LATE) for s in late)

    def _continue_decodes(self, slices: list[SequenceSlice]) -> list[int]:
        """One token for every decoding sequence, oldest first; the ids of those that lost their blocks for it.

        The victim is the newest of all and decodes go from old to new, so it never has a slice yet.
        """
        preempted: list[int] = []
        for sequence in list(self.running):
            if sequence.state is not State.RUNNING or not sequence.decoding:
                continue
            if len(sequence.token_ids) > len(sequence.block_table) * self.pool.block_size:
                while not self.pool.free_blocks and sequence.state is State.RUNNING:
                    preempted.append(self._preempt_newest())
                if sequence.state is not State.RUNNING:
                    break
                sequence.block_table += self.pool.allocate(1)
            slices.append(_slice(sequence, 1))
        return preempted

    def _preempt_newest(self) -> int:
        victim = self.running.pop()
        self._release(victim)
        victim.state = State.WAITING
        victim.num_computed_tokens = 0
        victim.preemptions += 1
        self.waiting.appendleft(victim)
        return victim.id

    def _continue_prefills(self, slices: list[SequenceSlice], budget: int) -> int:
        """A chunk for each sequence in prefill, oldest first, as far as the budget goes; the budget left.

        Their blocks were allocated when they were admitted.
        """
        for sequence in self.running:
            if budget and not sequence.decoding:
                tokens = min(sequence.remaining_tokens, budget)
                slices.append(_slice(sequence, tokens))
                budget -= tokens
        return budget

    def _admit(self, slices: list[SequenceSlice], budget: int, admitted: list[int], now: float) -> Hold | None:
        """Start waiting sequences in order, until one has to wait: none overtakes another. Why that one waits."""
        while self.waiting:
            sequence = self.waiting[0]
            hold = self._hold(sequence, budget)
            if hold is not None:
                return hold
            self.waiting.popleft()
            self._start(sequence, now)
            tokens = min(sequence.remaining_tokens, budget)
            slices.append(_slice(sequence, tokens))
            admitted.append(sequence.id)
            budget -= tokens
        return None

    def _hold(self, sequence: Sequence, budget: int) -> Hold | None:
        if len(self.running) >= self.limits.max_num_seqs:
            return Hold.SEQUENCES
        if budget < (1 if self.limits.enable_chunked_prefill else sequence.remaining_tokens):
            return Hold.TOKENS
        spare = self._watermark if self.running else 0
        if self.pool.blocks_for(len(sequence.token_ids)) + spare > self.pool.free_blocks:
            return Hold.BLOCKS
        return None

    def _start(self, sequence: Sequence, now: float) -> None:
        sequence.block_table = self.pool.allocate(self.pool.blocks_for(len(sequence.token_ids)))
        sequence.state = State.RUNNING
        if sequence.prefill_started_at is None:
            sequence.prefill_started_at = now
        self.running.append(sequence)

    def _end(self, sequence: Sequence, reason: FinishReason, now: float, problem: Problem | None = None) -> Finish:
        (self.running if sequence.state is State.RUNNING else self.waiting).remove(sequence)
        self._release(sequence)
        sequence.state = State.FINISHED
        del self._sequences[sequence.id]
        return sequence.finish(reason, now, problem)

    def _release(self, sequence: Sequence) -> None:
        self.pool.free(sequence.block_table)
        sequence.block_table = []


def _slice(sequence: Sequence, tokens: int) -> SequenceSlice:
    start = sequence.num_computed_tokens
    if not sequence.decoding:
        sequence.prefill_chunks += 1
    return SequenceSlice(
        sequence_id=sequence.id,
        token_ids=sequence.token_ids[start : start + tokens],
        start=start,
        block_table=sequence.block_table,
        samples=start + tokens == len(sequence.token_ids),
        plan=sequence.plan,
    )
