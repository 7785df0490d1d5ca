"""One engine step as the gateway sees it, and the checks that keep garbage from a client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby
from operator import itemgetter
from typing import Any

Likelihoods = Any
"""An engine's message about one position, passed on as it came; nothing here looks into it."""


class FinishReason(Enum):
    """Why a sequence ended, by the protocol's names."""

    STOP = "STOP"
    LENGTH = "LENGTH"
    CANCELLED = "CANCELLED"
    ERROR = "ERROR"
    UNSPECIFIED = "UNSPECIFIED"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """An engine's finish record of one sequence; the error parts are empty unless it failed or was cancelled."""

    slot: int
    reason: FinishReason
    error_reason: str = ""
    error_message: str = ""
    error_field: str = ""
    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    cached_tokens: int = 0
    prompt_logprobs: Sequence[Likelihoods] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotLogprobs:
    """One slot's log-probabilities: of `token_id`, which must be the token it emitted; `finite` if all of them are."""

    slot: int
    token_id: int
    finite: bool
    content: Likelihoods


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step's news: ``slots[i]`` emitted ``token_ids[i]``; `logprobs` of those that asked, in the same order.

    A slot that emitted several tokens comes once for each, in a row.
    """

    number: int
    slots: Sequence[int]
    token_ids: Sequence[int]
    finishes: Sequence[Finish] = ()
    logprobs: Sequence[SlotLogprobs] = ()

    def rows(self) -> Sequence[tuple[int, Sequence[int]]]:
        """Each slot with its tokens, in order; of columns of equal length."""
        if len(set(self.slots)) == len(self.slots):  # nearly always, and 3 times as fast
            return [(slot, (token_id,)) for slot, token_id in zip(self.slots, self.token_ids, strict=True)]
        columns = zip(self.slots, self.token_ids, strict=True)
        return [(slot, [token_id for _, token_id in row]) for slot, row in groupby(columns, key=itemgetter(0))]


@dataclass(slots=True, kw_only=True)
class OpenSlot:
    """What an open slot may still send: `room` tokens, with log-probabilities if it asked for them."""

    room: int
    logprobs: bool = False


def violation(step: Step, *, expected: int, open_slots: Mapping[int, OpenSlot], vocab_size: int) -> str | None:
    """What in `step` cannot be true, or None; `expected` is the number it must have.

    A step is believed as a whole or not at all: an engine that gets one column wrong cannot be trusted with the others.
    """
    if step.number != expected:
        return f"step {step.number} came where step {expected} was due"
    if len(step.slots) != len(step.token_ids):
        return f"{len(step.slots)} slots came with {len(step.token_ids)} tokens"
    if max(step.token_ids, default=0) >= vocab_size:
        beyond = next(token_id for token_id in step.token_ids if token_id >= vocab_size)
        return f"token {beyond} is beyond the vocabulary of {vocab_size}"
    return (
        _slots_violation(step, open_slots)
        or _logprobs_violation(step, open_slots)
        or _finish_violation(step.finishes, open_slots)
    )


def _slots_violation(step: Step, open_slots: Mapping[int, OpenSlot]) -> str | None:
    seen: set[int] = set()
    for slot, token_ids in step.rows():
        if slot not in open_slots:
            return f"a token came for slot {slot}, which is not open"
        if slot in seen:
            return f"the tokens of slot {slot} came apart"
        seen.add(slot)
        if open_slots[slot].room < len(token_ids):
            return f"slot {slot} went beyond its max_tokens"
    return None


def _logprobs_violation(step: Step, open_slots: Mapping[int, OpenSlot]) -> str | None:
    asked = [(s, t) for s, t in zip(step.slots, step.token_ids, strict=True) if open_slots[s].logprobs]
    if [(entry.slot, entry.token_id) for entry in step.logprobs] != asked:
        return "the log-probabilities are not those of the tokens whose slots asked for them"
    if not all(entry.finite for entry in step.logprobs):
        return "a log-probability is not a number"
    return None


def _finish_violation(finishes: Sequence[Finish], open_slots: Mapping[int, OpenSlot]) -> str | None:
    slots = [finish.slot for finish in finishes]
    if len(set(slots)) != len(slots):
        return "a slot finished twice in one step"
    for finish in finishes:
        if finish.slot not in open_slots:
            return f"slot {finish.slot} finished, which is not open"
        if finish.reason is FinishReason.UNSPECIFIED:
            return f"slot {finish.slot} finished without a reason"
    return None
