"""The account of one request, as the request's way notes into it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType

from headrace.base.errors import HeadraceError
from headrace.gateway.core.account import Slot

OK, CANCELLED, INTERNAL = "OK", "CANCELLED", "INTERNAL"


class Account:
    """Notes of one request; one record comes of it, whatever happens.

    Every method is a few stores into memory that outlives the process: none waits, none fails, and what was noted
    before a token was handed over is in the record even if the process is killed while handing it over. Notes after
    the end do not count. As a context manager it closes itself, by how the block ends.
    """

    __slots__ = ("_closed", "_done", "_slot", "_where")

    def __init__(self, slot: Slot, done: Callable[[Slot], None]) -> None:
        self._slot = slot
        self._done = done
        self._where: dict[int, int | None] = {}
        self._closed = False

    def prompt(self, tokens: int) -> None:
        """The rendered prompt's length; noted once an engine is to see it."""
        if not self._closed:
            self._slot.prompt(tokens)

    def cached(self, tokens: int) -> None:
        """How much of it the first attempt found in the prefix cache."""
        if not self._closed:
            self._slot.cached(tokens)

    def attempt(self, number: int, engine_id: str, epoch: int) -> None:
        """An attempt begins; its number is its own among the request's."""
        if not self._closed and number not in self._where:
            self._where[number] = self._slot.attempt(number, engine_id, epoch)

    def tokens(self, attempt: int, count: int) -> None:
        """The attempt emitted `count` more tokens; note it before they go to the client."""
        if self._closed:
            return
        where = self._where.get(attempt)
        self._slot.add_tokens(where, count)
        if where is None and (note := self._slot.extra.get(attempt)) is not None:
            self._slot.extra[attempt] = replace(note, tokens=note.tokens + count)

    def attempt_ended(self, number: int, outcome: str) -> None:
        """How an attempt ended: OK, CANCELLED, or the fault."""
        if self._closed or number not in self._where:
            return
        where = self._where[number]
        if where is not None:
            self._slot.attempt_ended(where, outcome)
        else:
            self._slot.extra[number] = replace(self._slot.extra[number], outcome=outcome)

    def close(self, outcome: str, output_tokens: int | None = None) -> None:
        """The request ended: OK, CANCELLED, or the error's reason. Only the first call counts.

        `output_tokens` is what the answer had where that is not all that was emitted: engines run past a stop text.
        """
        if self._closed:
            return
        self._closed = True
        if output_tokens is not None:
            self._slot.output(output_tokens)
        self._slot.close(outcome, time.time_ns())
        self._done(self._slot)

    def __enter__(self) -> Account:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close(outcome_of(error))


def outcome_of(error: BaseException | None) -> str:
    """How a request ended that raised `error`, or nothing."""
    if error is None:
        return OK
    if isinstance(error, HeadraceError):
        return error.reason
    return CANCELLED if isinstance(error, (asyncio.CancelledError, GeneratorExit)) else INTERNAL
