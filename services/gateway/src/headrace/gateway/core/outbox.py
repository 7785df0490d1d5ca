"""Tokens on their way to one client: they wait while it is slow, and leave together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.gateway.core.step import Finish, Likelihoods


@dataclass(slots=True)
class Batch:
    """Everything that had arrived when it was taken: tokens, when each arrived, and the end if it was there.

    `logprobs` has an entry for each token if the answer asks for them, else none.
    """

    token_ids: list[int] = field(default_factory=list)
    arrived_at: list[float] = field(default_factory=list)
    logprobs: list[Likelihoods] = field(default_factory=list)
    finish: Finish | None = None


class Outbox:
    """Pending tokens of one attempt, at most its max_tokens.

    One `take` empties it, so the cost per token falls as the client lags (30 µs a message, 2 µs a token).
    """

    __slots__ = ("_pending",)

    def __init__(self) -> None:
        self._pending: Batch | None = None

    def put(self, token_ids: Sequence[int], now: float, logprobs: Sequence[Likelihoods] = ()) -> None:
        """Add tokens that arrived at `now`; with log-probabilities each time or never."""
        pending, arrived_at = self._pending, [now] * len(token_ids)
        if pending is None:
            self._pending = Batch(list(token_ids), arrived_at, list(logprobs))
        else:
            pending.token_ids.extend(token_ids)
            pending.arrived_at.extend(arrived_at)
            pending.logprobs.extend(logprobs)

    def end(self, finish: Finish) -> None:
        """No token follows."""
        if self._pending is None:
            self._pending = Batch()
        self._pending.finish = finish

    def __bool__(self) -> bool:
        """Whether there is anything to take."""
        return self._pending is not None

    def take(self) -> Batch:
        """Everything pending."""
        batch, self._pending = self._pending or Batch(), None
        return batch
