"""One sequence from arrival to finish: its tokens, its blocks, and when things happened to it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum, auto

from headrace.engine.core.finish import Finish, FinishReason, Problem
from headrace.engine.core.sampling_plan import SamplingPlan


class State(Enum):
    """Where a sequence is: WAITING holds no blocks (new or preempted), RUNNING holds them, FINISHED is gone."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """A sequence in the engine. `token_ids` is the prompt, then the output; the scheduler alone changes it.

    One rule covers prefill, chunks, decode and recompute: `num_computed_tokens` chases ``len(token_ids)``.
    Instants are monotonic seconds given by the caller.
    """

    id: int
    token_ids: list[int]
    prompt_length: int
    plan: SamplingPlan
    arrived_at: float
    deadline_at: float = math.inf
    state: State = State.WAITING
    num_computed_tokens: int = 0
    block_table: list[int] = field(default_factory=list)
    prefill_started_at: float | None = None
    first_token_at: float | None = None
    prefill_chunks: int = 0
    preemptions: int = 0

    @property
    def remaining_tokens(self) -> int:
        """Known tokens still to compute."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def decoding(self) -> bool:
        """All that is left to compute is the newest output token."""
        return self.num_computed_tokens >= self.prompt_length and self.remaining_tokens == 1

    @property
    def longest(self) -> int:
        """The most tokens it can come to, prompt and answer."""
        return self.prompt_length + self.plan.max_tokens

    def append(self, token_id: int, eos_ids: frozenset[int], now: float) -> FinishReason | None:
        """Add an output token; the reason if it is the last one, which then still belongs to the answer."""
        self.token_ids.append(token_id)
        if self.first_token_at is None:
            self.first_token_at = now
        if token_id in self.plan.stop_token_ids or (token_id in eos_ids and not self.plan.ignore_eos):
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.token_ids) >= self.longest else None

    def finish(self, reason: FinishReason, now: float, problem: Problem | None = None) -> Finish:
        """Its finish record at `now`."""
        started = now if self.prefill_started_at is None else self.prefill_started_at
        first = now if self.first_token_at is None else self.first_token_at
        return Finish(
            sequence_id=self.id,
            reason=reason,
            problem=problem,
            queue_ms=(started - self.arrived_at) * 1000,
            prefill_ms=(first - started) * 1000,
            prefill_chunks=self.prefill_chunks,
            preemptions=self.preemptions,
        )
