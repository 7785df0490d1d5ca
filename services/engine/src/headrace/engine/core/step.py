"""One engine step as data: what is to be computed, why no more than that, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from headrace.engine.core.finish import Finish, Problem
from headrace.engine.core.likelihood import Likelihood, Logprobs
from headrace.engine.core.pacing import Pace
from headrace.engine.core.sampling_plan import SamplingPlan

__all__ = ["Computed", "Hold", "Likelihood", "Logprobs", "SequenceSlice", "StepOutcome", "StepPlan", "is_usual"]


@dataclass(slots=True, kw_only=True)
class SequenceSlice:
    """The tokens of one sequence that one step computes.

    `token_ids` are the new tokens, the first of them at position `start`; keys and values of every position before
    `start` are already in the blocks of `block_table`, which has room for the new ones: position p lives in block
    ``block_table[p // block_size]``, slot ``p % block_size``. `samples` is true when the slice reaches the end of the
    known tokens, so that the token at position ``start + len(token_ids)`` is wanted. The step owns `block_table`
    until it returns; nobody may keep or change it. Nor does anybody change a slice: it is not frozen because there is
    one per sequence and step, and making a frozen one takes three times as long (0.9 us, measured).
    """

    sequence_id: int
    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    samples: bool
    plan: SamplingPlan
    # For penalties, min_tokens and grammars: all tokens known so far, and how many of them are the prompt (tokens that
    # an earlier attempt had already emitted are answer, not prompt). A view of the sequence's own list: read only.
    known_token_ids: Sequence[int] = ()
    prompt_length: int = 0
    # The last of `token_ids` that are guesses, to be verified: none of them is in `known_token_ids`. A slice with
    # guesses samples after the last known token and after every guess that comes true.
    drafted: int = 0


@dataclass(slots=True, kw_only=True)
class Computed:
    """What the backend made of one slice.

    `token_id` is set when the slice samples; `logprobs` when its plan asks for them. `prompt_logprobs` are those of the
    prompt tokens that follow the slice's tokens: entry i belongs to position ``start + i + 1``; empty unless asked for.
    `problem` is set, and nothing else is, when this sequence cannot go on (its logits are not numbers, or nothing may
    be sampled): it ends with ERROR, its neighbours go on. `more` is what follows `token_id` when guesses came true:
    ``more[i]`` was sampled after guess i, which is the token before it. As unchanging as a slice, and as little frozen.
    """

    token_id: int | None = None
    logprobs: Logprobs | None = None
    prompt_logprobs: tuple[Logprobs, ...] = ()
    problem: Problem | None = None
    complete: bool = False  # nothing may follow the token: the sequence ends with STOP
    more: tuple[Computed, ...] = ()


class Hold(Enum):
    """Why the first waiting sequence was not admitted in a step."""

    PREEMPTED = "PREEMPTED"  # this step took blocks away from someone
    SEQUENCES = "SEQUENCES"  # max_num_seqs are running
    TOKENS = "TOKENS"  # the step's token budget is spent, or too small for a prompt that may not be cut
    PACE = "PACE"  # what prompts may take of a step beside running streams is spent
    BLOCKS = "BLOCKS"  # too few free KV blocks
    GRAMMAR = "GRAMMAR"  # its grammar is not ready; those behind it pass
    PREFIX = "PREFIX"  # a running sequence is just computing the prefix it could share; those behind it pass


@dataclass(slots=True, kw_only=True)
class StepPlan:
    """What a step computes, and what was decided on the way. As unchanging as a slice, and as little frozen.

    The first `decodes` of the `slices` are decodes, of one token and perhaps guesses; the others are prefill chunks.
    `copies` are pairs of blocks, (from, to), to copy in this order before the slices are computed. `preempted` and
    `admitted` are sequence ids in the order of the decisions; `hold` is why the first that waits does so, None when
    nobody does; `expired` are sequences whose deadline had passed; `pace` is what prompts were bounded by for the sake
    of running streams, None when there are none, or no prompts, or no pacing.
    """

    slices: tuple[SequenceSlice, ...]
    decodes: int
    copies: tuple[tuple[int, int], ...] = ()
    preempted: tuple[int, ...] = ()
    admitted: tuple[int, ...] = ()
    hold: Hold | None = None
    expired: tuple[Finish, ...] = ()
    pace: Pace | None = None


@dataclass(slots=True, kw_only=True)
class StepOutcome:
    """What a step brought: ``sequence_ids[i]`` emitted ``token_ids[i]``; who ended; logprobs by sequence id.

    A sequence that emitted several tokens comes once for each, in order and without another in between; so do its
    `logprobs`. Of the `drafted` guesses `accepted` became tokens of an answer. As unchanging as a slice, too.
    """

    sequence_ids: Sequence[int]
    token_ids: Sequence[int]
    finishes: tuple[Finish, ...]
    logprobs: tuple[tuple[int, Logprobs], ...] = ()
    drafted: int = 0
    accepted: int = 0


def is_usual(piece: SequenceSlice, result: Computed) -> bool:
    """Whether this is a decode without guesses and its token, with nothing more to be said of either."""
    return (
        len(piece.token_ids) == 1
        and result.token_id is not None
        and not (piece.drafted or result.more or result.complete or result.prompt_logprobs)
        and result.logprobs is None
    )
