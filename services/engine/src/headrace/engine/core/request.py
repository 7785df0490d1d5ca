"""One sequence from arrival to finish: its tokens, its blocks, and when things happened to it."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import Enum, auto

from headrace.engine.core.finish import Finish, FinishReason, Problem
from headrace.engine.core.likelihood import Logprobs
from headrace.engine.core.ngram import NgramIndex
from headrace.engine.core.placement import USUAL, Placement
from headrace.engine.core.sampling_plan import SamplingPlan


class State(Enum):
    """Where a sequence is: WAITING holds no blocks (new or preempted), RUNNING holds them, FINISHED is gone.

    WAITING_FOR_GRAMMAR waits for its grammar first. ATTACHED is an answer of a request with several: it waits, without
    a place of its own, for the answer that computes their prompt.
    """

    WAITING = auto()
    WAITING_FOR_GRAMMAR = auto()
    ATTACHED = auto()
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
    placement: Placement = USUAL
    emitted_tokens: int = 0  # at the prompt's end: an earlier attempt's part of the answer
    grammar_pending: bool = False
    # The scheduler's: its place in the order of service, the answers attached to it, and whom it is attached to.
    rank: tuple[int, int, int] = (0, 0, 0)
    followers: list[Sequence] = field(default_factory=list)
    leader: Sequence | None = None
    state: State = State.WAITING
    num_computed_tokens: int = 0
    forked: bool = False  # it shares another's prompt, and lacks the logits of the prompt's last token only
    ngrams: NgramIndex | None = None  # made when guesses are first asked for
    trusted_guesses: int = 1  # how many are worth computing, as the newest ones fared
    # The memory's: its blocks; the hash chain of its tokens, root first; how many blocks of it are in the prefix cache;
    # how many it has announced to compute; the hash that somebody else is computing for it.
    block_table: array[int] = field(default_factory=lambda: array("i"))  # as the kernels want it: copied in each step
    prefix: list[bytes] = field(default_factory=list)
    stored_blocks: int = 0
    announced_blocks: int = 0
    awaited_hash: bytes = b""
    # For the finish record.
    prefill_started_at: float | None = None
    first_token_at: float | None = None
    newest_token_at: float = 0.0
    later_ms: list[float] = field(default_factory=list)
    prefill_chunks: int = 0
    preemptions: int = 0
    cached_tokens: int = 0
    prompt_logprobs: list[Logprobs] = field(default_factory=list)

    @property
    def remaining_tokens(self) -> int:
        """Known tokens still to compute."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def decoding(self) -> bool:
        """One token is left to compute: the newest output token, or for a forked sequence the prompt's last."""
        computed = self.num_computed_tokens  # asked of every sequence in every step: no call within the call
        return len(self.token_ids) - computed == 1 and (computed >= self.prompt_length or self.forked)

    @property
    def longest(self) -> int:
        """The most tokens it can come to, prompt and answer."""
        return self.prompt_length + self.plan.max_tokens

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether prompt positions must still be computed for their log-probabilities, cached or not."""
        known = len(self.prompt_logprobs) + 1
        return self.plan.prompt_logprobs is not None and known < self.prompt_length - self.emitted_tokens

    def note_guesses(self, drafted: int, accepted: int) -> None:
        """Trust twice as many after a step in which all came true, else one more than did.

        Wrong guesses are not free: four of them lengthen a step by 23 % for one sequence, by 69 % in a batch of four.
        """
        self.trusted_guesses = 2 * drafted if accepted == drafted else accepted + 1

    def collect(self, start: int, logprobs: Seq[Logprobs]) -> None:
        """Add a slice's prompt log-probabilities: entry i belongs to position ``start + i + 1``.

        After a preemption positions come again; they are the same and are dropped.
        """
        self.prompt_logprobs += logprobs[max(0, len(self.prompt_logprobs) - start) :]

    def append(self, token_id: int, eos_ids: frozenset[int], now: float) -> FinishReason | None:
        """Add an output token; the reason if it is the last one, which then still belongs to the answer."""
        tokens, plan = self.token_ids, self.plan
        tokens.append(token_id)
        if self.first_token_at is None:
            self.first_token_at = now
        else:
            self.later_ms.append((now - self.newest_token_at) * 1000)
        self.newest_token_at = now
        if token_id in plan.stop_token_ids or (token_id in eos_ids and not plan.ignore_eos):
            return FinishReason.STOP
        return FinishReason.LENGTH if len(tokens) - self.prompt_length >= plan.max_tokens else None

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
            later_ms=tuple(self.later_ms),
            prefill_chunks=self.prefill_chunks,
            preemptions=self.preemptions,
            cached_tokens=self.cached_tokens,
            prompt_logprobs=tuple(self.prompt_logprobs),
        )
