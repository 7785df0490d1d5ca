"""Sequences submitted together: one booking and one span, given back by the last of them to be left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from opentelemetry.trace import Span, StatusCode

from headrace.gateway.adapters.sequence import AttachedSequence
from headrace.gateway.core.life import Life
from headrace.gateway.core.recovery import EngineFault
from headrace.gateway.core.step import Finish

OK, CANCELLED = "OK", "CANCELLED"


class Tally(Protocol):
    """Where the tokens of one attempt are counted for good."""

    def attempt(self, number: int, engine_id: str, epoch: int) -> None:
        """An attempt begins."""
        ...

    def tokens(self, attempt: int, count: int) -> None:
        """The engine sent `count` more."""
        ...

    def cached(self, tokens: int) -> None:
        """The engine had that much of the prompt cached."""
        ...

    def attempt_ended(self, attempt: int, outcome: str) -> None:
        """The engine sends nothing more for it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """How an attempt went: `outcome` is OK, CANCELLED or a fault's name; instants are monotonic seconds."""

    outcome: str
    placed_at: float
    first_token_at: float | None
    output_tokens: int
    cached_tokens: int | None


@dataclass(slots=True, kw_only=True, eq=False)
class Submission:
    """One placement in use. `blame` remembers an engine's fault, `close` gives the booking back with a report.

    Nothing here waits, so all of it happens even while the caller is being cancelled. It ends twice: for its caller
    when the last sequence is left, and for the `tally` when the engine has confirmed the end of the last one; tokens
    that were on their way when a client went are counted like all others.
    """

    number: int
    life: Life
    span: Span
    blame: Callable[[EngineFault], None]
    close: Callable[[Report], None]
    tally: Tally
    open: int
    placed_at: float
    _outcome: str = OK
    _engine_said: str = OK
    _first_token_at: float | None = None
    _received: int = 0
    _cached_tokens: int | None = None
    _sending: int = field(init=False)

    def __post_init__(self) -> None:
        self._sending = self.open

    def received(self, tokens: int, now: float) -> None:
        """Tokens arrived for one of the sequences."""
        self._received += tokens
        if self._first_token_at is None:
            self._first_token_at = now
        self.tally.tokens(self.number, tokens)

    def ended(self, finish: Finish | None, fault: EngineFault | None) -> None:
        """The engine has ended one of the sequences, or is lost."""
        if self._engine_said == OK:
            self._engine_said = fault.fault.value if fault else (finish.error_reason if finish else "") or OK
        if finish is not None and self._cached_tokens is None and not finish.error_reason:
            self._cached_tokens = finish.cached_tokens
            self.tally.cached(finish.cached_tokens)
        self._sending -= 1
        if not self._sending:
            self.tally.attempt_ended(self.number, self._engine_said)

    def fail(self, fault: EngineFault) -> None:
        """The engine failed one of the sequences."""
        self._note(fault.fault.value)
        self.span.set_attribute("error.type", fault.fault.value)
        self.span.set_status(StatusCode.ERROR, fault.fault.value)
        self.blame(fault)

    def leave(self, outcome: str) -> None:
        """One sequence fewer is followed."""
        self._note(outcome)
        self.open -= 1
        if not self.open:
            self.end()

    def end(self) -> None:
        """Give everything back."""
        self.span.end()
        report = Report(
            outcome=self._outcome,
            placed_at=self.placed_at,
            first_token_at=self._first_token_at,
            output_tokens=self._received,
            cached_tokens=self._cached_tokens,
        )
        self.close(report)

    def never_began(self) -> None:
        """The engine could not be given the sequences: there is nothing to wait for."""
        self.tally.attempt_ended(self.number, self._outcome)
        self.end()

    def _note(self, outcome: str) -> None:
        """Of several outcomes the first that is not good counts."""
        if self._outcome == OK:
            self._outcome = outcome


@dataclass(slots=True, kw_only=True, eq=False)
class Attempt:
    """One answer's sequence under way at an engine; whoever has it must leave it."""

    sequence: AttachedSequence
    emitted_before: int
    submission: Submission
    _left: bool = False

    @property
    def engine_id(self) -> str:
        """The engine that makes it."""
        return self.submission.life.engine_id

    @contextmanager
    def held(self) -> Iterator[None]:
        """Leave it at the block's end; an EngineFault raised in the block is the engine's."""
        try:
            yield
            self._leave(OK)
        except EngineFault as fault:
            self.submission.fail(fault)
            raise
        finally:
            self.leave()

    def leave(self) -> None:
        """Cancel the sequence unless it has ended; once."""
        self._leave(CANCELLED)

    def _leave(self, outcome: str) -> None:
        if not self._left:
            self._left = True
            self.sequence.cancel()
            self.submission.leave(outcome)
