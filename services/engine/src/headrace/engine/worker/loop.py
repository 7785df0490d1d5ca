"""The worker's step loop: drain commands, schedule, compute, account, report."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

from headrace.engine.core.finish import Finish, FinishReason, Problem
from headrace.engine.core.load import Rates, StepRecord, load, measured, smallest_chunk
from headrace.engine.core.request import Sequence
from headrace.engine.core.sampling_plan import SamplingPlan
from headrace.engine.core.scheduler import Scheduler
from headrace.engine.core.step import StepOutcome, StepPlan
from headrace.engine.core.submission import ModelLimits, examine
from headrace.engine.worker.backend import Backend
from headrace.engine.worker.messages import Abort, Command, StepEvent, Submit

_NOTHING = StepOutcome(sequence_ids=(), token_ids=(), finishes=())
_WARM_UP_PROMPT = 256
_WARM_UP_ANSWER = 8


class Shell(Protocol):
    """Where commands come from and events go to."""

    def send(self, report: StepEvent, /) -> None:
        """Deliver one event."""

    def receive(self, wait_s: float, /) -> list[Command]:
        """Every command that has arrived, after waiting up to `wait_s` for the first."""


class StepLoop:
    """One scheduler and one backend, and the rates measured while they work."""

    def __init__(
        self, scheduler: Scheduler, backend: Backend, limits: ModelLimits, *, clock: Callable[[], float]
    ) -> None:
        self.rates = Rates()
        self.backend = backend
        self.limits = limits
        self._scheduler = scheduler
        self._clock = clock
        self._smallest_chunk = smallest_chunk(scheduler.limits.max_num_batched_tokens)
        # Blocks that a fault took out of use: they belong to no sequence.
        self.occupied: list[int] = []

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

    def serve(self, shell: Shell) -> None:
        """Work until `shell` raises; waits for commands only when there is nothing to compute."""
        wait_s = math.inf
        while True:
            commands = shell.receive(wait_s)
            finishes = [finish for command in commands if (finish := self._apply(command)) is not None]
            plan, outcome = self.step()
            if commands or plan.slices or plan.expired:
                shell.send(
                    StepEvent(
                        sequence_ids=outcome.sequence_ids,
                        token_ids=outcome.token_ids,
                        finishes=(*finishes, *plan.expired, *outcome.finishes),
                        load=load(self._scheduler, self.rates),
                        hold=plan.hold,
                        preemptions=len(plan.preempted),
                    )
                )
            wait_s = 0.0 if plan.slices else self._idle_s()

    def step(self) -> tuple[StepPlan, StepOutcome]:
        """Decide a step, compute it if it holds anything, and measure it."""
        started_at = self._clock()
        plan = self._scheduler.schedule(started_at)
        if not plan.slices:
            return plan, _NOTHING
        sampled = self.backend.execute(plan.slices)
        ended_at = self._clock()
        outcome = self._scheduler.update(plan, sampled, ended_at)
        record = StepRecord(
            duration_s=ended_at - started_at,
            decodes=plan.decodes,
            prefill_tokens=sum(len(piece.token_ids) for piece in plan.slices[plan.decodes :]),
        )
        self.rates = measured(self.rates, record, smallest_chunk=self._smallest_chunk)
        return plan, outcome

    def _idle_s(self) -> float:
        """How long nothing but a command or a deadline can bring work; checks the block accounts on the way."""
        self._scheduler.check([self.occupied])
        return self._scheduler.next_deadline() - self._clock()

    def _apply(self, command: Command) -> Finish | None:
        if isinstance(command, Submit):
            return self._submit(command)
        if isinstance(command, Abort):
            return self._scheduler.abort(command.sequence_id, self._clock())
        raise TypeError(f"{type(command).__name__} is not for a running worker")

    def _submit(self, command: Submit) -> Finish | None:
        plan = examine(command.token_ids, command.plan, self.limits)
        if isinstance(plan, Problem):
            return Finish(sequence_id=command.sequence_id, reason=FinishReason.ERROR, problem=plan)
        sequence = Sequence(
            id=command.sequence_id,
            token_ids=list(command.token_ids),
            prompt_length=len(command.token_ids),
            plan=plan,
            arrived_at=command.arrived_at,
            deadline_at=command.deadline_at,
        )
        return self._scheduler.submit(sequence, self._clock())
