"""Against a real server."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from headrace.api.engine.v1 import engine_service_pb2 as pb
from headrace.controller.adapters.redis_heartbeats import RedisHeartbeats
from headrace.controller.core.fleet import EngineId, Load, Phase
from headrace.coord.embedded import EmbeddedRedis
from headrace.coord.redis.booking_board import BookingBoard, Candidate, Preference, Terms, Wish
from headrace.coord.redis.replica_board import ReplicaBoard
from headrace.coord.redis.store import open_redis


async def test_heartbeats_are_read_with_their_ages_and_what_is_none_is_left_out(redis: EmbeddedRedis) -> None:
    client = open_redis(redis.url)
    board = ReplicaBoard(client)
    message = pb.Heartbeat(
        deployment="chat", bundle_digest="b", backend="model", pid=7, phase=pb.PHASE_DRAINING, epoch=1
    )
    await board.write("chat-1", 41, 1, message.SerializeToString())
    await board.write("chat-2", 42, 1, b"\xff\xff")
    await board.write("chat-3", 43, 1, pb.Heartbeat(deployment="chat").SerializeToString())
    beats = await RedisHeartbeats(board, BookingBoard(client, longest_s=10.0)).read()
    assert beats is not None
    assert list(beats) == ["chat-1"]
    beat = beats[EngineId("chat-1")]
    assert (beat.deployment, beat.bundle_digest, beat.pid, beat.phase) == ("chat", "b", 7, Phase.DRAINING)
    assert beat.epoch_ns == 41
    assert 0 <= beat.age_s < 5
    await client.aclose()


async def test_a_server_that_is_gone_is_unknown_and_not_empty(redis: EmbeddedRedis) -> None:
    client = open_redis(redis.url)
    heartbeats = RedisHeartbeats(ReplicaBoard(client), BookingBoard(client, longest_s=10.0))
    assert await heartbeats.read() == {}
    await asyncio.to_thread(redis.stop)
    assert await heartbeats.read() is None
    again = await asyncio.to_thread(EmbeddedRedis.start, redis.data_dir, redis.port)
    try:
        assert await heartbeats.read() == {}
    finally:
        await asyncio.to_thread(again.stop)
        await client.aclose()


@pytest.mark.parametrize("phase", [pb.PHASE_WARMING, pb.PHASE_READY, pb.PHASE_DRAINING])
async def test_every_phase_of_the_protocol_has_a_meaning(redis: EmbeddedRedis, phase: pb.Phase.ValueType) -> None:
    client = open_redis(redis.url)
    board = ReplicaBoard(client)
    await board.write("chat-1", 1, 1, pb.Heartbeat(phase=phase).SerializeToString())
    beats = await RedisHeartbeats(board, BookingBoard(client, longest_s=10.0)).read()
    assert beats is not None
    assert pb.Phase.Name(phase) == f"PHASE_{beats[EngineId('chat-1')].phase.name}"
    await client.aclose()


async def test_the_load_of_an_engine_is_what_it_says_and_what_routers_have_booked_on_it(redis: EmbeddedRedis) -> None:
    client = open_redis(redis.url)
    board, bookings = ReplicaBoard(client), BookingBoard(client, longest_s=10.0)
    message = pb.Heartbeat(phase=pb.PHASE_READY, waiting=3, running=4, max_num_seqs=4, pressure=0.5)
    await board.write("chat-1", 7, 1, message.SerializeToString())
    await bookings.book([wish("chat-1", epoch=7, sequences=2)])
    beats = await RedisHeartbeats(board, bookings).read()
    assert beats is not None
    load = Load(waiting=3, running=4, booked=2, max_num_seqs=4, pressure=0.5)
    assert beats[EngineId("chat-1")].load == load
    await client.aclose()


@pytest.mark.parametrize("said", [{}, {"max_num_seqs": 4, "pressure": 2.0}, {"max_num_seqs": 4, "pressure": math.nan}])
async def test_a_heartbeat_without_the_numbers_it_takes_has_no_load(redis: EmbeddedRedis, said: dict[str, Any]) -> None:
    client = open_redis(redis.url)
    board = ReplicaBoard(client)
    await board.write("chat-1", 7, 1, pb.Heartbeat(phase=pb.PHASE_READY, **said).SerializeToString())
    beats = await RedisHeartbeats(board, BookingBoard(client, longest_s=10.0)).read()
    assert beats is not None
    assert beats[EngineId("chat-1")].load is None
    await client.aclose()


def wish(engine_id: str, *, epoch: int, sequences: int) -> Wish:
    """A booking that the engine surely gets."""
    terms = Terms(*[1.0] * len(Terms._fields))
    candidate = Candidate(engine_id=engine_id, epoch=epoch, tokens=10, terms=terms, allowance=100)
    return Wish(
        request_id="r",
        attempt=1,
        sequences=sequences,
        candidates=[candidate],
        preference=Preference.IN_ORDER,
        freshness_s=10.0,
        chance=0.0,
    )
