"""How far one request has come, over all its attempts, and where its time went."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.gateway.core.life import Life
from headrace.gateway.core.step import Finish, Likelihoods


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Where the time of one request went, in milliseconds; see `Timings` of the protocol."""

    queue_ms: float
    prefill_ms: float
    first_token_ms: float
    inter_token_ms: tuple[float, ...]
    total_ms: float


@dataclass(slots=True, kw_only=True)
class Trail:
    """What the answers of one request share: how many attempts were made for any of them, and who failed them."""

    attempts: int = 0
    excluded: set[Life] = field(default_factory=set)

    def next_attempt(self) -> int:
        """Count an attempt and return its number, from 1: no two attempts of a request have the same."""
        self.attempts += 1
        return self.attempts


@dataclass(slots=True, kw_only=True)
class Progress:
    """One answer on its way: tokens emitted so far, attempts made, engines that failed it. Times in seconds.

    `index` tells it from the request's other answers. `place_wait_left_s` is how long it may yet wait for a router to
    have a replica, in all.
    """

    prompt_ids: tuple[int, ...]
    max_tokens: int
    admitted_at: float
    index: int = 0
    place_wait_left_s: float = 0.0
    attempts: int = 0
    trail: Trail = field(default_factory=Trail)
    emitted: list[int] = field(default_factory=list)
    arrived_at: list[float] = field(default_factory=list)
    submitted_at: float = 0.0
    cached_tokens: int = 0
    prompt_logprobs: Sequence[Likelihoods] = ()
    _first_token_attempt: int = 0
    _first_token_submitted_at: float = 0.0
    _queue_ms: float | None = None
    _prefill_ms: float | None = None

    @property
    def token_ids(self) -> list[int]:
        """What an attempt starts from: the prompt, then everything emitted."""
        return [*self.prompt_ids, *self.emitted]

    @property
    def tokens_left(self) -> int:
        """Tokens the answer may still have."""
        return self.max_tokens - len(self.emitted)

    def begin_attempt(self) -> None:
        """Count an attempt."""
        self.attempts += 1

    def note_submitted(self, now: float) -> None:
        """The running attempt reached its engine."""
        self.submitted_at = now

    def note_tokens(self, token_ids: Sequence[int], arrived_at: Sequence[float]) -> None:
        """The running attempt emitted tokens, at least one."""
        if not self.emitted:
            self._first_token_attempt = self.attempts
            self._first_token_submitted_at = self.submitted_at
        self.emitted.extend(token_ids)
        self.arrived_at.extend(arrived_at)

    def note_finish(self, finish: Finish) -> None:
        """The running attempt's record; only that of the attempt with the first token tells where TTFT went."""
        if self.attempts == self._first_token_attempt:
            self._queue_ms, self._prefill_ms = finish.queue_ms, finish.prefill_ms
            self.cached_tokens = min(finish.cached_tokens, len(self.prompt_ids))
        self.prompt_logprobs = finish.prompt_logprobs or self.prompt_logprobs

    def timings(self, now: float) -> Timings:
        """The account so far.

        When the engine that gave the first token was lost, its own split of queue and prefill is lost too: then all
        time at the engine counts as prefill, so that the parts still add up to the first token.
        """
        if not self.arrived_at:
            waited_ms = 1000 * (now - self.admitted_at)
            return Timings(
                queue_ms=waited_ms, prefill_ms=0.0, first_token_ms=0.0, inter_token_ms=(), total_ms=waited_ms
            )
        first_ms = 1000 * (self.arrived_at[0] - self.admitted_at)
        placed_ms = 1000 * (self._first_token_submitted_at - self.admitted_at)
        gaps = zip(self.arrived_at, self.arrived_at[1:], strict=False)
        return Timings(
            queue_ms=placed_ms + (self._queue_ms or 0.0),
            prefill_ms=first_ms - placed_ms if self._prefill_ms is None else self._prefill_ms,
            first_token_ms=first_ms,
            inter_token_ms=tuple(1000 * (later - earlier) for earlier, later in gaps),
            total_ms=1000 * (now - self.admitted_at),
        )
