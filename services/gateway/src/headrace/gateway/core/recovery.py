"""What to do when an attempt fails: again elsewhere, go on elsewhere, or give up, and why."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from headrace.base.errors import DeadlinePassed, Exhausted, HeadraceError, InvalidRequest, StreamBroken, Unavailable


class Fault(Enum):
    """How an attempt failed."""

    UNREACHABLE = "UNREACHABLE"  # the engine could not be attached
    BROKEN = "BROKEN"  # the stream ended under a running sequence
    STALLED = "STALLED"  # the stream lives, but a running answer gets no tokens
    GARBAGE = "GARBAGE"  # the engine said something that cannot be true
    STALE_EPOCH = "STALE_EPOCH"  # the engine restarted since the router saw it
    QUEUE_FULL = "QUEUE_FULL"  # the engine takes no more
    ENGINE = "ENGINE"  # the engine gave up the sequence by itself
    REQUEST = "REQUEST"  # the engine says that the request is at fault
    DEADLINE = "DEADLINE"  # the engine dropped it because its time had passed


class Loss:
    """One failure, shared by every attempt that it ended: a lost engine costs one retry, whatever it was running.

    Moving its requests adds no load to the fleet, and failing most of them for want of budget would help nobody.
    """

    __slots__ = ("charged",)

    def __init__(self) -> None:
        self.charged = False


class EngineFault(Exception):
    """An attempt failed; `field` and `reason` are the engine's own words, where it had any."""

    def __init__(
        self, fault: Fault, message: str, *, field: str = "", reason: str = "", loss: Loss | None = None
    ) -> None:
        super().__init__(message)
        self.fault = fault
        self.message = message
        self.field = field
        self.reason = reason or fault.value
        self.loss = loss or Loss()

    def again(self) -> EngineFault:
        """The same failure, to be raised at one more attempt; an exception raised twice would grow its traceback."""
        return EngineFault(self.fault, self.message, field=self.field, reason=self.reason, loss=self.loss)


class Action(Enum):
    """What follows a failed attempt."""

    RETRY = "RETRY"  # nothing was emitted: place the prompt again
    MIGRATE = "MIGRATE"  # place prompt and emitted tokens again, for the rest
    GIVE_UP = "GIVE_UP"


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """Where a request stands when an attempt fails; `attempts` counts the failed one."""

    attempts: int
    max_attempts: int
    tokens_emitted: int
    time_left_s: float
    least_time_s: float
    budget_allows: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """The decision and its reason, UPPER_SNAKE."""

    action: Action
    reason: str


NO_TIME_LEFT = "NO_TIME_LEFT"

_FINAL = frozenset({Fault.REQUEST, Fault.DEADLINE})
"""Faults that another engine would find as well."""

SUSPICIOUS = frozenset({Fault.UNREACHABLE, Fault.BROKEN, Fault.STALLED, Fault.STALE_EPOCH})
"""Faults that the engine's next request would very likely meet as well, until the router knows better."""


def recover(fault: Fault, situation: Situation) -> Recovery:
    """Decide what follows `fault`."""
    if fault in _FINAL:
        return Recovery(action=Action.GIVE_UP, reason=fault.value)
    if situation.attempts >= situation.max_attempts:
        return Recovery(action=Action.GIVE_UP, reason="ATTEMPTS_SPENT")
    if situation.time_left_s < situation.least_time_s:
        return Recovery(action=Action.GIVE_UP, reason=NO_TIME_LEFT)
    if not situation.budget_allows:
        return Recovery(action=Action.GIVE_UP, reason="RETRY_BUDGET_SPENT")
    action = Action.MIGRATE if situation.tokens_emitted else Action.RETRY
    return Recovery(action=action, reason=fault.value)


def client_error(fault: EngineFault, *, tokens_emitted: int, retry_after_s: float) -> HeadraceError:
    """What a client hears of the fault its request was given up for."""
    if fault.fault is Fault.DEADLINE:
        return DeadlinePassed("the deadline passed before the answer was complete")
    if tokens_emitted:
        return StreamBroken(
            f"the answer broke off after {tokens_emitted} tokens and could not be continued: {fault.message}",
            tokens_emitted=tokens_emitted,
        )
    if fault.fault is Fault.REQUEST:
        return InvalidRequest(fault.field or "prompt", fault.message, reason=fault.reason)
    if fault.fault is Fault.QUEUE_FULL:
        return Exhausted("every replica's queue is full", reason="QUEUE_FULL", retry_after_s=retry_after_s)
    return Unavailable(f"no replica could answer: {fault.message}", reason="ENGINE_FAILED", retry_after_s=retry_after_s)
