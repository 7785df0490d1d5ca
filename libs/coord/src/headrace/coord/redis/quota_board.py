"""What tenants have used, in Redis: each operation is one script, on the server's clock, for any number of gateways.

A reservation takes one request and its tokens or nothing at all, lives as long as its gateway renews it, and is
settled once at what was really used. All operations may be repeated: the reservation's id makes them take effect once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from redis.asyncio import Redis

from headrace.coord.redis.quota_script import HELLO, RESERVE, SPAN, UPDATE
from headrace.coord.redis.store import redis_errors

GATEWAYS_KEY = "headrace:v1:quota-gateways"
LEASE_S = 30.0
"""A reservation that was not renewed for so long returns by itself."""

_BATCH = 500  # changes in one script: below 10 ms, in which nobody else is served


class Quota(Enum):
    """What can run out, by the names of the tenant's limits."""

    REQUESTS_PER_MINUTE = "requests_per_minute"
    TOKENS_PER_MINUTE = "tokens_per_minute"
    TOKENS_PER_DAY = "tokens_per_day"
    MAX_CONCURRENT_REQUESTS = "max_concurrent_requests"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """A tenant's limits; None is no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    tokens_per_day: int | None = None
    max_concurrent_requests: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One reservation: its id is unique among all gateways and requests."""

    tenant: str
    id: str
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DayUse:
    """Tokens of one unix day. A server that knows nothing of the day takes over what a gateway has seen."""

    day: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """The quota that refuses, and how much of it was used. `wait_s` is None when waiting cannot help."""

    quota: Quota
    limit: int
    used: int
    wait_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Answer to a reserve: refused with `shortage`, else taken (now, or by the same id before)."""

    day: DayUse
    shortage: Shortage | None = None


class Verb(Enum):
    """What a change does to a reservation."""

    RENEW = "renew"  # goes on; one that the server does not know is taken over, limits or not
    SETTLE = "settle"  # over, at `tokens` actually used
    VOID = "void"  # over, and as if it had never been


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One change of one reservation. `tokens`: those reserved for RENEW, those used for SETTLE.

    `is_new`: the reservation was made without the server, which counts its request when it first hears of it.
    """

    verb: Verb
    tenant: str
    id: str
    tokens: int = 0
    is_new: bool = False


class QuotaBoard:
    """The counters in `redis`. Each method raises Unavailable within a second when Redis does not answer."""

    def __init__(self, redis: Redis, *, lease_s: float = LEASE_S, window_s: float = 60.0) -> None:
        """`window_s` is what "per minute" means; anything but 60 is for tests."""
        self._reserve = redis.register_script(RESERVE)
        self._update = redis.register_script(UPDATE)
        self._hello = redis.register_script(HELLO)
        self._redis = redis
        self._times = [int(lease_s * 1e6), int(window_s * 1e6) // SPAN]

    async def reserve(self, claim: Claim, bounds: Bounds, *, seen: DayUse | None = None) -> Verdict:
        """Take one request and its tokens within all bounds, or nothing. `seen` is the day's use as last heard."""
        limits = [
            bounds.requests_per_minute,
            bounds.tokens_per_minute,
            bounds.tokens_per_day,
            bounds.max_concurrent_requests,
        ]
        arguments: list[str | int] = [*self._times, claim.id, claim.tokens]
        arguments += ["" if limit is None else limit for limit in limits]
        arguments += [seen.day, seen.tokens] if seen else ["", ""]
        with redis_errors():
            outcome, day, used, *why = await self._reserve(keys=[_key(claim.tenant)], args=arguments)
        shortage = _shortage(why) if outcome == b"refused" else None
        return Verdict(day=DayUse(day=int(day), tokens=int(used)), shortage=shortage)

    async def update(self, changes: Sequence[Change]) -> None:
        """Apply changes in order, each at most once; harmless to repeat as a whole."""
        for start in range(0, len(changes), _BATCH):
            batch = changes[start : start + _BATCH]
            tenants = {tenant: index for index, tenant in enumerate(dict.fromkeys(c.tenant for c in batch), 1)}
            arguments: list[str | int] = [*self._times]
            for change in batch:
                arguments += [tenants[change.tenant], change.verb.value, change.id, change.tokens, int(change.is_new)]
            with redis_errors():
                await self._update(keys=[_key(tenant) for tenant in tenants], args=arguments)

    async def hello(self, gateway_id: str, *, ttl_s: float) -> int:
        """This gateway is here, for `ttl_s` from now; how many are, itself included."""
        with redis_errors():
            return int(await self._hello(keys=[GATEWAYS_KEY], args=[gateway_id, int(ttl_s * 1e6)]))

    async def goodbye(self, gateway_id: str) -> None:
        """This gateway is no longer here."""
        with redis_errors():
            await self._redis.zrem(GATEWAYS_KEY, gateway_id)


def _key(tenant: str) -> str:
    return f"headrace:v1:quota:{{{tenant}}}"  # braces: all keys of a tenant live in one slot of a cluster


def _shortage(why: Sequence[bytes]) -> Shortage:
    quota, limit, used, wait_us = why
    wait_s = int(wait_us) / 1e6
    return Shortage(
        quota=Quota(quota.decode()), limit=int(limit), used=int(used), wait_s=None if wait_s < 0 else wait_s
    )
