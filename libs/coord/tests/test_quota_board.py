import asyncio
import time
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from headrace.base.errors import Unavailable
from headrace.coord.embedded import EmbeddedRedis
from headrace.coord.redis.quota_board import Bounds, Change, Claim, DayUse, Quota, QuotaBoard, Verb, Verdict
from headrace.coord.redis.store import open_redis

WINDOW_S = 0.6
"""What "a minute" is in tests that wait for one to pass: buckets of 1 ms instead of 100."""

TENANT = "acme"


@pytest.fixture
async def redis(shared_redis: EmbeddedRedis) -> AsyncIterator[Redis]:
    async with open_redis(shared_redis.url) as redis:
        await redis.flushall()
        yield redis


@pytest.fixture
def board(redis: Redis) -> QuotaBoard:
    return QuotaBoard(redis)


def claim(number: int, tokens: int = 1) -> Claim:
    return Claim(tenant=TENANT, id=f"request-{number}", tokens=tokens)


def settle(number: int, tokens: int) -> Change:
    return Change(verb=Verb.SETTLE, tenant=TENANT, id=f"request-{number}", tokens=tokens)


def short_of(verdict: Verdict) -> Quota | None:
    return verdict.shortage.quota if verdict.shortage else None


async def test_a_reservation_takes_of_every_quota_or_of_none(board: QuotaBoard) -> None:
    bounds = Bounds(requests_per_minute=2, tokens_per_minute=100, tokens_per_day=1000, max_concurrent_requests=5)
    assert short_of(await board.reserve(claim(1, 60), bounds)) is None

    for number in range(2, 20):
        refused = await board.reserve(claim(number, 50), bounds)
        assert short_of(refused) is Quota.TOKENS_PER_MINUTE
        assert refused.day.tokens == 60

    assert short_of(await board.reserve(claim(20, 40), bounds)) is None, "refusals burned the requests per minute"


async def test_the_same_reservation_twice_takes_once(board: QuotaBoard) -> None:
    bounds = Bounds(requests_per_minute=1, tokens_per_minute=10, max_concurrent_requests=1)
    for _ in range(3):
        assert short_of(await board.reserve(claim(1, 10), bounds)) is None
    await board.update([settle(1, 10)])
    assert short_of(await board.reserve(claim(2, 1), bounds)) is not None

    # A command that was stuck on its way and comes after the settle takes nothing.
    late = await board.reserve(claim(1, 10), bounds)
    assert late.day.tokens == 10
    assert short_of(await board.reserve(claim(3, 0), Bounds(max_concurrent_requests=1))) is None


async def test_a_settle_gives_back_what_was_not_used_and_counts_once(board: QuotaBoard) -> None:
    bounds = Bounds(tokens_per_minute=100, tokens_per_day=100)
    await board.reserve(claim(1, 100), bounds)
    assert short_of(await board.reserve(claim(2, 71), bounds)) is not None
    for _ in range(3):
        await board.update([settle(1, 30)])

    assert short_of(await board.reserve(claim(3, 71), bounds)) is not None
    verdict = await board.reserve(claim(4, 70), bounds)
    assert (short_of(verdict), verdict.day.tokens) == (None, 100)


async def test_more_used_than_reserved_is_debt(board: QuotaBoard) -> None:
    bounds = Bounds(tokens_per_minute=100)
    await board.reserve(claim(1, 10), bounds)
    await board.update([settle(1, 250)])
    refused = await board.reserve(claim(2, 1), bounds)
    assert refused.shortage is not None
    assert (refused.shortage.used, refused.shortage.limit) == (250, 100)


async def test_a_void_costs_not_even_a_request(board: QuotaBoard) -> None:
    bounds = Bounds(requests_per_minute=1, tokens_per_day=5)
    for number in range(5):
        assert short_of(await board.reserve(claim(number, 5), bounds)) is None
        await board.update([Change(verb=Verb.VOID, tenant=TENANT, id=f"request-{number}")])


