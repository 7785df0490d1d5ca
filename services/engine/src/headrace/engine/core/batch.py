"""One step while it is put together: decodes, then as much of the prompts as there is room for."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from headrace.engine.core.pacing import Pace, Pacer
from headrace.engine.core.placement import Priority
from headrace.engine.core.request import Sequence
from headrace.engine.core.step import Hold, SequenceSlice


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
                f"max_num_batched_tokens={self.max_num_batched_tokens}: "
                "a step computes at least one token of every running sequence"
            )


class Batch:
    """Slices under a budget of tokens; add all decodes, call `pace`, then add prompts.

    Prompts are paced for the sake of streams that were there first: those of their own class or a higher one whose
    first token came before the prompt did. Requests that came together share the machine as they always did.
    """

    def __init__(self, max_tokens: int) -> None:
        self.slices: list[SequenceSlice] = []
        self.copies: list[tuple[int, int]] = []
        self.decodes = 0
        self.budget = max_tokens
        self.paced: Pace | None = None
        self._prefill_tokens = 0
        self._streams: list[Sequence] = []
        # The earliest first token among the decodes of each class, once prompts are paced.
        self._rhythms: dict[Priority, float] = {}

    def decode(self, sequence: Sequence) -> None:
        """Add the one token that a decoding sequence lacks."""
        self.budget -= 1
        self.slices.append(decode_slice(sequence))
        self.decodes += 1
        self._streams.append(sequence)

    def pace(self, pacer: Pacer, prompts: int) -> None:
        """Bound what follows by time, too; `prompts` sequences want their prompt computed, now or soon."""
        if self.decodes and prompts:
            self._rhythms = _rhythms(self._streams)
            self.paced = pacer.pace(decodes=self.decodes, prompts=prompts, most=self.budget)

    def room(self, sequence: Sequence) -> int:
        """How many tokens of this sequence's prompt may be added."""
        if self.paced is None or not self._gives_way(sequence):
            return self.budget
        return min(self.budget, max(0, self.paced.tokens - self._prefill_tokens))

    def hold(self) -> Hold:
        """What a sequence without room waits for."""
        return Hold.PACE if self.budget else Hold.TOKENS

    def prefill(self, sequence: Sequence) -> None:
        """Add as much of a sequence's prompt as there is room for, if there is any."""
        tokens = min(sequence.remaining_tokens, self.room(sequence))
        if tokens:
            self._add(sequence, tokens)
            self._prefill_tokens += tokens
            sequence.prefill_chunks += 1

    def _gives_way(self, sequence: Sequence) -> bool:
        own = sequence.placement.priority
        return any(began < sequence.arrived_at for priority, began in self._rhythms.items() if priority >= own)

    def _add(self, sequence: Sequence, tokens: int) -> None:
        start = sequence.num_computed_tokens
        self.budget -= tokens
        self.slices.append(
            SequenceSlice(
                sequence_id=sequence.id,
                token_ids=sequence.token_ids[start : start + tokens],
                start=start,
                block_table=sequence.block_table,
                samples=start + tokens == len(sequence.token_ids),
                plan=sequence.plan,
                known_token_ids=sequence.token_ids,
                prompt_length=sequence.prompt_length - sequence.emitted_tokens,
            )
        )


def decode_slice(sequence: Sequence) -> SequenceSlice:
    """The one token that a decoding sequence lacks."""
    known = sequence.token_ids
    return SequenceSlice(
        sequence_id=sequence.id,
        token_ids=known[-1:],
        start=sequence.num_computed_tokens,
        block_table=sequence.block_table,
        samples=True,
        plan=sequence.plan,
        known_token_ids=known,
        prompt_length=sequence.prompt_length - sequence.emitted_tokens,
    )


def _rhythms(streams: Iterable[Sequence]) -> dict[Priority, float]:
    rhythms: dict[Priority, float] = {}
    for sequence in streams:
        if sequence.first_token_at is not None:
            priority = sequence.placement.priority
            rhythms[priority] = min(rhythms.get(priority, math.inf), sequence.first_token_at)
    return rhythms
