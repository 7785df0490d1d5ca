"""Guesses added to a step, from the tokens and blocks that it has to spare."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from headrace.engine.core.kv_memory import KvMemory
from headrace.engine.core.ngram import NgramIndex, Speculation
from headrace.engine.core.request import Sequence
from headrace.engine.core.step import SequenceSlice


class Guessing:
    """Guesses for the decoding sequences of one engine; nobody waits, shrinks or gives way for them.

    The last `reserve` free blocks are left for admissions and decodes.
    """

    def __init__(self, speculation: Speculation, memory: KvMemory, reserve: int) -> None:
        self._speculation = speculation
        self._memory = memory
        self._reserve = reserve

    def extend(
        self, slices: list[SequenceSlice], decodes: int, sequences: Mapping[int, Sequence], *, running: int, budget: int
    ) -> None:
        """Add up to `budget` guesses, with their blocks, to the first `decodes` of a step's slices, in order.

        `running` sequences run, in this step or not; `sequences` has those of the slices by id.
        """
        if running > self._speculation.most_sequences:
            return
        for at in range(decodes):
            sequence = sequences[slices[at].sequence_id]
            guesses = self._guesses(sequence, budget)
            if guesses:
                self._memory.extend(sequence, len(sequence.token_ids) + len(guesses))
                token_ids = [*slices[at].token_ids, *guesses]
                slices[at] = dataclasses.replace(slices[at], token_ids=token_ids, drafted=len(guesses))
                budget -= len(guesses)

    def _guesses(self, sequence: Sequence, budget: int) -> list[int]:
        """At what follows a decoding sequence: only as many as may still be emitted, and as budget and blocks hold.

        A grammar would have to be asked, and taken back, for every guess: constrained sequences have none.
        """
        if sequence.plan.constraint is not None:
            return []
        speculation, pool = self._speculation, self._memory.pool
        known = len(sequence.token_ids)
        spare = max(0, pool.free_blocks - self._reserve)
        room = (len(sequence.block_table) + spare) * pool.block_size - known
        count = min(speculation.tokens, sequence.trusted_guesses, budget, room, sequence.longest - known - 1)
        if count < 1:
            return []
        if sequence.ngrams is None:
            sequence.ngrams = NgramIndex(shortest=speculation.shortest, longest=speculation.longest)
        return sequence.ngrams.propose(sequence.token_ids, count)
