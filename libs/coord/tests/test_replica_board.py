import asyncio
import time
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from headrace.base.errors import Unavailable
from headrace.coord.embedded import EmbeddedRedis
from headrace.coord.redis.replica_board import KEY, RETENTION_S, Outcome, ReplicaBoard
from headrace.coord.redis.store import open_redis

# Of the size of a real one: nanoseconds do not fit the doubles that Lua counts in.
EPOCH = 1_796_065_532_384_912_981


@pytest.fixture
async def redis(shared_redis: EmbeddedRedis) -> AsyncIterator[Redis]:
    async with open_redis(shared_redis.url) as redis:
        await redis.flushall()
        yield redis


@pytest.fixture
def board(redis: Redis) -> ReplicaBoard:
    return ReplicaBoard(redis)


async def test_what_engines_post_is_read_whole(board: ReplicaBoard) -> None:
    payload = bytes(range(256))
    await board.write("engine-b", EPOCH, 1, payload)
    await board.write("engine-a", EPOCH + 1, 7, b"")

    first, second = (await board.read()).records

    assert (first.engine_id, first.epoch, first.sequence, first.payload) == ("engine-a", EPOCH + 1, 7, b"")
    assert (second.engine_id, second.epoch, second.sequence, second.payload) == ("engine-b", EPOCH, 1, payload)


async def test_an_empty_board_is_empty_and_not_an_error(board: ReplicaBoard) -> None:
    assert (await board.read()).records == ()


async def test_ages_are_told_by_the_server_s_clock_alone(board: ReplicaBoard, redis: Redis) -> None:
    before = await _server_us(redis)
    written = await board.write("engine", EPOCH, 1, b"")
    after = await _server_us(redis)
    assert before <= written.at_us <= after

    await asyncio.sleep(0.2)
    read = await board.read()
    (record,) = read.records
    assert record.at_us == written.at_us
    assert 200_000 <= read.now_us - record.at_us <= await _server_us(redis) - before


async def test_a_newer_heartbeat_replaces_the_older(board: ReplicaBoard) -> None:
    first = await board.write("engine", EPOCH, 9, b"old")
    second = await board.write("engine", EPOCH, 10, b"new")

    assert second.accepted
    assert second.at_us > first.at_us
    (record,) = (await board.read()).records
    assert (record.sequence, record.payload) == (10, b"new")


async def test_a_lower_epoch_is_refused_however_close_and_whatever_its_sequence(board: ReplicaBoard) -> None:
    current = await board.write("engine", EPOCH, 1, b"current")
    late = await board.write("engine", EPOCH - 1, 999, b"of the process before")

    assert late.outcome is Outcome.LOWER_EPOCH
    assert not late.accepted
    assert late.at_us == current.at_us
    (record,) = (await board.read()).records
    assert record.payload == b"current"


async def test_a_restarted_engine_begins_anew_at_sequence_one(board: ReplicaBoard) -> None:
    await board.write("engine", EPOCH, 999, b"before")
    assert (await board.write("engine", EPOCH + 1, 1, b"after")).accepted
    (record,) = (await board.read()).records
    assert (record.epoch, record.sequence) == (EPOCH + 1, 1)


async def test_the_same_heartbeat_twice_is_accepted_and_does_not_look_fresher(board: ReplicaBoard) -> None:
    first = await board.write("engine", EPOCH, 1, b"")
    await asyncio.sleep(0.01)
    again = await board.write("engine", EPOCH, 1, b"")

    assert again.outcome is Outcome.REPEATED
    assert again.accepted
    assert again.at_us == first.at_us
    assert (await board.read()).records[0].at_us == first.at_us


async def test_a_heartbeat_overtaken_by_its_successor_is_left_out(board: ReplicaBoard) -> None:
    await board.write("engine", EPOCH, 2, b"second")
    overtaken = await board.write("engine", EPOCH, 1, b"first")

    assert overtaken.outcome is Outcome.LATE
    assert not overtaken.accepted
    assert (await board.read()).records[0].payload == b"second"


