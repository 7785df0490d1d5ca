"""Sequences submitted together: one booking and one span, given back by the last of them to be left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from opentelemetry.trace import Span, StatusCode

from headrace.gateway.adapters.sequence import AttachedSequence
from headrace.gateway.core.recovery import EngineFault

OK, CANCELLED = "OK", "CANCELLED"


@dataclass(slots=True, kw_only=True, eq=False)
class Submission:
    """One placement in use. `blame` remembers an engine's fault, `close` gives the booking back, named by the outcome.

    Nothing here waits, so all of it happens even while the caller is being cancelled.
    """

    engine_id: str
    span: Span
    blame: Callable[[EngineFault], None]
    close: Callable[[str], None]
    open: int
    _outcome: str = OK

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
        self.close(self._outcome)

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
        return self.submission.engine_id

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
