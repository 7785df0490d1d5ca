"""Each request's share of its tenant's limits: reserved when it enters, renewed while it lives, settled at its end.

With Redis the limits hold exactly over all gateways. Without it each gateway lets in its part of them and says so.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

import structlog
from redis.asyncio import Redis

from headrace.base.backoff import Backoff
from headrace.base.errors import InternalError, Unavailable
from headrace.coord.redis.quota_board import LEASE_S, Bounds, Change, Claim, DayUse, QuotaBoard, Verb, Verdict
from headrace.gateway.core.quota import LocalShare, Part, Quota, Shortage, exhausted
from headrace.gateway.core.terms import Limits, TenantTerms
from headrace.observe.metrics import counter, gauge, histogram

log = structlog.get_logger(__name__)

T = TypeVar("T")

_AT_ONCE = 24
"""Reservations on their way to Redis. More of them wait for each other, and must not take that for a silent Redis."""

_ANSWERS_TO_TRUST = 2
"""Probes in a row that Redis must answer before its word counts again: by then all gateways have told it of theirs."""

_GREET_S = 1.0
"""How often gateways count each other: one that does not know of a newcomer would let in too large a share."""

_MOST_PENDING = 65_536  # settles that wait for Redis, 20 MB; beyond them the oldest are dropped and counted

RESERVATIONS = counter("headrace_gateway_quota_reservations_total", "Reservations asked for, by outcome.", ("outcome",))
RESERVE_SECONDS = histogram("headrace_gateway_quota_reserve_seconds", "Time a reservation took, seconds.")
GATEWAYS = gauge("headrace_gateway_quota_gateways", "Gateways that share the limits, as Redis last said.")
DEGRADED = gauge("headrace_gateway_quota_degraded", "1 while Redis is away and limits are shared out.")
PENDING = gauge("headrace_gateway_quota_pending_writes", "Settles that wait to be written.")
DROPPED = counter("headrace_gateway_quota_dropped_writes_total", "Settles given up, so that memory stays bounded.")

_AWAY = (Unavailable, InternalError, TimeoutError)
"""Redis does not answer, or answers nonsense; in neither case a reason to refuse everybody."""


class Reservation:
    """One request's reservation. Whoever has it ends it with `settle` or `void`; the first call counts."""

    __slots__ = ("_ended", "_part", "_quotas", "degraded", "id", "tenant", "tokens")

    def __init__(self, quotas: Quotas, claim: Claim, part: Part | None, *, degraded: bool) -> None:
        self.tenant, self.id, self.tokens = claim.tenant, claim.id, claim.tokens
        self.degraded = degraded
        """Whether this gateway decided alone."""
        self._quotas = quotas
        self._part = part
        self._ended = False

    def settle(self, actual_tokens: int) -> None:
        """The request ended, having used so many tokens (prompt and emitted). Never waits, never fails."""
        self._end(Verb.SETTLE, actual_tokens)

    def void(self) -> None:
        """The request never reached an engine: it costs nothing, not even a request. Never waits, never fails."""
        self._end(Verb.VOID, 0)

    def _end(self, verb: Verb, actual: int) -> None:
        if self._ended or self._part is None:
            return
        self._ended = True
        self._quotas.note_end(self, self._part, self.change(verb, actual))

    def change(self, verb: Verb, tokens: int) -> Change:
        """A change of it, for Redis."""
        return Change(verb=verb, tenant=self.tenant, id=self.id, tokens=tokens, is_new=self.degraded)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaTimes:
    """Seconds; anything but `lease_s` is for tests. A third of that is the period of renewals.

    `wait_s` is the longest wait for an answer of Redis, which is asked twice: when this process stood still for a
    moment, the answer has come and only the clock says otherwise. Whoever waits in vain both times opens the breaker;
    then nobody waits any more.
    """

    wait_s: float = 0.15
    lease_s: float = LEASE_S
    window_s: float = 60.0
    probe_s: float = 0.25


