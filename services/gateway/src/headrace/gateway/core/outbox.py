"""Tokens on their way to one client: they wait while it is slow, and leave together."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.gateway.core.step import Finish


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Everything that had arrived when it was taken: tokens, when each arrived, and the end if it was there."""

    token_ids: tuple[int, ...]
    arrived_at: tuple[float, ...]
    finish: Finish | None = None


@dataclass(slots=True)
class Outbox:
    """Pending tokens of one attempt, at most its max_tokens.

    One `take` empties it, so the cost per token falls as the client lags (30 µs a message, 2 µs a token).
    """

    _token_ids: list[int] = field(default_factory=list)
    _arrived_at: list[float] = field(default_factory=list)
    _finish: Finish | None = None

    def put(self, token_id: int, now: float) -> None:
        """Add a token that arrived at `now`."""
        self._token_ids.append(token_id)
        self._arrived_at.append(now)

    def end(self, finish: Finish) -> None:
        """No token follows."""
        self._finish = finish

    def __bool__(self) -> bool:
        """Whether there is anything to take."""
        return bool(self._token_ids) or self._finish is not None

    def take(self) -> Batch:
        """Everything pending."""
        batch = Batch(token_ids=tuple(self._token_ids), arrived_at=tuple(self._arrived_at), finish=self._finish)
        self._token_ids, self._arrived_at, self._finish = [], [], None
        return batch
