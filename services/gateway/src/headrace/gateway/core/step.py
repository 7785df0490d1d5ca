"""One engine step as the gateway sees it, and the checks that keep garbage from a client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step's news: ``slots[i]`` emitted ``token_ids[i]``."""

    number: int
    slots: Sequence[int]
    token_ids: Sequence[int]
    finishes: Sequence[Finish] = ()


def violation(step: Step, *, expected: int, room: Mapping[int, int], vocab_size: int) -> str | None:
    """What in `step` cannot be true, or None.

    `expected` is the number it must have; `room` maps each open slot to the tokens it may still emit. A step is
    believed as a whole or not at all: an engine that gets one column wrong cannot be trusted with the others.
    """
    if step.number != expected:
        return f"step {step.number} came where step {expected} was due"
    if len(step.slots) != len(step.token_ids):
        return f"{len(step.slots)} slots came with {len(step.token_ids)} tokens"
    if len(set(step.slots)) != len(step.slots):
        return "a slot came twice in one step"
    for slot, token_id in zip(step.slots, step.token_ids, strict=True):
        if slot not in room:
            return f"a token came for slot {slot}, which is not open"
        if token_id >= vocab_size:
            return f"token {token_id} is beyond the vocabulary of {vocab_size}"
        if room[slot] < 1:
            return f"slot {slot} went beyond its max_tokens"
    return _finish_violation(step.finishes, room)


def _finish_violation(finishes: Sequence[Finish], room: Mapping[int, int]) -> str | None:
    slots = [finish.slot for finish in finishes]
    if len(set(slots)) != len(slots):
        return "a slot finished twice in one step"
    for finish in finishes:
        if finish.slot not in room:
            return f"slot {finish.slot} finished, which is not open"
        if finish.reason is FinishReason.UNSPECIFIED:
            return f"slot {finish.slot} finished without a reason"
    return None