async def test_stale_records_stay_visible_until_retention_ends(board: ReplicaBoard, redis: Redis) -> None:
    now = await _server_us(redis)
    await _forge(redis, "stale", now - (RETENTION_S - 5) * 1_000_000)
    await _forge(redis, "forgotten", now - (RETENTION_S + 1) * 1_000_000)

    read = await board.read()

    assert [record.engine_id for record in read.records] == ["stale"]
    assert read.now_us - read.records[0].at_us > 590_000_000
    assert await redis.hkeys(KEY) == [b"stale"]


async def test_records_from_the_future_and_damaged_ones_are_not_taken_for_fresh(
    board: ReplicaBoard, redis: Redis
) -> None:
    await _forge(redis, "future", await _server_us(redis) + 3_600_000_000)
    await redis.hset(KEY, "damaged", b"not a record")
    assert (await board.read()).records == ()

    assert (await board.write("future", EPOCH, 1, b"")).accepted
    assert len((await board.read()).records) == 1


async def test_a_board_nobody_writes_to_expires_as_a_whole(board: ReplicaBoard, redis: Redis) -> None:
    await board.write("engine", EPOCH, 1, b"")
    assert RETENTION_S - 5 < await redis.ttl(KEY) <= RETENTION_S


async def test_an_engine_takes_itself_off_but_not_its_successor(board: ReplicaBoard) -> None:
    await board.write("engine", EPOCH + 1, 1, b"")
    await board.write("other", EPOCH, 1, b"")

    assert not await board.remove("engine", EPOCH)
    assert await board.remove("engine", EPOCH + 1)
    assert not await board.remove("engine", EPOCH + 1)
    assert [record.engine_id for record in (await board.read()).records] == ["other"]


async def test_many_writers_at_once_leave_each_engine_s_newest(board: ReplicaBoard) -> None:
    await asyncio.gather(
        *(board.write(f"engine-{e}", EPOCH, s, str(s).encode()) for s in (3, 1, 4, 2, 5) for e in range(20))
    )
    records = (await board.read()).records
    assert [(record.sequence, record.payload) for record in records] == [(5, b"5")] * 20


async def test_it_works_again_after_redis_lost_everything_scripts_included(redis_server: EmbeddedRedis) -> None:
    async with open_redis(redis_server.url) as redis:
        board = ReplicaBoard(redis)
        await board.write("engine", EPOCH, 1, b"")
        redis_server.kill()
        started = time.monotonic()
        with pytest.raises(Unavailable):
            await board.write("engine", EPOCH, 2, b"")
        with pytest.raises(Unavailable):
            await board.read()
        assert time.monotonic() - started < 3

        with EmbeddedRedis.start(redis_server.data_dir, redis_server.port):
            assert (await board.read()).records == ()
            assert (await board.write("engine", EPOCH, 3, b"")).accepted
            assert len((await board.read()).records) == 1


@pytest.mark.parametrize(("epoch", "sequence"), [(-1, 0), (0, -1), (10**20, 0)])
async def test_numbers_that_do_not_fit_the_record_are_refused(board: ReplicaBoard, epoch: int, sequence: int) -> None:
    with pytest.raises(ValueError, match="unsigned 64-bit"):
        await board.write("engine", epoch, sequence, b"")


async def _server_us(redis: Redis) -> int:
    seconds, micros = await redis.time()
    return int(seconds) * 1_000_000 + int(micros)


async def _forge(redis: Redis, engine_id: str, at_us: int) -> None:
    await redis.hset(KEY, engine_id, f"{EPOCH:020d}{1:020d}{at_us:020d}".encode())


async def test_an_entry_that_no_engine_wrote_is_counted_and_hides_no_other(board: ReplicaBoard, redis: Redis) -> None:
    await board.write("engine-a", EPOCH, 1, b"fine")
    at = str((await redis.time())[0] * 1_000_000).zfill(20).encode()
    await redis.hset(KEY, b"\xff\xfe", b"0" * 40 + at)  # type: ignore[misc]
    await redis.hset(KEY, "engine-b", b"x" * 40 + at)  # type: ignore[misc]
    read = await board.read()
    assert [record.engine_id for record in read.records] == ["engine-a"]
    assert read.malformed == 2