async def test_no_sixty_seconds_hold_more_than_the_limit_and_a_refusal_says_when(redis: Redis) -> None:
    board = QuotaBoard(redis, window_s=WINDOW_S)
    bounds = Bounds(requests_per_minute=5)
    taken: list[tuple[float, float]] = []  # before and after each admission: the server's instant lies between
    until = time.monotonic() + 2.5 * WINDOW_S
    waits = 0
    number = 0
    while time.monotonic() < until:
        number += 1
        before = time.monotonic()
        verdict = await board.reserve(claim(number), bounds)
        if verdict.shortage is None:
            taken.append((before, time.monotonic()))
            continue
        assert verdict.shortage.wait_s is not None
        assert 0 < verdict.shortage.wait_s <= WINDOW_S + 0.002
        await asyncio.sleep(verdict.shortage.wait_s)
        again = time.monotonic()
        number += 1
        assert (await board.reserve(claim(number), bounds)).shortage is None, "not admitted at the time it was told"
        taken.append((again, time.monotonic()))
        waits += 1
    assert waits >= 2
    for (first_before, _), (_, sixth_after) in zip(taken, taken[5:], strict=False):
        assert sixth_after - first_before > WINDOW_S, "six admissions in one window of five"


async def test_a_request_that_never_fits_is_told_so(board: QuotaBoard) -> None:
    for bounds in (
        Bounds(tokens_per_minute=100),
        Bounds(tokens_per_day=100),
        Bounds(requests_per_minute=0),
        Bounds(max_concurrent_requests=0),
    ):
        verdict = await board.reserve(claim(1, 175), bounds)
        assert verdict.shortage is not None
        assert verdict.shortage.wait_s is None


async def test_the_day_s_quota_is_told_to_return_at_midnight_utc(board: QuotaBoard) -> None:
    await board.reserve(claim(1, 100), Bounds(tokens_per_day=100))
    before = 86_400 - time.time() % 86_400
    refused = await board.reserve(claim(2, 1), Bounds(tokens_per_day=100))
    assert refused.shortage is not None
    assert refused.shortage.wait_s == pytest.approx(before, abs=5)


async def test_the_longest_wait_is_the_one_that_is_told(board: QuotaBoard) -> None:
    bounds = Bounds(requests_per_minute=1, tokens_per_day=10)
    await board.reserve(claim(1, 10), bounds)
    assert short_of(await board.reserve(claim(2, 1), bounds)) is Quota.TOKENS_PER_DAY


async def test_what_nobody_renews_returns_by_itself_and_what_is_renewed_stays(redis: Redis) -> None:
    board = QuotaBoard(redis, lease_s=0.3)
    bounds = Bounds(max_concurrent_requests=2, tokens_per_day=100)
    await board.reserve(claim(1, 40), bounds)
    await board.reserve(claim(2, 60), bounds)
    for _ in range(6):
        await asyncio.sleep(0.1)
        await board.update([Change(verb=Verb.RENEW, tenant=TENANT, id="request-1", tokens=40)])

    assert short_of(await board.reserve(claim(3, 61), bounds)) is Quota.TOKENS_PER_DAY
    assert short_of(await board.reserve(claim(4, 60), bounds)) is None
    assert short_of(await board.reserve(claim(5, 0), bounds)) is Quota.MAX_CONCURRENT_REQUESTS


async def test_a_settle_after_the_lapse_still_counts_what_was_used(redis: Redis) -> None:
    board = QuotaBoard(redis, lease_s=0.05)
    bounds = Bounds(tokens_per_day=1000)
    await board.reserve(claim(1, 400), bounds)
    await asyncio.sleep(0.1)
    assert (await board.reserve(claim(2, 0), bounds)).day.tokens == 0
    for _ in range(2):
        await board.update([settle(1, 123)])
    assert (await board.reserve(claim(3, 0), bounds)).day.tokens == 123


