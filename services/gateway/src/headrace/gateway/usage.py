"""What one request uses: noted where it happens, settled once everything about it has ended.

A request ends for its client when the last message has left, or when the client has. What it costs is known a moment
later: when the engines have confirmed the end of its sequences, with the tokens that were still on their way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from headrace.gateway.core.fair_queue import Ticket
from headrace.gateway.ledger.account import OK, Account, outcome_of
from headrace.gateway.queue import RequestQueue
from headrace.gateway.quota import Reservation

_CONFIRM_S = 2.0
"""How long a tenant's limits wait for engines to confirm the end. One that is stuck must not lock the tenant out."""


class Usage:
    """One request's account, reservation and share of the queue. Nothing here waits or fails."""

    def __init__(
        self, *, account: Account, reservation: Reservation, queue: RequestQueue, ticket: Ticket, prompt_tokens: int
    ) -> None:
        self._account = account
        self._reservation = reservation
        self._queue = queue
        self._ticket = ticket
        self._prompt_tokens = prompt_tokens
        self._attempts = 0
        self._sending = 0
        self._received = 0
        self._cached_noted = False
        self._answered: int | None = None
        self._outcome: str | None = None

    @contextmanager
    def request(self) -> Iterator[Usage]:
        """The request, for its client; its end is noted by how the block ends."""
        try:
            yield self
        except BaseException as error:
            self._end(outcome_of(error))
            raise
        self._end(OK)

    def answered(self, tokens: int) -> None:
        """The whole answer has `tokens`; what engines sent beyond a stop text is not the client's to pay."""
        self._answered = tokens

    def attempt(self, number: int, engine_id: str, epoch: int) -> None:
        """An engine is to see the prompt."""
        if not self._attempts:
            self._account.prompt(self._prompt_tokens)
        self._attempts += 1
        self._sending += 1
        self._account.attempt(number, engine_id, epoch)
        self._queue.note_taken(self._ticket)

    def tokens(self, attempt: int, count: int) -> None:
        """An engine sent `count` more."""
        self._received += count
        self._account.tokens(attempt, count)
        self._queue.charge(self._ticket, output_tokens=count)

    def cached(self, tokens: int) -> None:
        """What the first engine that said so had of the prompt."""
        if not self._cached_noted:
            self._cached_noted = True
            self._account.cached(min(tokens, self._prompt_tokens))
            self._queue.charge(self._ticket, cached_tokens=min(tokens, self._prompt_tokens))

    def attempt_ended(self, attempt: int, outcome: str) -> None:
        """An engine sends nothing more for it."""
        self._account.attempt_ended(attempt, outcome)
        self._sending -= 1
        self._queue.note_room(self._ticket)
        self._settle()

    def _end(self, outcome: str) -> None:
        self._outcome = outcome
        self._settle()
        if self._sending:
            asyncio.get_running_loop().call_later(_CONFIRM_S, self._give_back)

    def _settle(self) -> None:
        if self._outcome is None or self._sending:
            return
        self._account.close(self._outcome, self._output)
        self._give_back()

    def _give_back(self) -> None:
        """Settle the reservation at what is known by now; the first call counts."""
        if self._attempts:
            self._reservation.settle(self._prompt_tokens + self._output)
        else:
            self._reservation.void()

    @property
    def _output(self) -> int:
        return self._received if self._answered is None else self._answered
