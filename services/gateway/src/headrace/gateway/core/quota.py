"""Quotas without Redis: what one gateway may let in by itself, and what a refusal says."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum

from headrace.base.errors import Exhausted
from headrace.gateway.core.terms import Limits


class Quota(Enum):
    """What can run out, by the names of the tenant's limits."""

    REQUESTS_PER_MINUTE = "requests_per_minute"
    TOKENS_PER_MINUTE = "tokens_per_minute"
    TOKENS_PER_DAY = "tokens_per_day"
    MAX_CONCURRENT_REQUESTS = "max_concurrent_requests"


_REASONS = {
    Quota.REQUESTS_PER_MINUTE: "RATE_LIMITED",
    Quota.TOKENS_PER_MINUTE: "RATE_LIMITED",
    Quota.TOKENS_PER_DAY: "QUOTA_EXCEEDED",
    Quota.MAX_CONCURRENT_REQUESTS: "TOO_MANY_CONCURRENT",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """The quota that refuses, and how much of it was used. `wait_s` is None when waiting cannot help."""

    quota: Quota
    limit: int
    used: int
    wait_s: float | None


def exhausted(shortage: Shortage, *, tokens: int, degraded: bool) -> Exhausted:
    """What the client hears: which quota, how much of it is used, and when to come back."""
    name = shortage.quota.value.replace("_", " ")
    if shortage.wait_s is not None:
        message = f"the tenant has used {shortage.used} of {shortage.limit} {name}"
    elif shortage.limit == 0:
        message = f"the tenant's limit of {name} is 0"
    else:
        message = (
            f"the request may take {tokens} tokens, more than {shortage.limit} {name} ever allow: lower max_tokens"
        )
    metadata = {"quota": shortage.quota.value, "limit": str(shortage.limit), "used": str(shortage.used)}
    if degraded:
        metadata["degraded"] = "true"
    return Exhausted(message, reason=_REASONS[shortage.quota], retry_after_s=shortage.wait_s, metadata=metadata)


@dataclass(slots=True, kw_only=True)
class SlidingWindow:
    """The sum of what was added in the last `buckets` x `bucket_s` seconds, never less, and up to a bucket more.

    The same arithmetic as the script in Redis. Times are seconds on any one clock that never goes back.
    """

    bucket_s: float = 0.1
    buckets: int = 600
    _amounts: deque[list[int]] = field(default_factory=deque)  # [bucket, amount], oldest first
    _sum: int = 0

    def used(self, now: float) -> int:
        """The sum now."""
        oldest = self._bucket(now) - self.buckets
        while self._amounts and self._amounts[0][0] < oldest:
            self._sum -= self._amounts.popleft()[1]
        return self._sum

    def add(self, now: float, amount: int) -> int:
        """Add to the newest bucket; returns its number, for `give_back`."""
        self.used(now)
        bucket = self._bucket(now)
        if not self._amounts or self._amounts[-1][0] < bucket:
            self._amounts.append([bucket, 0])
        self._amounts[-1][1] += amount
        self._sum += amount
        return self._amounts[-1][0]

    def give_back(self, bucket: int, amount: int) -> None:
        """Take out again what was added to `bucket`; nothing when that has left the window."""
        for entry in reversed(self._amounts):
            if entry[0] <= bucket:
                if entry[0] == bucket:
                    entry[1] -= amount
                    self._sum -= amount
                return

    def wait_s(self, now: float, needed: int) -> float | None:
        """Until `needed` of the sum will have left; None when there is not so much in it."""
        self.used(now)
        for bucket, amount in self._amounts:
            needed -= amount
            if needed <= 0:
                return (bucket + self.buckets + 1) * self.bucket_s - now
        return None

    def _bucket(self, now: float) -> int:
        return int(now / self.bucket_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One request's part of a `LocalShare`: what to give back when it ends."""

    tokens: int
    request_bucket: int
    token_bucket: int


@dataclass(slots=True, kw_only=True)
class LocalShare:
    """What this gateway itself let in for one tenant, whoever decided, and what it may let in while Redis is away.

    Its share is limit / gateways. A share too small for the request lets in one at a time, if the whole limit could
    hold it: so N gateways exceed a limit by at most one request each, and no tenant is shut out altogether. Of the
    day it may use its part of what was left when Redis was last heard: `day`, `day_used`.
    """

    requests: SlidingWindow = field(default_factory=SlidingWindow)
    tokens: SlidingWindow = field(default_factory=SlidingWindow)
    running: int = 0
    day: int = 0
    day_used: int = 0
    spent: int = 0

    def heard(self, day: int, used: int) -> None:
        """Redis told how many tokens of the day all gateways have used."""
        self.day, self.day_used, self.spent = day, used, 0

    def shortage(self, limits: Limits, tokens: int, *, gateways: int, now: float, today: int) -> Shortage | None:
        """Why one more request of so many tokens has to wait; None to let it in."""
        if today != self.day:
            self.heard(today, 0)
        found = [
            self._concurrency(limits.max_concurrent_requests, gateways),
            _window(self.requests, Quota.REQUESTS_PER_MINUTE, limits.requests_per_minute, 1, gateways, now),
            _window(self.tokens, Quota.TOKENS_PER_MINUTE, limits.tokens_per_minute, tokens, gateways, now),
            self._day(limits.tokens_per_day, tokens, gateways),
        ]
        return max((s for s in found if s), key=lambda s: float("inf") if s.wait_s is None else s.wait_s, default=None)

    def enter(self, tokens: int, now: float) -> Part:
        """Count a request that was let in."""
        self.running += 1
        self.spent += tokens
        return Part(tokens=tokens, request_bucket=self.requests.add(now, 1), token_bucket=self.tokens.add(now, tokens))

    def leave(self, part: Part, actual: int, now: float, *, void: bool = False) -> None:
        """It ended, at `actual` tokens; with `void` as if it had never been. Once per part."""
        self.running -= 1
        self.spent = max(0, self.spent + actual - part.tokens)
        if actual < part.tokens:
            self.tokens.give_back(part.token_bucket, part.tokens - actual)
        elif actual > part.tokens:
            self.tokens.add(now, actual - part.tokens)
        if void:
            self.requests.give_back(part.request_bucket, 1)

    def _concurrency(self, limit: int | None, gateways: int) -> Shortage | None:
        if limit is None or self.running < _share(limit, gateways):
            return None
        wait_s = 1.0 if limit else None
        return Shortage(quota=Quota.MAX_CONCURRENT_REQUESTS, limit=limit, used=self.running, wait_s=wait_s)

    def _day(self, limit: int | None, tokens: int, gateways: int) -> Shortage | None:
        if limit is None:
            return None
        left = max(0, limit - self.day_used)
        if self.spent + tokens <= left // gateways or (self.spent == 0 and tokens <= left):
            return None
        # The end of the day is too far: Redis comes back sooner, and then the whole limit counts again.
        wait_s = None if tokens > limit else 1.0
        return Shortage(quota=Quota.TOKENS_PER_DAY, limit=limit, used=self.day_used + self.spent, wait_s=wait_s)


def _share(limit: int, gateways: int) -> int:
    return max(1, limit // gateways) if limit else 0


def _window(
    window: SlidingWindow, quota: Quota, limit: int | None, amount: int, gateways: int, now: float
) -> Shortage | None:
    if limit is None:
        return None
    used = window.used(now)
    allowed = max(_share(limit, gateways), min(amount, limit))
    if used + amount <= allowed:
        return None
    return Shortage(quota=quota, limit=limit, used=used, wait_s=window.wait_s(now, used + amount - allowed))
