"""The booking board against a real server: look, weigh, choose and book as one step, for all routers."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest
from redis.asyncio import Redis

from headrace.base.errors import Unavailable
from headrace.coord.embedded import EmbeddedRedis
from headrace.coord.redis.booking_board import BookingBoard, Candidate, Preference, State, Terms, Wish
from headrace.coord.redis.booking_script import ARRIVAL_US, ENTRY, LEDGER, SLICE_US
from headrace.coord.redis.replica_board import KEY, ReplicaBoard
from headrace.coord.redis.store import open_redis

EPOCH = 1_796_065_532_384_912_981
IDLE = Terms(
    ready_s=0.0,
    token_s=0.002,
    prefill_s=0.2,
    itl_s=0.02,
    growth_s=0.0005,
    room=31.0,
    full=32.0,
    later_tokens=79.0,
    neighbour_tokens=128.0,
    spare_blocks=1000.0,
    block_size=16.0,
    total_blocks=1024.0,
    credit_s=0.0,
)


@pytest.fixture
async def redis(shared_redis: EmbeddedRedis) -> AsyncIterator[Redis]:
    async with open_redis(shared_redis.url) as redis:
        await redis.flushall()
        yield redis


@pytest.fixture
def board(redis: Redis) -> BookingBoard:
    return BookingBoard(redis, longest_s=10.0)


async def beat(redis: Redis, *engine_ids: str, epoch: int = EPOCH, sequence: int = 1) -> None:
    replicas = ReplicaBoard(redis)
    for engine_id in engine_ids:
        await replicas.write(engine_id, epoch, sequence, b"")


def on(engine_id: str, *, epoch: int = EPOCH, tokens: int = 100, allowance: int = 64, **terms: float) -> Candidate:
    return Candidate(engine_id=engine_id, epoch=epoch, tokens=tokens, terms=IDLE._replace(**terms), allowance=allowance)


def wish(request_id: str, *candidates: Candidate, **changes: Any) -> Wish:
    usual: dict[str, Any] = {
        "attempt": 1,
        "sequences": 1,
        "preference": Preference.LEAST_COST,
        "freshness_s": 10.0,
        "chance": 0.0,
    }
    return Wish(request_id=request_id, candidates=candidates, **{**usual, **changes})


async def booked(board: BookingBoard, *engine_ids: str) -> dict[str, tuple[int, int]]:
    seen = await board.look([(e, EPOCH) for e in engine_ids])
    return {engine_id: (s.sequences, s.tokens) for engine_id, s in seen.items()}


async def test_the_least_cost_is_booked_and_seen_by_the_next_who_asks(board: BookingBoard, redis: Redis) -> None:
    await beat(redis, "a", "b")
    (first,) = await board.book([wish("r1", on("a", prefill_s=0.5), on("b"))])
    assert first.chosen == 1
    assert [s.state for s in first.seen] == [State.FREE, State.FREE]
    # One booking is 0.2 s of queue on b: still sooner than a's prefill. Three are not.
    answers = await board.book([wish(f"r{n}", on("a", prefill_s=1.3), on("b", tokens=300)) for n in range(2, 5)])
    assert [a.chosen for a in answers] == [1, 1, 0]
    assert [a.seen[1].sequences for a in answers] == [1, 2, 3]


async def test_simultaneous_callers_on_connections_of_their_own_never_take_a_place_twice(
    shared_redis: EmbeddedRedis, redis: Redis
) -> None:
    await beat(redis, "a", "b", "c", "d")

    async def router(name: str) -> list[int | None]:
        async with open_redis(shared_redis.url) as own:
            board, chance = BookingBoard(own, longest_s=10.0), random.Random(name)
            chosen = []
            for n in range(40):
                candidates = [on(e, allowance=25) for e in "abcd"]
                (answer,) = await board.book([wish(f"{name}{n}", *candidates, chance=chance.random())])
                chosen.append(answer.chosen)
            return chosen

    chosen = Counter(i for one in await asyncio.gather(*map(router, "xyz")) for i in one)
    # 120 wishes for 4 × 25 places.
    assert chosen == {0: 25, 1: 25, 2: 25, 3: 25, None: 20}


async def test_stale_gone_and_restarted_replicas_are_found_out_by_the_board_s_own_records(
    board: BookingBoard, redis: Redis
) -> None:
    await beat(redis, "stale", "restarted")
    await asyncio.sleep(0.15)
    await beat(redis, "fresh")
    candidates = [on("stale"), on("gone"), on("restarted", epoch=EPOCH - 1), on("fresh", prefill_s=9.0)]
    (answer,) = await board.book([wish("r1", *candidates, freshness_s=0.1)])
    assert [s.state for s in answer.seen] == [State.STALE, State.GONE, State.RESTARTED, State.FREE]
    assert answer.chosen == 3
    assert answer.seen[0].age_s > 0.1
    (nobody,) = await board.book([wish("r2", *candidates[:3], freshness_s=0.1)])
    assert nobody.chosen is None


async def test_the_same_attempt_again_moves_its_booking_and_does_not_weigh_against_itself(
    board: BookingBoard, redis: Redis
) -> None:
    await beat(redis, "a", "b")
    await board.book([wish("r1", on("a"))])
    (again,) = await board.book([wish("r1", on("a"))])
    assert again.seen[0].sequences == 0
    assert await booked(board, "a") == {"a": (1, 100)}
    await board.book([wish("r1", on("b", tokens=70)), wish("r1", on("b", tokens=70))])
    assert await booked(board, "a", "b") == {"a": (0, 0), "b": (1, 70)}
    (nowhere,) = await board.book([wish("r1", on("b", allowance=0))])
    assert nowhere.chosen is None
    assert await booked(board, "b") == {"b": (0, 0)}


async def test_a_release_ends_one_booking_once_and_another_attempt_of_the_request_is_another(
    board: BookingBoard, redis: Redis
) -> None:
    await beat(redis, "a")
    await board.book([wish("r1", on("a")), wish("r1", on("a"), attempt=2, sequences=3)])
    assert await booked(board, "a") == {"a": (4, 200)}
    await board.book([], [("r1", 1), ("r1", 1), ("unheard-of", 1)])
    assert await booked(board, "a") == {"a": (3, 100)}
    await board.book([], [("r1", 1)])
    assert await booked(board, "a") == {"a": (3, 100)}


async def test_a_heartbeat_ends_what_it_shows_and_not_what_came_too_late_for_it(
    board: BookingBoard, redis: Redis
) -> None:
    await beat(redis, "a")
    await board.book([wish("r1", on("a"))])
    await beat(redis, "a", sequence=2)  # at once: the engine cannot have it yet
    assert await booked(board, "a") == {"a": (1, 100)}
    await asyncio.sleep((ARRIVAL_US + 2 * SLICE_US) / 1e6)
    assert await booked(board, "a") == {"a": (1, 100)}, "time alone does not show it"
    await beat(redis, "a", sequence=3)
    assert await booked(board, "a") == {"a": (0, 0)}


async def test_the_place_of_an_attempt_that_a_heartbeat_had_shown_is_free_at_its_end_and_not_twice(
    board: BookingBoard, redis: Redis
) -> None:
    await beat(redis, "a")
    for n in range(2):
        await board.book([wish(f"r-{n}", on("a", allowance=2))])
    await asyncio.sleep((ARRIVAL_US + 2 * SLICE_US) / 1e6)
    await beat(redis, "a", sequence=2)  # shows both
    assert (await board.look([("a", EPOCH)]))["a"].sequences == 0

    await board.book([], [("r-0", 1)])
    assert (await board.look([("a", EPOCH)]))["a"].sequences == -1
    await board.book([], [("r-0", 1)])
    assert (await board.look([("a", EPOCH)]))["a"].sequences == -1
    # The heartbeat says that it is full: two sequences on their way more would be saturated, but one place is free.
    (full, taken) = await board.book([wish("r-2", on("a", allowance=0)), wish("r-3", on("a", allowance=0))])
    assert (full.chosen, taken.chosen) == (0, None)

    await asyncio.sleep((ARRIVAL_US + 2 * SLICE_US) / 1e6)
    await beat(redis, "a", sequence=3)  # shows that r-0 is gone and r-2 has come
    assert (await board.look([("a", EPOCH)]))["a"].sequences == 0


async def test_a_new_life_owes_nothing_of_the_old_ones_bookings(board: BookingBoard, redis: Redis) -> None:
    await beat(redis, "a")
    await board.book([wish("r1", on("a"))])
    await beat(redis, "a", epoch=EPOCH + 1)
    (answer,) = await board.book([wish("r2", on("a", epoch=EPOCH + 1))])
    assert answer.seen[0].sequences == 0
    await board.book([], [("r1", 1)])
    assert (await board.look([("a", EPOCH + 1)]))["a"].sequences == 1


async def test_without_heartbeats_a_booking_ends_by_itself_and_leaves_nothing_behind(redis: Redis) -> None:
    board = BookingBoard(redis, longest_s=0.2)
    await beat(redis, "a")
    await board.book([wish("r1", on("a"))])
    assert await redis.exists(ENTRY + "r1:1", LEDGER + "a") == 2
    await asyncio.sleep(0.3)
    assert await redis.keys("*") == [KEY.encode()]


async def test_near_ties_go_to_the_soonest_first_token_then_to_the_emptiest_then_by_chance(
    board: BookingBoard, redis: Redis
) -> None:
    await beat(redis, "a", "b", "c")
    cached = on("b", prefill_s=0.15)
    (by_first_token,) = await board.book([wish("r1", on("a"), cached, on("c"))])
    assert by_first_token.chosen == 1
    (by_room,) = await board.book([wish("r2", on("a", room=20.0), on("c"))])
    assert by_room.chosen == 1
    await redis.delete(*await redis.keys(LEDGER + "*"))
    for chance, expected in ((0.0, 0), (0.4, 1), (0.99, 2)):
        (answer,) = await board.book([wish("r3", on("a"), on("b"), on("c"), chance=chance)], [("r3", 1)])
        assert answer.chosen == expected


async def test_by_load_and_in_order_look_at_no_cost(board: BookingBoard, redis: Redis) -> None:
    await beat(redis, "a", "b")
    dear, cheap = on("a", ready_s=99.0, room=31.0), on("b", room=10.0)
    (by_load,) = await board.book([wish("r1", cheap, dear, preference=Preference.LEAST_LOADED)])
    assert by_load.chosen == 1
    (in_order,) = await board.book([wish("r2", dear, cheap, preference=Preference.IN_ORDER)])
    assert in_order.chosen == 0
    (in_order,) = await board.book([wish("r3", on("a", allowance=0), cheap, preference=Preference.IN_ORDER)])
    assert in_order.chosen == 1


async def test_a_server_that_is_away_is_unavailable(redis_server: EmbeddedRedis) -> None:
    async with open_redis(redis_server.url) as redis:
        board = BookingBoard(redis, longest_s=10.0)
        redis_server.stop()
        with pytest.raises(Unavailable):
            await board.book([wish("r1", on("a"))])