async def test_a_server_that_lost_its_memory_gets_it_back_from_renewals_and_gateways(
    board: QuotaBoard, redis: Redis
) -> None:
    bounds = Bounds(tokens_per_day=1000, max_concurrent_requests=1)
    seen = (await board.reserve(claim(1, 700), bounds)).day
    await redis.flushall()

    await board.update([Change(verb=Verb.RENEW, tenant=TENANT, id="request-1", tokens=700)])
    refused = await board.reserve(claim(2, 1), bounds, seen=seen)
    assert (short_of(refused), refused.day.tokens) == (Quota.MAX_CONCURRENT_REQUESTS, 700), (
        "counted twice, or not at all"
    )
    await redis.flushall()
    assert short_of(await board.reserve(claim(3, 301), bounds, seen=seen)) is Quota.TOKENS_PER_DAY
    of_another_day = DayUse(day=seen.day - 1, tokens=700)
    await redis.flushall()
    assert short_of(await board.reserve(claim(4, 301), bounds, seen=of_another_day)) is None


async def test_a_server_s_clock_set_back_neither_locks_out_nor_forgets(redis: Redis) -> None:
    board = QuotaBoard(redis, window_s=WINDOW_S)
    bounds = Bounds(requests_per_minute=3)
    for number in range(3):
        await board.reserve(claim(number), bounds)
    key = f"headrace:v1:quota:{{{TENANT}}}:requests"
    hour = 3_600_000  # buckets of 1 ms
    for name, value in (await redis.hgetall(key)).items():
        if name in (b"first", b"last"):
            await redis.hset(key, name.decode(), int(value) + hour)
        elif name != b"sum":
            await redis.hdel(key, name.decode())
            await redis.hset(key, str(int(name) + hour), int(value))

    refused = await board.reserve(claim(10), bounds)
    assert refused.shortage is not None
    assert refused.shortage.wait_s is not None
    assert refused.shortage.wait_s <= WINDOW_S + 0.002
    await asyncio.sleep(refused.shortage.wait_s)
    assert (await board.reserve(claim(11), bounds)).shortage is None


async def test_a_thousand_changes_of_many_tenants_are_one_matter(board: QuotaBoard) -> None:
    claims = [Claim(tenant=f"tenant-{n % 7}", id=f"r{n}", tokens=10) for n in range(1000)]
    for each in claims:
        await board.reserve(each, Bounds(tokens_per_day=10**9))
    await board.update([Change(verb=Verb.SETTLE, tenant=c.tenant, id=c.id, tokens=3) for c in claims])
    last = Claim(tenant="tenant-0", id="last", tokens=0)
    assert (await board.reserve(last, Bounds(tokens_per_day=1))).day.tokens == 3 * 143


async def test_keys_do_not_stay_for_ever(board: QuotaBoard, redis: Redis) -> None:
    await board.reserve(claim(1, 10), Bounds(tokens_per_day=100))
    await board.reserve(claim(2, 10), Bounds(tokens_per_day=100))
    await board.update([settle(1, 5)])
    await board.hello("gateway", ttl_s=30)
    keys = await redis.keys("*")
    assert len(keys) >= 7
    assert all([await redis.ttl(key) > 0 for key in keys])


async def test_gateways_count_each_other_while_they_say_hello(board: QuotaBoard) -> None:
    assert await board.hello("one", ttl_s=30) == 1
    assert await board.hello("two", ttl_s=0.05) == 2
    assert await board.hello("one", ttl_s=30) == 2
    await asyncio.sleep(0.1)
    assert await board.hello("one", ttl_s=30) == 1
    await board.hello("three", ttl_s=30)
    await board.goodbye("three")
    assert await board.hello("one", ttl_s=30) == 1


async def test_a_server_that_is_gone_is_unavailable_in_every_operation(redis_server: EmbeddedRedis) -> None:
    async with open_redis(redis_server.url) as redis:
        board = QuotaBoard(redis)
        await board.reserve(claim(1), Bounds())
        redis_server.kill()
        with pytest.raises(Unavailable):
            await board.reserve(claim(2), Bounds())
        with pytest.raises(Unavailable):
            await board.update([settle(1, 1)])
        with pytest.raises(Unavailable):
            await board.hello("gateway", ttl_s=30)
