"""The retry budget: failures of a few requests are retried, a failing fleet is not hammered."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class RetryBudget:
    """Retries allowed in the last `window_s`: `ratio` of the requests seen in it, and never fewer than `floor`.

    The floor lets a quiet gateway retry at all. Example: 10 %, floor 10: 40 requests in the window allow 10 retries,
    300 allow 30. Times are seconds on any one clock that never goes back.
    """

    ratio: float = 0.1
    floor: int = 10
    window_s: float = 10.0
    _requests: deque[float] = field(default_factory=deque)
    _retries: deque[float] = field(default_factory=deque)

    def note_request(self, now: float) -> None:
        """Count a request; retries of it are not requests."""
        self._forget(now)
        self._requests.append(now)

    def allows(self, now: float) -> bool:
        """Whether one more retry fits."""
        self._forget(now)
        return len(self._retries) < max(self.floor, int(self.ratio * len(self._requests)))

    def spend(self, now: float) -> None:
        """Count a retry."""
        self._retries.append(now)

    def _forget(self, now: float) -> None:
        for times in (self._requests, self._retries):
            while times and times[0] <= now - self.window_s:
                times.popleft()
