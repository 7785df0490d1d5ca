"""Continuous batching: each step, who computes which tokens, in which blocks.

A step takes running sequences first (decodes, then prefill chunks), then waiting ones, under a budget of tokens. Higher
classes come first, within a class the older. When a decode needs a block and none is free, the last of that order gives
all of its blocks back and is computed again later. Several answers to one prompt wait as one: the first computes the
prompt, the others then share its blocks. What tokens and blocks a step has to spare may go to guesses at the tokens
that follow; nobody waits, shrinks or gives way for them. With a pacer, prompts also keep to the time that the streams
before them can spare. Time is an argument; the scheduler never looks at a clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from collections.abc import Sequence as Seq

from headrace.engine.core.batch import Batch, BatchLimits, decode_slice
from headrace.engine.core.block_pool import BlockPool
from headrace.engine.core.cache_event import CacheEvent
from headrace.engine.core.finish import ErrorReason, Finish, FinishReason, Problem
from headrace.engine.core.guessing import Guessing
from headrace.engine.core.kv_memory import KvMemory
from headrace.engine.core.ngram import Speculation
from headrace.engine.core.pacing import Pacer
from headrace.engine.core.ranking import Ranking
from headrace.engine.core.request import Sequence, State
from headrace.engine.core.step import Computed, Hold, Logprobs, SequenceSlice, StepOutcome, StepPlan, is_usual

__all__ = ["BatchLimits", "Scheduler"]

_CANCELLED = Problem(reason=ErrorReason.CANCELLED, message="the caller cancelled the request")
_LATE = Problem(reason=ErrorReason.DEADLINE_EXCEEDED, message="the request's deadline passed in the engine")
# Who waits for these is passed by: what they wait for takes no place that others could use.
_PASSED_BY = (Hold.GRAMMAR, Hold.PREFIX)


class Scheduler:
    """The sequences of one engine. Call `schedule`, compute the plan, call `update`; submit and abort in between."""

    def __init__(
        self,
        limits: BatchLimits,
        memory: KvMemory,
        eos_ids: frozenset[int],
        speculation: Speculation | None = None,
        pacer: Pacer | None = None,
    ) -> None:
        # Both in the order of service: victims are the last of those that run and return to their old place.
        self.running = Ranking()
        self.waiting = Ranking()
        self.limits = limits
        self.pacer = pacer  # whoever computes the steps tells it how long they took
        self._memory = memory
        self._eos_ids = eos_ids
        self._sequences: dict[int, Sequence] = {}
        self._arrivals = 0
        self._no_deadline_before = math.inf
        # Room for the next block of some of those that run; without it an admission is undone by the next step.
        self.watermark = max(1, memory.pool.total_blocks // 100)
        self._guessing = None if speculation is None else Guessing(speculation, memory, self.watermark)
        # So many steps more are the same decodes, each one token further in the same block, unless somebody comes or
        # goes.
        self._steady = 0

    @property
    def pool(self) -> BlockPool:
        """The accounts of the blocks."""
        return self._memory.pool

    def submit(self, sequence: Sequence, now: float, others: Seq[Sequence] = ()) -> tuple[Finish, ...]:
        """Queue a sequence, or say at once why it can never be served or not now.

        `others` are further answers to the same prompt: they share the fate of this call, and nothing else.
        """
        family = (sequence, *others)
        problem = self._refusal(sequence, len(family))
        if problem is not None:
            for member in family:
                member.state = State.FINISHED
            return tuple(member.finish(FinishReason.ERROR, now, problem) for member in family)
        self._arrivals += 1
        for index, member in enumerate(family):
            member.rank = (-member.placement.priority, self._arrivals, index)
            self._memory.enter(member)
            self._sequences[member.id] = member
        self._no_deadline_before = min(self._no_deadline_before, sequence.deadline_at)
        self._enqueue(sequence, others)
        return ()

    def abort(self, sequence_id: int, now: float) -> Finish | None:
        """End a sequence in whatever state and free its blocks; None when it is not here (any more)."""
        return self.end(sequence_id, FinishReason.CANCELLED, now, _CANCELLED)

    def end(self, sequence_id: int, reason: FinishReason, now: float, problem: Problem | None = None) -> Finish | None:
        """End a sequence in whatever state for a reason of the caller's; None when it is not here (any more)."""
        sequence = self._sequences.get(sequence_id)
        return None if sequence is None else self._end(sequence, reason, now, problem)

    def grammar_ready(self, sequence_id: int) -> None:
        """Let a sequence run that waited for its grammar; one that is not here (any more) is nothing."""
        sequence = self._sequences.get(sequence_id)
        if sequence is not None:
            sequence.grammar_pending = False
            if sequence.state is State.WAITING_FOR_GRAMMAR:
                sequence.state = State.WAITING

    def schedule(self, now: float) -> StepPlan:
        """Decide the next step; its slices are empty when there is nothing to compute."""
        if self._steady and now < self._no_deadline_before:
            self._steady -= 1
            slices = tuple([decode_slice(sequence) for sequence in self.running])
            return StepPlan(slices=slices, decodes=len(slices))
        expired = self._expire(now)
        batch = Batch(self.limits.max_num_batched_tokens)
        preempted, prompts = self._continue_decodes(batch)
        if self.pacer is not None:
            batch.pace(self.pacer, self._prompts(batch.decodes))
        for sequence in prompts:
            if not batch.budget:
                break
            if sequence.state is State.RUNNING:  # its blocks were allocated when it was admitted
                batch.prefill(sequence)
        admitted: list[int] = []
        hold = Hold.PREEMPTED if preempted else self._admit(batch, admitted, now)
        if self._guessing is not None and not preempted:
            running = len(self.running)
            self._guessing.extend(batch.slices, batch.decodes, self._sequences, running=running, budget=batch.budget)
        self._steady = 0 if prompts or preempted or self.waiting or admitted else self._steps_in_block()
        return StepPlan(
            slices=tuple(batch.slices),
            decodes=batch.decodes,
            copies=tuple(batch.copies),
            preempted=tuple(preempted),
            admitted=tuple(admitted),
            hold=hold,
            expired=expired,
            pace=batch.paced,
        )

    def update(self, plan: StepPlan, computed: Seq[Computed], now: float) -> StepOutcome:
        """Account for a computed step: `computed` holds one result per slice, in order."""
        sequence_ids: list[int] = []
        token_ids: list[int] = []
        logprobs: list[tuple[int, Logprobs]] = []
        finishes: list[Finish] = []
        drafted = accepted = 0
        for piece, result in zip(plan.slices, computed, strict=True):
            sequence = self._sequences.get(piece.sequence_id)
            if sequence is None:  # aborted while the step was computed
                continue
            if result.problem is not None:
                finishes.append(self._end(sequence, FinishReason.ERROR, now, result.problem))
                continue
            if is_usual(piece, result) and not sequence.followers:
                token_id: int = result.token_id  # type: ignore[assignment]  # else it would not be usual
                sequence_ids.append(sequence.id)
                token_ids.append(token_id)
                reason = sequence.append(token_id, self._eos_ids, now)
                sequence.num_computed_tokens += 1
                self._memory.store(sequence)
                if reason is not None:
                    finishes.append(self._end(sequence, reason, now))
                continue
            taken, reason, problem = self._append(sequence, (result, *result.more) if result.more else (result,), now)
            drafted += piece.drafted
            accepted += max(0, len(taken) - 1)
            self._account(sequence, piece, result, len(taken))
            for one in taken:
                sequence_ids.append(sequence.id)
                token_ids.append(one.token_id)  # type: ignore[arg-type]  # those taken have one
                if one.logprobs is not None:
                    logprobs.append((sequence.id, one.logprobs))
            if reason is not None:
                finishes.append(self._end(sequence, reason, now, problem))
        return StepOutcome(
            sequence_ids=sequence_ids,
            token_ids=token_ids,
            finishes=tuple(finishes),
            logprobs=tuple(logprobs),
            drafted=drafted,
            accepted=accepted,
        )

    def __iter__(self) -> Iterator[Sequence]:
        """Every sequence that has not ended."""
        return iter(self._sequences.values())

    @property
    def num_waiting(self) -> int:
        """Sequences that wait, attached ones among them."""
        return len(self.waiting) + sum(len(s.followers) for s in self.waiting)

    def next_deadline(self) -> float:
        """The earliest deadline of all sequences; infinite when there is none."""
        return min((s.deadline_at for s in self._sequences.values()), default=math.inf)

    def clear_cache(self) -> None:
        """Forget all cached prefixes, while nothing runs; BlockLeak otherwise."""
        self._memory.clear_cache()

    def take_cache_events(self) -> tuple[CacheEvent, ...]:
        """Changes of the prefix cache since the last call."""
        return self._memory.take_events()

    def check(self, also_held: Seq[Seq[int]] = ()) -> None:
        """BlockLeak unless the sequences (and `also_held`) hold exactly the blocks that are not free."""
        self._memory.check([*(s.block_table for s in self._sequences.values()), *also_held])

    def _refusal(self, sequence: Sequence, count: int) -> Problem | None:
        needed = self.pool.blocks_for(sequence.longest)
        if needed > self.pool.total_blocks:
            room = self.pool.total_blocks * self.pool.block_size
            return Problem(
                reason=ErrorReason.CACHE_EXCEEDED,
                message=f"prompt and max_tokens come to {sequence.longest} tokens, the KV cache holds {room}",
                field="sampling.max_tokens" if sequence.prompt_length < room else "token_ids",
            )
        if count > self.limits.max_waiting:
            return Problem(
                reason=ErrorReason.INVALID_FIELD,
                message=f"{count} answers can never wait at once: this engine queues {self.limits.max_waiting}",
                field="sampling.n",
            )
        waiting = self.num_waiting
        if waiting + count > self.limits.max_waiting:
            return Problem(reason=ErrorReason.QUEUE_FULL, message=f"{waiting} sequences are waiting already")
        return None

    def _steps_in_block(self) -> int:
        """How many steps of decodes come before one of those that run fills its block; 0 with guesses, which vary."""
        if self._guessing is not None:
            return 0
        last = self.pool.block_size - 1
        least = last
        for sequence in self.running:
            least = min(least, last - sequence.num_computed_tokens % self.pool.block_size)
            if not least:
                break
        return least

    def _expire(self, now: float) -> tuple[Finish, ...]:
        if now < self._no_deadline_before:
            return ()
        late = [s for s in self._sequences.values() if s.deadline_at <= now]
        finishes = tuple(self._end(s, FinishReason.CANCELLED, now, _LATE) for s in late)
        self._no_deadline_before = self.next_deadline()
        return finishes

    def _prompts(self, decodes: int) -> int:
        """How many sequences want their prompt computed: those at it, and those that wait and find a place."""
        return len(self.running) - decodes + min(len(self.waiting), self.limits.max_num_seqs - len(self.running))

    def _continue_decodes(self, batch: Batch) -> tuple[list[int], list[Sequence]]:
        """One token for every decoding sequence, in order; the ids of those that lost their blocks for it.

        The victim is the last of all that run, so it never has a slice or a copy yet. And those that ran and do not
        decode, victims among them.
        """
        preempted: list[int] = []
        prompts: list[Sequence] = []
        for sequence in list(self.running):
            if sequence.state is not State.RUNNING:
                continue
            if not sequence.decoding:
                prompts.append(sequence)
                continue
            if self._memory.needs_block(sequence):
                while not self.pool.free_blocks and sequence.state is State.RUNNING:
                    preempted.append(self._preempt_last())
                if sequence.state is not State.RUNNING:
                    break
                copy = self._memory.grow(sequence)
                if copy is not None:
                    batch.copies.append(copy)
            batch.decode(sequence)
        return preempted, prompts

    def _preempt_last(self) -> int:
        victim = self.running.last
        self.running.remove(victim)
        self._memory.release(victim)
        victim.preemptions += 1
        self._enqueue(victim, victim.followers)
        return victim.id

    def _admit(self, batch: Batch, admitted: list[int], now: float) -> Hold | None:
        """Start waiting sequences in order, until one has to wait for room; why the first that waits does so."""
        if not self.waiting:
            return None
        first: Hold | None = None
        started: list[Sequence] = []
        attached = sum(len(s.followers) for s in self.running)
        for sequence in self.waiting:
            hold, found = self._hold(sequence, batch, len(self.running) + attached)
            if hold is None:
                self._start(sequence, found, now)
                started.append(sequence)
                attached += len(sequence.followers)
                batch.prefill(sequence)
                continue
            first = first or hold
            if hold not in _PASSED_BY:
                break
        for sequence in started:
            self.waiting.remove(sequence)
            admitted.append(sequence.id)
        return first

    def _hold(self, sequence: Sequence, batch: Batch, seats: int) -> tuple[Hold | None, list[int]]:
        """Why a waiting sequence must go on waiting, `seats` being taken; else the cached blocks it starts with."""
        if sequence.state is State.WAITING_FOR_GRAMMAR:
            return Hold.GRAMMAR, []
        answers = 1 + len(sequence.followers)
        # More answers than there are places at all begin one after the other.
        if seats + min(answers, self.limits.max_num_seqs) > self.limits.max_num_seqs:
            return Hold.SEQUENCES, []
        if not batch.room(sequence):
            return batch.hold(), []
        if self._memory.still_awaits(sequence):
            return Hold.PREFIX, []
        found = self._memory.find(sequence)
        if self._memory.is_being_computed(sequence, len(found)):
            return Hold.PREFIX, []
        uncached = len(sequence.token_ids) - len(found) * self.pool.block_size
        if not self.limits.enable_chunked_prefill and batch.budget < uncached:
            return Hold.TOKENS, []
        # Each further answer soon needs a block of its own; alone, a sequence may have everything.
        spare = self.watermark + answers - 1 if seats else 0
        if self._memory.wanted(sequence, found) + spare > self.pool.free_blocks:
            return Hold.BLOCKS, []
        return None, found

    def _start(self, sequence: Sequence, found: list[int], now: float) -> None:
        self._memory.start(sequence, found)
        sequence.state = State.RUNNING
        if sequence.prefill_started_at is None:
            sequence.prefill_started_at = now
            sequence.cached_tokens = sequence.num_computed_tokens
        self.running.add(sequence)

    def _append(
        self, sequence: Sequence, results: Seq[Computed], now: float
    ) -> tuple[list[Computed], FinishReason | None, Problem | None]:
        """Append a step's tokens up to the one that ends the answer; those taken, and how it ended if it did."""
        taken: list[Computed] = []
        for result in results:
            if result.problem is not None:
                return taken, FinishReason.ERROR, result.problem
            if result.token_id is None:
                break
            taken.append(result)
            reason = sequence.append(result.token_id, self._eos_ids, now)
            if result.complete:
                reason = FinishReason.STOP
            if reason is not None:
                return taken, reason, None
        return taken, None, None

    def _account(self, sequence: Sequence, piece: SequenceSlice, result: Computed, taken: int) -> None:
        """Count what is computed for good, `taken` tokens having been appended: all but the untrue guesses."""
        sequence.num_computed_tokens += len(piece.token_ids) - piece.drafted + max(0, taken - 1)
        if result.prompt_logprobs:
            sequence.collect(piece.start, result.prompt_logprobs)
        self._memory.store(sequence)
        if piece.drafted:
            sequence.note_guesses(piece.drafted, taken - 1)
            self._memory.trim(sequence)
        if sequence.followers and result.token_id is not None:
            self._fork(sequence)

    def _fork(self, sequence: Sequence) -> None:
        """Its prompt is computed: those attached to it go on from there, or wait when there is no place for them."""
        self._steady = 0
        followers, sequence.followers = sequence.followers, []
        for follower in followers:
            follower.leader = None
            if follower.grammar_pending or len(self.running) >= self.limits.max_num_seqs:
                self._enqueue(follower)
                continue
            self._memory.share(sequence, follower)
            follower.state = State.RUNNING
            follower.prefill_started_at = sequence.prefill_started_at
            follower.prefill_chunks = sequence.prefill_chunks
            follower.cached_tokens = sequence.cached_tokens
            self.running.add(follower)

    def _enqueue(self, sequence: Sequence, followers: Seq[Sequence] = ()) -> None:
        """To its place among those that wait, and `followers` with it."""
        self._steady = 0
        sequence.leader = None
        sequence.followers = list(followers)
        for follower in followers:
            follower.leader = sequence
            follower.state = State.ATTACHED
        sequence.state = State.WAITING_FOR_GRAMMAR if sequence.grammar_pending else State.WAITING
        self.waiting.add(sequence)

    def _end(self, sequence: Sequence, reason: FinishReason, now: float, problem: Problem | None = None) -> Finish:
        self._steady = 0
        if sequence.leader is not None:
            sequence.leader.followers.remove(sequence)
            sequence.leader = None
        else:
            (self.running if sequence.state is State.RUNNING else self.waiting).remove(sequence)
        self._memory.release(sequence)
        sequence.state = State.FINISHED
        del self._sequences[sequence.id]
        if sequence.followers:  # the next of them computes the prompt, from what is cached of it by now
            heir, *rest = sequence.followers
            sequence.followers = []
            self._enqueue(heir, rest)
        return sequence.finish(reason, now, problem)
