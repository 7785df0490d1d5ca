"""The worker's step loop: drain commands, schedule, compute, account, report."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Protocol

from headrace.engine.core.finish import Finish, FinishReason, Problem
from headrace.engine.core.load import Meter, Rates, StepRecord, load, smallest_chunk
from headrace.engine.core.request import Sequence
from headrace.engine.core.sampling_plan import SamplingPlan
from headrace.engine.core.scheduler import Scheduler
from headrace.engine.core.step import StepOutcome, StepPlan
from headrace.engine.core.submission import ModelLimits, examine
from headrace.engine.worker.backend import Backend
from headrace.engine.worker.grammar import POLL_S, Grammars
from headrace.engine.worker.messages import Abort, Command, LongStep, Ping, StepEvent, Submit

_NOTHING = StepOutcome(sequence_ids=(), token_ids=(), finishes=())
_WARM_UP_PROMPT = 256
_WARM_UP_ANSWER = 8
# A step may take so many times as long as its prompt tokens usually do: late chunks attend to more than the first ones,
# and there may be busy neighbours. Below the second number nothing is said: the shell's patience covers it.
_PATIENCE = 8.0
_WORTH_SAYING_S = 0.5
# Heartbeats are five times as far apart; made and sent with each step, a load would cost as much as the step's tokens.
_LOAD_EVERY_S = 0.05


class Shell(Protocol):
    """Where commands come from and events go to."""

    def send(self, report: StepEvent | LongStep, /) -> None:
        """Deliver one event."""

    def receive(self, wait_s: float, /) -> list[Command]:
        """Every command that has arrived, after waiting up to `wait_s` for the first."""


class StepLoop:
    """One scheduler and one backend, and the rates measured while they work."""

    def __init__(
        self,
        scheduler: Scheduler,
        backend: Backend,
        grammars: Grammars,
        limits: ModelLimits,
        *,
        clock: Callable[[], float],
    ) -> None:
        self.backend = backend
        self.limits = limits
        self._scheduler = scheduler
        self._grammars = grammars
        self._clock = clock
        self._meter = Meter(smallest_chunk=smallest_chunk(scheduler.limits.max_num_batched_tokens))
        # Blocks that a fault took out of use: they belong to no sequence.
        self.occupied: list[int] = []
        self._load_due = -math.inf

    @property
    def rates(self) -> Rates:
        """As measured by all steps so far."""
        return self._meter.rates

    def warm_up(self) -> None:
        """Run the backend's slow first times, then one sequence through the whole loop, which measures the rates."""
        self.backend.warm_up()
        room = min(self.limits.max_model_len, self._scheduler.pool.total_blocks * self._scheduler.pool.block_size)
        answer = min(_WARM_UP_ANSWER, room - 1)
        prompt = [i % self.limits.vocab_size for i in range(min(_WARM_UP_PROMPT, room - answer))]
        plan = SamplingPlan(max_tokens=answer, ignore_eos=True)
        self._submit(Submit(sequence_id=0, token_ids=prompt, plan=plan, arrived_at=self._clock(), deadline_at=math.inf))
        while self._scheduler.running or self._scheduler.waiting:
            self.step()
        self._scheduler.clear_cache()
        self._scheduler.take_cache_events()

    def serve(self, shell: Shell) -> None:
        """Work until `shell` raises; waits for commands only when there is nothing to compute."""
        wait_s = math.inf
        while True:
            commands = shell.receive(wait_s)
            finishes = [finish for command in commands for finish in self._apply(command)]
            finishes += self._take_grammars()
            plan, outcome = self.step(shell)
            finishes += (*plan.expired, *outcome.finishes)
            for finish in finishes:
                self._grammars.drop(finish.sequence_id)
            if commands or finishes or plan.slices:
                news = bool(commands or finishes or plan.admitted or plan.preempted or not plan.slices)
                shell.send(self._event(plan, outcome, tuple(finishes), news=news))
            wait_s = 0.0 if plan.slices else self._idle_s()

    def close(self) -> None:
        """Give up what goes on beside the loop, which is not used again."""
        self._grammars.close()

    def step(self, shell: Shell | None = None) -> tuple[StepPlan, StepOutcome]:
        """Decide a step, compute it if it holds anything, and measure it; `shell` is told before it takes long."""
        started_at = self._clock()
        plan = self._scheduler.schedule(started_at)
        if not plan.slices:
            return plan, _NOTHING
        if shell is not None and (may_take_s := self._may_take_s(plan)) > _WORTH_SAYING_S:
            shell.send(LongStep(may_take_s=may_take_s))
        if plan.copies:
            self.backend.copy_blocks(plan.copies)
        results = self.backend.execute(plan.slices, self._grammars.masks(plan.slices))
        computed = self._grammars.settle(plan.slices, results)
        prefill_tokens, longest_prefill = _prefill_tokens(plan), self._longest_prefill(plan)
        ended_at = self._clock()
        outcome = self._scheduler.update(plan, computed, ended_at)
        record = StepRecord(
            duration_s=ended_at - started_at,
            decodes=plan.decodes,
            prefill_tokens=prefill_tokens,
            accepted=outcome.accepted,
            longest_prefill=longest_prefill,
        )
        self._meter.note(record)
        if self._scheduler.pacer is not None:
            self._scheduler.pacer.note(
                duration_s=record.duration_s, decodes=record.decodes, prefill_tokens=record.prefill_tokens
            )
        return plan, outcome

    def _may_take_s(self, plan: StepPlan) -> float:
        """The longest that the prompt tokens of a step may take; 0 while their rate is unknown."""
        tokens = _prefill_tokens(plan)
        rate = self.rates.prefill_tokens_per_s if tokens else None
        return _PATIENCE * tokens / rate if rate else 0.0

    def _longest_prefill(self, plan: StepPlan) -> int:
        """Uncached tokens of the longest prompt that the step computes a chunk of; asked before any of them ends."""
        if plan.decodes == len(plan.slices):
            return 0
        chunks = {piece.sequence_id for piece in plan.slices[plan.decodes :]}
        return max((s.prompt_length - s.cached_tokens for s in self._scheduler.running if s.id in chunks), default=0)

    def _idle_s(self) -> float:
        """How long nothing but a command or a deadline can bring work; checks the block accounts on the way."""
        self._scheduler.check([self.occupied])
        until_late_s = self._scheduler.next_deadline() - self._clock()
        return min(until_late_s, POLL_S) if self._grammars.compiling else until_late_s

    def _event(self, plan: StepPlan, outcome: StepOutcome, finishes: tuple[Finish, ...], *, news: bool) -> StepEvent:
        """`news`: whether the load is more than what steps make of it by themselves."""
        now = self._clock()
        due = news or now >= self._load_due
        if due:
            self._load_due = now + _LOAD_EVERY_S
        return StepEvent(
            sequence_ids=outcome.sequence_ids,
            token_ids=outcome.token_ids,
            finishes=finishes,
            load=load(self._scheduler, self.rates) if due else None,
            logprobs=outcome.logprobs,
            hold=plan.hold,
            preemptions=len(plan.preempted),
            drafted=outcome.drafted,
            accepted=outcome.accepted,
            cache_events=self._scheduler.take_cache_events() if due else (),
        )

    def _take_grammars(self) -> list[Finish]:
        """Let those run whose grammar has come; the ends of those whose grammar cannot be had."""
        finishes: list[Finish] = []
        for sequence_id, problem in self._grammars.arrived() if self._grammars.compiling else ():
            if problem is None:
                self._scheduler.grammar_ready(sequence_id)
            elif finish := self._scheduler.end(sequence_id, FinishReason.ERROR, self._clock(), problem):
                finishes.append(finish)
        return finishes

    def _apply(self, command: Command) -> tuple[Finish, ...]:
        if isinstance(command, Submit):
            return self._submit(command)
        if isinstance(command, Abort):
            finish = self._scheduler.abort(command.sequence_id, self._clock())
            return () if finish is None else (finish,)
        if isinstance(command, Ping):  # the event that follows every command is the answer
            return ()
        raise TypeError(f"{type(command).__name__} is not for a running worker")

    def _submit(self, command: Submit) -> tuple[Finish, ...]:
        plan = examine(command.token_ids, command.plan, self.limits, emitted_tokens=command.emitted_tokens)
        ids = range(command.sequence_id, command.sequence_id + command.n)
        if isinstance(plan, Problem):
            return tuple(Finish(sequence_id=id, reason=FinishReason.ERROR, problem=plan) for id in ids)
        first, *others = (_sequence(command, plan, index) for index in range(command.n))
        refused = self._scheduler.submit(first, self._clock(), others)
        if plan.constraint is not None and not refused:
            emitted = command.token_ids[len(command.token_ids) - command.emitted_tokens :]
            for sequence_id in ids:
                self._grammars.begin(sequence_id, plan.constraint, emitted)
        return refused


def _prefill_tokens(plan: StepPlan) -> int:
    prompts = plan.slices[plan.decodes :]
    return sum([len(piece.token_ids) for piece in prompts]) if prompts else 0


def _sequence(command: Submit, plan: SamplingPlan, index: int) -> Sequence:
    """Answer `index` of a submission. The prompt's log-probabilities are the first one's to tell."""
    if index:
        plan = dataclasses.replace(plan, seed=plan.seed + index, prompt_logprobs=None)
    return Sequence(
        id=command.sequence_id + index,
        token_ids=list(command.token_ids),
        prompt_length=len(command.token_ids),
        plan=plan,
        arrived_at=command.arrived_at,
        deadline_at=command.deadline_at,
        placement=command.placement,
        emitted_tokens=command.emitted_tokens,
        grammar_pending=plan.constraint is not None,
    )