class Quotas:
    """All reservations of one gateway. `run` must run; `close` after the last request has ended."""

    def __init__(self, redis: Redis, gateway_id: str, *, times: QuotaTimes | None = None) -> None:
        self._times = times or QuotaTimes()
        self._board = QuotaBoard(redis, lease_s=self._times.lease_s, window_s=self._times.window_s)
        self._gateway_id = gateway_id
        # A client may choose its request id, and even use it twice; it must pay twice.
        self._life = secrets.token_hex(6)
        self._numbers = itertools.count()
        self._gateways = 1
        self._away = asyncio.Event()
        self._wrote = asyncio.Event()
        self._writing = asyncio.Lock()
        self._asking = asyncio.Semaphore(_AT_ONCE)
        self._live: dict[str, Reservation] = {}
        self._pending: dict[str, Change] = {}
        self._written: Counter[str] = Counter()
        self._shares: dict[str, LocalShare] = {}

    @property
    def degraded(self) -> bool:
        """Whether Redis is away."""
        return self._away.is_set()

    @property
    def gateways(self) -> int:
        """Gateways seen when Redis last answered, this one included."""
        return self._gateways

    async def reserve(self, terms: TenantTerms, request_id: str, tokens: int) -> Reservation:
        """Take one request and `tokens` (all it may use: prompt + max_tokens x n) out of the tenant's limits.

        Once per request, before its first attempt; retries and migrations use the same reservation. Exhausted, with
        nothing taken, when it does not fit.
        """
        claim = Claim(tenant=terms.tenant, id=f"{request_id}/{self._life}/{next(self._numbers)}", tokens=tokens)
        if not terms.limits.any:
            return Reservation(self, claim, None, degraded=False)
        with RESERVE_SECONDS.time():
            shortage, degraded = await self._decided(claim, terms.limits)
        if shortage is not None:
            error = exhausted(shortage, tokens=tokens, degraded=degraded)
            RESERVATIONS.labels(error.reason).inc()
            raise error
        RESERVATIONS.labels("DEGRADED" if degraded else "TAKEN").inc()
        part = self._share(terms.tenant).enter(tokens, time.monotonic())
        reservation = Reservation(self, claim, part, degraded=degraded)
        self._live[claim.id] = reservation
        return reservation

    def note_end(self, reservation: Reservation, part: Part, change: Change) -> None:
        """A reservation ended (called by the reservation itself)."""
        self._live.pop(reservation.id, None)
        void = change.verb is Verb.VOID
        self._share(reservation.tenant).leave(part, change.tokens, time.monotonic(), void=void)
        self._write(change)

    async def run(self) -> None:
        """Renew what lives, write what ended, look for Redis while it is away; never returns."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._renew_forever())
            tasks.create_task(self._write_forever())

    async def close(self) -> None:
        """Write the last settles and leave the registry, if Redis answers; what is left lapses by itself."""
        try:
            async with asyncio.timeout(4 * self._times.wait_s):
                await self._flush()
                await self._board.goodbye(self._gateway_id)
        except _AWAY:
            if self._pending:
                log.warning("quota_settles_lost", count=len(self._pending))

    async def _decided(self, claim: Claim, limits: Limits) -> tuple[Shortage | None, bool]:
        """What Redis says, or this gateway alone while Redis is away; and which of them it was."""
        async with self._asking:
            if self.degraded:
                return self._locally(claim, limits), True
            try:
                return await self._asked(claim, limits), False
            except _AWAY as error:
                self._note_away(error)
                shortage = self._locally(claim, limits)
                if shortage is not None:
                    self._write(Change(verb=Verb.VOID, tenant=claim.tenant, id=claim.id))  # it may have been taken
                return shortage, True
            except asyncio.CancelledError:
                self._write(Change(verb=Verb.VOID, tenant=claim.tenant, id=claim.id))
                raise

    async def _asked(self, claim: Claim, limits: Limits) -> Shortage | None:
        bounds = Bounds(
            requests_per_minute=limits.requests_per_minute,
            tokens_per_minute=limits.tokens_per_minute,
            tokens_per_day=limits.tokens_per_day,
            max_concurrent_requests=limits.max_concurrent_requests,
        )
        share = self._share(claim.tenant)
        seen = DayUse(day=share.day, tokens=share.day_used)
        written = self._written[claim.tenant]
        verdict = await self._in_time(lambda: self._board.reserve(claim, bounds, seen=seen))
        if verdict.shortage is not None and self._knows_better(claim.tenant, written):
            await self._in_time(self._flush)
            verdict = await self._in_time(lambda: self._board.reserve(claim, bounds, seen=seen))
        share.heard(verdict.day.day, verdict.day.tokens)
        return _shortage(verdict)

    async def _in_time(self, ask: Callable[[], Awaitable[T]]) -> T:
        """The answer to a question that may be asked twice."""
        try:
            async with asyncio.timeout(self._times.wait_s):
                return await ask()
        except TimeoutError:
            async with asyncio.timeout(self._times.wait_s):
                return await ask()

    def _knows_better(self, tenant: str, written: int) -> bool:
        """Whether requests have ended whose settles came after the refusal: they must not stand in the way."""
        return self._written[tenant] != written or any(c.tenant == tenant for c in self._pending.values())

    def _locally(self, claim: Claim, limits: Limits) -> Shortage | None:
        share = self._share(claim.tenant)
        today = int(time.time() // 86_400)
        return share.shortage(limits, claim.tokens, gateways=self._gateways, now=time.monotonic(), today=today)

    def _share(self, tenant: str) -> LocalShare:
        return self._shares.setdefault(tenant, LocalShare())

    def _write(self, change: Change) -> None:
        self._pending[change.id] = change
        if len(self._pending) > _MOST_PENDING:
            self._pending.pop(next(iter(self._pending)))
            DROPPED.inc()
        PENDING.set(len(self._pending))
        self._wrote.set()

    async def _flush(self) -> None:
        """Write everything that ended before this call; one writer at a time, and what failed stays pending."""
        async with self._writing:
            batch = list(self._pending.values())
            if not batch:
                return
            await self._board.update(batch)
            for change in batch:
                self._pending.pop(change.id, None)
                self._written[change.tenant] += 1
            PENDING.set(len(self._pending))

    async def _write_forever(self) -> None:
        backoff = Backoff(first_s=0.05, longest_s=1.0)
        while True:
            await self._wrote.wait()
            self._wrote.clear()
            try:
                await self._flush()
                backoff.reset()
            except _AWAY as error:
                self._note_away(error)
                self._wrote.set()
                await asyncio.sleep(backoff.next_s())

    async def _renew_forever(self) -> None:
        heard, renewed_at = 0, -math.inf
        while True:
            try:
                await self._greet()
                if self.degraded or time.monotonic() >= renewed_at + self._times.lease_s / 3:
                    renewed_at = time.monotonic()
                    await self._renew()
                if self.degraded:
                    # What was let in meanwhile must be counted there first, by the other gateways, too.
                    await self._flush()
                    heard += 1
                    if heard >= _ANSWERS_TO_TRUST:
                        self._note_back()
            except _AWAY as error:
                heard = 0
                self._note_away(error)
            if self.degraded:
                await asyncio.sleep(self._times.probe_s)
                continue
            heard = 0
            try:
                async with asyncio.timeout(min(self._times.lease_s / 3, _GREET_S)):
                    await self._away.wait()
            except TimeoutError:
                pass

    async def _greet(self) -> None:
        self._gateways = max(1, await self._board.hello(self._gateway_id, ttl_s=self._times.lease_s))
        GATEWAYS.set(self._gateways)

    async def _renew(self) -> None:
        live = list(self._live.values())
        await self._board.update([r.change(Verb.RENEW, r.tokens) for r in live])
        today, now = int(time.time() // 86_400), time.monotonic()
        idle = [t for t, s in self._shares.items() if not s.running and s.day < today and not s.requests.used(now)]
        for tenant in idle:
            del self._shares[tenant]
            self._written.pop(tenant, None)

    def _note_away(self, error: Exception) -> None:
        if not self.degraded:
            self._away.set()
            DEGRADED.set(1)
            log.warning("quota_degraded", gateways=self._gateways, why=str(error) or type(error).__name__)

    def _note_back(self) -> None:
        if self.degraded:
            self._away.clear()
            DEGRADED.set(0)
            self._wrote.set()
            log.info("quota_exact_again", live=len(self._live), unwritten=len(self._pending))


def _shortage(verdict: Verdict) -> Shortage | None:
    found = verdict.shortage
    if found is None:
        return None
    return Shortage(quota=Quota(found.quota.value), limit=found.limit, used=found.used, wait_s=found.wait_s)
