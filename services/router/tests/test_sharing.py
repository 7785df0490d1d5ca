"""Several routers on one real Redis: they share bookings, and do without when Redis is away."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from headrace.api.engine.v1 import engine_service_pb2 as engine_pb
from headrace.base.errors import Unavailable
from headrace.coord.embedded import EmbeddedRedis
from headrace.coord.redis.booking_board import BookingBoard, Terms
from headrace.coord.redis.booking_script import ARRIVAL_US, NEAR_TIE
from headrace.coord.redis.replica_board import ReplicaBoard
from headrace.coord.redis.store import open_redis
from headrace.router.adapters.booker import TIMEOUT_S, Booker, wish_of
from headrace.router.core import bookings, preference
from headrace.router.core.candidates import Candidate
from headrace.router.core.eligibility import Verdict
from headrace.router.core.estimate import NO_OVERLAP, Booked, Cost
from headrace.router.core.placement import Decision, Placed, Reason
from headrace.router.core.prefix_index import PrefixIndex
from headrace.router.core.replica import Attempt, AttemptKey, EngineId
from headrace.router.core.router import Router
from headrace.router.core.rules import Policy, Rules
from headrace.router.loops import ViewLoop
from headrace.router.placer import Placer

RULES = Rules(freshness_s=10.0)


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis.start(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
async def board(redis_server: EmbeddedRedis) -> AsyncIterator[ReplicaBoard]:
    async with open_redis(redis_server.url) as redis:
        await redis.flushall()
        yield ReplicaBoard(redis)


async def beat(board: ReplicaBoard, *engine_ids: str, sequence: int = 1) -> None:
    """One heartbeat of each: idle replicas with 32 slots."""
    for engine_id in engine_ids:
        heartbeat = engine_pb.Heartbeat(
            engine_id=engine_id,
            epoch=1,
            sequence=sequence,
            address="127.0.0.1:1",
            deployment="chat",
            bundle_digest="sb-27",
            phase=engine_pb.PHASE_READY,
            free_blocks=4096,
            total_blocks=4096,
            block_size=16,
            max_model_len=8192,
            max_num_seqs=32,
            prefill_tokens_per_s=500.0,
            itl_ms=22.0,
        )
        await board.write(engine_id, 1, sequence, heartbeat.SerializeToString())


class One:
    """A router without its server."""

    def __init__(self, url: str, name: str) -> None:
        self._redis = open_redis(url)
        self.router = Router(
            rules_of=lambda deployment: RULES,
            index=PrefixIndex(1000),
            chance=random.Random(name).random,
            longest_s=10.0,
        )
        self.booker = Booker(BookingBoard(self._redis, longest_s=10.0))
        self.view = ViewLoop(
            self.router,
            ReplicaBoard(self._redis),
            period_s=0.05,
            clock=time.monotonic,
            read=self.booker.close_breaker,
        )
        self.placer = Placer(self.router, self.booker, clock=time.monotonic)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[One]:
        """Its bookings are sent; its view is read once, as between two heartbeats."""
        await self.view.step()
        sending = asyncio.create_task(self.booker.run())
        try:
            yield self
        finally:
            sending.cancel()
            await asyncio.wait({sending})
            await self._redis.aclose()

    async def place(self, request_id: str, **changes: Any) -> Decision:
        return (await self.placer.place(attempt(request_id, **changes)))[0]


def attempt(request_id: str, **changes: Any) -> Attempt:
    usual: dict[str, Any] = {"deployment": "chat", "bundle_digest": "sb-27", "adapter": None}
    sizes: dict[str, Any] = {"prompt_tokens": 140, "max_tokens": 80}
    return Attempt(key=AttemptKey(request_id, 1), **{**usual, **sizes, **changes})


@asynccontextmanager
async def routers(url: str, count: int) -> AsyncIterator[list[One]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(One(url, f"router-{n}").running()) for n in range(count)]


async def burst(ones: Sequence[One], count: int) -> list[Decision]:
    return await asyncio.gather(*(ones[n % len(ones)].place(f"r{n}") for n in range(count)))


def spread(decisions: Sequence[Decision]) -> Counter[str]:
    return Counter(d.replica.engine_id for d in decisions if isinstance(d, Placed))


async def test_64_simultaneous_equal_requests_through_three_routers_leave_no_two_replicas_more_than_two_apart(
    redis_server: EmbeddedRedis, board: ReplicaBoard
):
    await beat(board, "a", "b", "c", "d")
    async with routers(redis_server.url, 3) as three:
        chosen = spread(await burst(three, 64))
    assert sum(chosen.values()) == 64
    assert max(chosen.values()) - min(chosen.values()) <= 2, chosen


async def test_a_burst_of_200_between_two_heartbeats_puts_nobody_above_the_threshold(
    redis_server: EmbeddedRedis, board: ReplicaBoard
):
    await beat(board, "a", "b", "c", "d")
    async with routers(redis_server.url, 3) as three:
        chosen = spread(await burst(three, 200))
    assert sum(chosen.values()) == 200
    assert max(chosen.values()) <= 64, "32 run and as many wait"


async def test_three_routers_never_book_more_than_there_is_and_refuse_the_rest_as_saturated(
    redis_server: EmbeddedRedis, board: ReplicaBoard
):
    await beat(board, "a", "b")
    async with routers(redis_server.url, 3) as three:
        decisions = await burst(three, 150)
    assert spread(decisions) == {"a": 64, "b": 64}
    refused = [d for d in decisions if not isinstance(d, Placed)]
    assert {d.reason for d in refused} == {Reason.SATURATED}
    assert len(refused) == 22
    assert all(d.wait_s is not None and d.wait_s > 1 for d in refused)
    assert {c.bookings for c in refused[-1].considered} == {64}


async def test_when_the_shortlist_is_taken_by_others_the_rest_of_the_fleet_is_asked(
    redis_server: EmbeddedRedis, board: ReplicaBoard
):
    fleet = [f"e{n:02}" for n in range(12)]
    await beat(board, *fleet)
    async with routers(redis_server.url, 2) as (first, second):
        # The first fills ten of twelve; the second knows nothing of it.
        for n in range(10):
            await first.place(f"big{n}", sequences=64)
        left = {e for e in fleet if not first.router.bookings.on(e).sequences}
        chosen = {(await second.place(f"r{n}")).replica.engine_id for n in range(20)}
    assert chosen == left


async def test_a_replica_that_left_the_board_since_the_last_look_is_not_chosen(
    redis_server: EmbeddedRedis, board: ReplicaBoard
):
    await beat(board, "a", "b")
    async with routers(redis_server.url, 1) as (one,):
        await board.remove("a", 1)
        decision = await one.place("r1")
        assert isinstance(decision, Placed)
        assert [c.verdict for c in decision.considered] == [Verdict.STALE, Verdict.CHOSEN]


async def test_a_release_at_another_router_frees_the_place(redis_server: EmbeddedRedis, board: ReplicaBoard):
    await beat(board, "a")
    async with routers(redis_server.url, 2) as (first, second):
        await first.place("big", sequences=64)
        assert (await second.place("r1")).reason is Reason.SATURATED
        second.booker.release(AttemptKey("big", 1))
        assert isinstance(await second.place("r1"), Placed)


async def test_whoever_gives_up_waiting_leaves_no_booking(redis_server: EmbeddedRedis, board: ReplicaBoard):
    await beat(board, "a")
    async with routers(redis_server.url, 1) as (one,):
        placing = asyncio.create_task(one.place("gone"))
        await asyncio.sleep(0)
        placing.cancel()
        await asyncio.wait({placing})
        await one.place("r1")
        await one.place("r2")
        assert (await one.booker.look([("a", 1)]))["a"].sequences == 2


async def test_without_redis_one_batch_pays_the_timeout_and_the_rest_decide_at_once_and_still_spread(
    tmp_path: Path,
):
    with EmbeddedRedis.start(tmp_path) as server:
        async with open_redis(server.url) as redis:
            await beat(ReplicaBoard(redis), "a", "b", "c", "d")
        async with routers(server.url, 1) as (one,):
            assert isinstance(await one.place("before"), Placed)
            os.kill(server.pid, signal.SIGSTOP)
            try:
                started = time.monotonic()
                decisions = [await one.placer.place(attempt(f"r{n}")) for n in range(40)]
                took_s = time.monotonic() - started
            finally:
                os.kill(server.pid, signal.SIGCONT)
            assert took_s < 2 * TIMEOUT_S + 1
            assert all(isinstance(d, Placed) and degraded for d, degraded in decisions)
            chosen = spread([d for d, _ in decisions])
            assert max(chosen.values()) - min(chosen.values()) <= 2, chosen

            await one.view.step()
            decision, degraded = await one.placer.place(attempt("after"))
            assert isinstance(decision, Placed)
            assert not degraded


async def test_refusals_while_redis_is_away_keep_nothing_of_those_before(redis_server: EmbeddedRedis):
    async with routers(redis_server.url, 1) as (one,):
        one.booker.open = True
        depths = []
        for number in range(20):
            with pytest.raises(Unavailable) as refused:
                await one.booker.book(attempt(f"r{number}"), [], RULES, 0.5)
            depths.append(len(list(traceback.walk_tb(refused.value.__traceback__))))
    assert len(set(depths)) == 1


async def test_a_burst_that_waited_for_a_redis_in_vain_spreads_too(tmp_path: Path):
    with EmbeddedRedis.start(tmp_path) as server:
        async with open_redis(server.url) as redis:
            await beat(ReplicaBoard(redis), "a", "b", "c", "d")
        async with routers(server.url, 1) as (one,):
            os.kill(server.pid, signal.SIGSTOP)
            try:
                decisions = await burst([one], 100)
            finally:
                os.kill(server.pid, signal.SIGCONT)
        chosen = spread(decisions)
        assert sum(chosen.values()) == 100
        assert max(chosen.values()) - min(chosen.values()) <= 2, chosen


async def test_a_redis_that_came_back_empty_is_bridged_by_the_last_view(tmp_path: Path):
    with EmbeddedRedis.start(tmp_path) as server:
        async with open_redis(server.url) as redis:
            await beat(ReplicaBoard(redis), "a")
        async with routers(server.url, 1) as (one,):
            await asyncio.to_thread(server.stop, grace_s=0.0)
            await one.view.step()
            with await asyncio.to_thread(EmbeddedRedis.start, tmp_path, server.port):
                await one.view.step()
                assert not one.router.view.degraded
                decision, degraded = await one.placer.place(attempt("r1"))
                assert isinstance(decision, Placed)
                assert degraded


def test_the_two_sides_agree_on_the_terms_and_constants():
    assert Cost._fields == Terms._fields
    assert preference.NEAR_TIE == NEAR_TIE
    assert bookings.ARRIVAL_S * 1e6 == ARRIVAL_US


def a_cost(chance: random.Random) -> Cost:
    """From few values, so that ties are as frequent as clear cases."""
    return Cost(
        ready_s=chance.choice([0.0, 0.0, chance.uniform(0, 5)]),
        token_s=chance.choice([0.0002, 0.002]),
        prefill_s=chance.choice([0.2, 0.21, chance.uniform(0.001, 2)]),
        itl_s=chance.choice([0.01, 0.02, 0.0205]),
        growth_s=chance.choice([0.0, 0.001]),
        room=float(chance.choice([31, 31, chance.randint(-8, 31)])),
        full=chance.choice([8.0, 32.0]),
        later_tokens=chance.choice([0.0, 79.0]),
        neighbour_tokens=128.0,
        spare_blocks=float(chance.choice([500, 500, chance.randint(-20, 500)])),
        block_size=16.0,
        total_blocks=512.0,
        credit_s=chance.choice([0.0, 0.0, 0.5]),
    )


async def test_redis_and_the_router_alone_choose_alike(a_replica, redis_server: EmbeddedRedis, board: ReplicaBoard):
    names = [f"e{n}" for n in range(6)]
    async with Redis.from_url(redis_server.url) as redis:
        shared = BookingBoard(redis, longest_s=60.0)
        for seed in range(80):
            chance = random.Random(seed)
            await redis.flushall()
            await beat(board, *names)
            candidates = [
                Candidate(
                    replica=a_replica(name),
                    age_s=0.0,
                    cost=a_cost(chance),
                    overlap=NO_OVERLAP,
                    ramp=1.0,
                    allowance=99,
                    booked=Booked(),
                    uncached_tokens=chance.randint(1, 900),
                )
                for name in names[: chance.randint(1, 6)]
            ]
            rules = Rules(freshness_s=60.0, policy=chance.choice(list(Policy)))
            for n in range(chance.randint(0, 6)):
                one, sequences = chance.choice(candidates), chance.randint(1, 9)
                await shared.book([wish_of(attempt(f"b{n}", sequences=sequences), [one], rules, 0.0)])
                one.booked = Booked(
                    sequences=one.booked.sequences + sequences,
                    prompt_tokens=one.booked.prompt_tokens + one.uncached_tokens,
                )
            tie = chance.random()
            (answer,) = await shared.book([wish_of(attempt("r"), candidates, rules, tie)])
            seen = [Booked(sequences=s.sequences, prompt_tokens=s.tokens) for s in answer.seen]
            assert seen == [c.booked for c in candidates]
            assert answer.chosen is not None
            assert candidates[answer.chosen] is preference.choose(candidates, rules.policy, tie), seed


@pytest.mark.parametrize("known_blocks", [0, 20])
async def test_siblings_that_arrive_at_the_same_moment_meet_where_the_first_of_them_goes(
    redis_server: EmbeddedRedis, board: ReplicaBoard, known_blocks: int
):
    await beat(board, "a", "b", "c", "d")
    shared = [bytes([n]) * 16 for n in range(64)]
    async with routers(redis_server.url, 1) as (one,):
        for engine_id in "abcd":
            one.router.index.begin(EngineId(engine_id), 1)
            one.router.index.snapshot(EngineId(engine_id), 1, shared[:known_blocks], 0)
        own = [bytes([100 + n]) * 16 for n in range(16)]
        siblings = (one.place(f"r{n}", hashes=[*shared, own[n]], block_size=16, prompt_tokens=1040) for n in range(16))
        chosen = spread(await asyncio.gather(*siblings))
    assert len(chosen) == 1, chosen


async def test_the_next_sibling_goes_on_when_the_first_is_cancelled(redis_server: EmbeddedRedis, board: ReplicaBoard):
    await beat(board, "a", "b")
    sizes: dict[str, Any] = {"hashes": [bytes([n]) * 16 for n in range(64)], "block_size": 16, "prompt_tokens": 1056}
    async with routers(redis_server.url, 1) as (one,):
        first, second = (asyncio.create_task(one.place(f"r{n}", **sizes)) for n in range(2))
        await asyncio.sleep(0)
        first.cancel()
        async with asyncio.timeout(5):
            assert isinstance(await second, Placed)
