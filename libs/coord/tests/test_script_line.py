"""One connection for one script, against a real server: answers in order, and what becomes of it when it breaks."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

import pytest
from redis import exceptions
from redis.asyncio import Redis

from headrace.coord.embedded import EmbeddedRedis
from headrace.coord.redis.script_line import ScriptLine
from headrace.coord.redis.store import open_redis

ECHO = "return {KEYS[1], ARGV[1]}"


@pytest.fixture
async def redis(shared_redis: EmbeddedRedis) -> AsyncIterator[Redis]:
    async with open_redis(shared_redis.url) as redis:
        await redis.script_flush()
        yield redis


async def connections(redis: Redis) -> int:
    return len(await redis.client_list())


async def test_everybody_gets_the_answer_to_his_own_question_over_one_connection(redis: Redis) -> None:
    line = ScriptLine(redis, ECHO, timeout_s=5.0)
    before = await connections(redis)
    questions = [b"%d" % n * (1 + n * 37) for n in range(200)]
    answers = await asyncio.gather(*(line.call(b"key", [question]) for question in questions))
    assert answers == [[b"key", question] for question in questions]
    assert await connections(redis) == before + 1


async def test_a_server_that_has_forgotten_the_script_is_told_it_again(redis: Redis) -> None:
    line = ScriptLine(redis, ECHO, timeout_s=5.0)
    assert await line.call(b"key", [b"1"]) == [b"key", b"1"]
    await redis.script_flush()
    assert await line.call(b"key", [b"2"]) == [b"key", b"2"]


async def test_a_script_that_fails_is_an_error_of_its_call_alone(redis: Redis) -> None:
    line = ScriptLine(redis, "return redis.call(ARGV[1], KEYS[1])", timeout_s=5.0)
    await redis.set("key", "word")
    first, failed, last = await asyncio.gather(
        *(line.call(b"key", [command]) for command in (b"GET", b"INCR", b"GET")), return_exceptions=True
    )
    assert (first, last) == (b"word", b"word")
    assert isinstance(failed, exceptions.ResponseError)


async def test_an_answer_that_nobody_waits_for_any_more_goes_to_nobody_else(redis: Redis) -> None:
    line = ScriptLine(redis, ECHO, timeout_s=5.0)
    await line.call(b"key", [b"0"])
    given_up = asyncio.create_task(line.call(b"key", [b"1"]))
    await asyncio.sleep(0)  # it has been sent
    given_up.cancel()
    assert await line.call(b"key", [b"2"]) == [b"key", b"2"]
    assert given_up.cancelled()


async def test_a_connection_that_was_closed_is_replaced_by_the_next_call(redis: Redis) -> None:
    line = ScriptLine(redis, ECHO, timeout_s=5.0)
    await line.call(b"key", [b"1"])
    before = await connections(redis)
    for _ in range(40):  # more often than the pool has connections: none is lost
        await redis.client_kill_filter(_type="normal", skipme=True)
        with suppress(exceptions.ConnectionError):  # unless it has heard of the end already
            await line.call(b"key", [b"2"])
        assert await line.call(b"key", [b"3"]) == [b"key", b"3"]
    assert await connections(redis) == before


async def test_a_frozen_server_costs_one_wait_and_its_late_answers_meet_nobody(
    redis_server: EmbeddedRedis, freeze: Callable[[int], None]
) -> None:
    async with open_redis(redis_server.url) as redis:
        line = ScriptLine(redis, ECHO, timeout_s=0.3)
        await line.call(b"key", [b"1"])
        freeze(redis_server.pid)
        started = time.monotonic()
        with pytest.raises(exceptions.TimeoutError):
            await line.call(b"key", [b"2"])
        assert time.monotonic() - started < 2.0
        os.kill(redis_server.pid, signal.SIGCONT)
        assert await line.call(b"key", [b"3"]) == [b"key", b"3"]


async def test_the_oldest_question_is_given_up_in_time_though_others_keep_coming(
    redis_server: EmbeddedRedis, freeze: Callable[[int], None]
) -> None:
    async with open_redis(redis_server.url) as redis:
        line = ScriptLine(redis, ECHO, timeout_s=0.3)
        await line.call(b"key", [b"1"])
        freeze(redis_server.pid)
        started = time.monotonic()
        oldest = asyncio.create_task(line.call(b"key", [b"2"]))
        others = []
        while not oldest.done() and time.monotonic() - started < 5.0:
            others.append(asyncio.create_task(line.call(b"key", [b"3"])))
            await asyncio.wait({oldest}, timeout=0.02)
        assert isinstance(oldest.exception(), exceptions.TimeoutError)
        assert 0.25 < time.monotonic() - started < 2.0
        ended = await asyncio.gather(*others, return_exceptions=True)
        assert all(isinstance(error, (exceptions.TimeoutError, exceptions.ConnectionError)) for error in ended)


async def test_the_connection_ends_with_its_client(shared_redis: EmbeddedRedis, redis: Redis) -> None:
    before = await connections(redis)
    async with open_redis(shared_redis.url) as client:
        line = ScriptLine(client, ECHO, timeout_s=5.0)
        await line.call(b"key", [b"1"])
        assert await connections(redis) == before + 1
    async with asyncio.timeout(5):
        while await connections(redis) != before:
            await asyncio.sleep(0.01)
