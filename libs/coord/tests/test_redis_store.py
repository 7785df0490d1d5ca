import asyncio
import os
import signal
import time

import pytest

from headrace.base.errors import InternalError, StartError, Unavailable
from headrace.coord.embedded import EmbeddedRedis
from headrace.coord.redis.store import open_redis, redis_errors


async def test_values_are_bytes_in_and_out(shared_redis: EmbeddedRedis) -> None:
    async with open_redis(shared_redis.url) as redis:
        await redis.set("key", b"\x00\xff")
        assert await redis.get("key") == b"\x00\xff"


@pytest.mark.parametrize("blow", ["kill", "freeze"])
async def test_a_killed_or_frozen_redis_is_unavailable_within_half_a_second(
    redis_server: EmbeddedRedis, freeze, blow: str
) -> None:
    async with open_redis(redis_server.url) as redis:
        await redis.set("key", b"")
        if blow == "kill":
            redis_server.kill()
        else:
            freeze(redis_server.pid)
        for _ in range(3):
            started = time.monotonic()
            with pytest.raises(Unavailable) as caught, redis_errors():
                await redis.get("key")
            assert time.monotonic() - started < 3  # redis-py's own retries would take 10 s
            assert caught.value.reason == "REDIS_UNAVAILABLE"


async def test_a_command_is_sent_once_even_when_its_answer_does_not_come(redis_server: EmbeddedRedis, freeze) -> None:
    async with open_redis(redis_server.url) as redis:
        await redis.set("count", 0)
        freeze(redis_server.pid)
        with pytest.raises(Unavailable), redis_errors():
            await redis.incr("count")
        # Long enough for the retries that redis-py makes by default.
        await asyncio.sleep(0.5)
        os.kill(redis_server.pid, signal.SIGCONT)

        assert await redis.get("count") == b"1"


async def test_it_serves_again_once_redis_is_back(redis_server: EmbeddedRedis) -> None:
    async with open_redis(redis_server.url) as redis:
        await redis.set("key", b"lost")
        redis_server.kill()
        with await asyncio.to_thread(EmbeddedRedis.start, redis_server.data_dir, redis_server.port):
            assert await redis.get("key") is None


async def test_cancelling_a_command_does_not_give_its_answer_to_the_next(shared_redis: EmbeddedRedis) -> None:
    async with open_redis(shared_redis.url, max_connections=1) as redis:
        for i in range(50):
            await redis.set(f"key-{i}", i)
        for i in range(50):
            cut = asyncio.create_task(redis.get(f"key-{i}"))
            # A few turns of the loop: cancelled while connecting, sending, or waiting for the answer.
            for _ in range(i % 7):
                await asyncio.sleep(0)
            cut.cancel()
            await asyncio.wait([cut])
            assert await redis.get(f"key-{49 - i}") == str(49 - i).encode()

        waiting = asyncio.create_task(redis.blpop(["nothing"], timeout=0))
        await asyncio.sleep(0.05)
        waiting.cancel()
        await asyncio.wait([waiting])
        await redis.rpush("nothing", b"an answer to the cancelled command")
        assert await redis.get("key-7") == b"7"


async def test_an_exhausted_pool_fails_fast_instead_of_waiting_forever(shared_redis: EmbeddedRedis) -> None:
    async with open_redis(shared_redis.url, max_connections=1) as redis, redis.client() as holder:
        await holder.set("key", b"")
        started = time.monotonic()
        with pytest.raises(Unavailable), redis_errors():
            await redis.get("key")
        assert time.monotonic() - started < 3  # redis-py's own retries would take 10 s


async def test_a_refused_command_is_our_fault_and_a_wrong_password_is_not(shared_redis: EmbeddedRedis) -> None:
    async with open_redis(shared_redis.url) as redis:
        await redis.set("key", b"")
        with pytest.raises(InternalError), redis_errors():
            await redis.lpush("key", b"")
    async with open_redis(f"redis://:wrong@127.0.0.1:{shared_redis.port}") as redis:
        with pytest.raises(Unavailable), redis_errors():
            await redis.get("key")


def test_a_malformed_url_is_refused_at_start() -> None:
    with pytest.raises(StartError, match="cannot be used"):
        open_redis("localhost:6379")


async def test_every_cancel_arrives_however_it_meets_the_answer(shared_redis: EmbeddedRedis) -> None:
    """Without the client's own care a third of these were lost: a service would not have ended when told to."""
    async with open_redis(shared_redis.url) as redis:

        async def busy() -> None:
            while True:
                await redis.set("key", b"x" * 200)

        for turn in range(300):
            task = asyncio.ensure_future(busy())
            await asyncio.sleep(turn % 30 * 0.0001)
            task.cancel()
            done, _ = await asyncio.wait({task}, timeout=5)
            assert done, f"the cancel of turn {turn} was lost"
            assert task.cancelled()
        assert await redis.get("key") == b"x" * 200
