"""One engine step as data: what is to be computed, why no more than that, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from headrace.engine.core.finish import Finish
from headrace.engine.core.sampling_plan import SamplingPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSlice:
    """The tokens of one sequence that one step computes.

    `token_ids` are the new tokens, the first of them at position `start`; keys and values of every position before
    `start` are already in the blocks of `block_table`, which has room for the new ones: position p lives in block
    ``block_table[p // block_size]``, slot ``p % block_size``. `samples` is true when the slice reaches the end of the
    known tokens, so that the token at position ``start + len(token_ids)`` is wanted. The step owns `block_table`
    until it returns; nobody may keep or change it.
    """

    sequence_id: int
    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    samples: bool
    plan: SamplingPlan


class Hold(Enum):
    """Why the first waiting sequence was not admitted in a step."""

    PREEMPTED = "PREEMPTED"  # this step took blocks away from someone
    SEQUENCES = "SEQUENCES"  # max_num_seqs are running
    TOKENS = "TOKENS"  # the step's token budget is spent, or too small for a prompt that may not be cut
    BLOCKS = "BLOCKS"  # too few free KV blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What a step computes, and what was decided on the way.

    The first `decodes` of the `slices` are decodes of one token each, the others are prefill chunks. `preempted` and
    `admitted` are sequence ids in the order of the decisions; `hold` is why the queue's head still waits, None when
    nobody does; `expired` are sequences whose deadline had passed.
    """

    slices: tuple[SequenceSlice, ...]
    decodes: int
    preempted: tuple[int, ...] = ()
    admitted: tuple[int, ...] = ()
    hold: Hold | None = None
    expired: tuple[Finish, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """What a step brought: ``sequence_ids[i]`` emitted ``token_ids[i]``, and who ended."""

    sequence_ids: Sequence[int]
    token_ids: Sequence[int]
    finishes: tuple[Finish, ...]
