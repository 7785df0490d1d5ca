"""The router with a real server and a real Redis: placements over gRPC, with heartbeats written by the test."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from headrace.api.engine.v1 import engine_service_pb2 as engine_pb
from headrace.api.routing.v1 import routing_service_pb2 as pb
from headrace.api.routing.v1.routing_service_pb2_grpc import RoutingServiceStub
from headrace.base.deadline import Deadline
from headrace.base.errors import Exhausted, InvalidRequest, NotFound, Unavailable
from headrace.coord.embedded import EmbeddedRedis
from headrace.coord.redis.replica_board import ReplicaBoard
from headrace.coord.redis.store import open_redis
from headrace.router.app import FULL_NAME, RouterApp
from headrace.router.settings import RouterSettings
from headrace.rpc.client import Peer

# The default bound is 10 s; the tests wait for it to pass, so theirs is shorter.
FRESHNESS_S = 1.5


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis.start(tmp_path_factory.mktemp("redis")) as server:
        yield server


class Fleet:
    """Engines as the router sees them: heartbeats in Redis, written every 50 ms while it answers."""

    def __init__(self, url: str) -> None:
        self.engines: dict[str, dict[str, Any]] = {}
        self._redis = open_redis(url)
        self.board = ReplicaBoard(self._redis)
        self._epoch = time.time_ns()
        self._sequence = 0

    def set(self, engine_id: str, **changes: Any) -> None:
        """Let an engine heartbeat with `changes` to an idle ready one."""
        self.engines[engine_id] = changes

    async def beat(self) -> None:
        self._sequence += 1
        for engine_id, changes in list(self.engines.items()):
            payload = changes.get("payload") or self._heartbeat(engine_id, changes).SerializeToString()
            await self.board.write(engine_id, self._epoch, self._sequence, payload)

    async def run(self) -> None:
        while True:
            with contextlib.suppress(Unavailable):
                await self.beat()
            await asyncio.sleep(0.05)

    async def close(self) -> None:
        with contextlib.suppress(Unavailable):
            for record in (await self.board.read()).records:
                await self.board.remove(record.engine_id, record.epoch)
        await self._redis.aclose()

    def _heartbeat(self, engine_id: str, changes: dict[str, Any]) -> engine_pb.Heartbeat:
        usual: dict[str, Any] = {
            "address": "127.0.0.1:1",
            "deployment": "chat",
            "bundle_digest": "sb-27",
            "phase": engine_pb.PHASE_READY,
            "free_blocks": 1024,
            "total_blocks": 1024,
            "block_size": 16,
            "max_model_len": 8192,
            "max_num_seqs": 32,
            "prefill_tokens_per_s": 500.0,
            "itl_ms": 22.0,
        }
        return engine_pb.Heartbeat(
            engine_id=engine_id, epoch=self._epoch, sequence=self._sequence, **{**usual, **changes}
        )


@contextlib.asynccontextmanager
async def a_fleet(url: str) -> AsyncIterator[Fleet]:
    fleet = Fleet(url)
    beating = asyncio.create_task(fleet.run())
    try:
        yield fleet
    finally:
        beating.cancel()
        await asyncio.wait({beating})
        await fleet.close()


@pytest.fixture
async def fleet(redis_server: EmbeddedRedis) -> AsyncIterator[Fleet]:
    async with a_fleet(redis_server.url) as fleet:
        yield fleet


class Client:
    """A gateway's side of RoutingService."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self._stub: Any = RoutingServiceStub(peer.channel)

    async def place(self, request_id: str = "req-1842", **changes: Any) -> pb.PlaceResponse:
        usual: dict[str, Any] = {"attempt": 1, "deployment": "chat", "bundle_digest": "sb-27"}
        sizes: dict[str, Any] = {"prompt_tokens": 140, "max_tokens": 80}
        request = pb.PlaceRequest(request_id=request_id, **{**usual, **sizes, **changes})
        return await self.peer.unary(self._stub.Place, request, deadline=Deadline.after(5))

    async def release(self, request_id: str, attempt: int) -> None:
        request = pb.ReleaseRequest(request_id=request_id, attempt=attempt)
        await self.peer.unary(self._stub.Release, request, deadline=Deadline.after(5))

    async def report(self, outcome: pb.ReleaseRequest) -> None:
        await self.peer.unary(self._stub.Release, outcome, deadline=Deadline.after(5))

    async def explain(self, request_id: str) -> pb.ExplainResponse:
        request = pb.ExplainRequest(request_id=request_id)
        return await self.peer.unary(self._stub.Explain, request, deadline=Deadline.after(5))

    async def replicas(self) -> dict[str, pb.Replica]:
        answer = await self.listed()
        return {r.heartbeat.engine_id: r for r in answer.replicas}

    async def listed(self) -> pb.ListReplicasResponse:
        return await self.peer.unary(self._stub.ListReplicas, pb.ListReplicasRequest(), deadline=Deadline.after(5))

    async def refusal(self, **changes: Any) -> Unavailable:
        with pytest.raises(Unavailable) as caught:
            await self.place(**changes)
        return caught.value

    async def healthy(self) -> bool:
        return await self.peer.healthy(FULL_NAME, deadline=Deadline.after(5))


@contextlib.asynccontextmanager
async def a_router(url: str, **settings: Any) -> AsyncIterator[Client]:
    usual: dict[str, Any] = {"etcd_endpoints": (), "freshness_s": FRESHNESS_S, "poll_period_s": 0.05}
    app = RouterApp(RouterSettings(redis_url=url, **{**usual, **settings}))
    await app.start()
    running = asyncio.create_task(app.run())
    try:
        async with Peer(app.address) as peer:
            yield Client(peer)
    finally:
        running.cancel()
        await asyncio.wait({running})
        await app.drain()


@pytest.fixture
async def client(redis_server: EmbeddedRedis, fleet: Fleet) -> AsyncIterator[Client]:
    async with a_router(redis_server.url) as client:
        await eventually(client.healthy)
        yield client


async def eventually(check: Callable[[], Awaitable[object]], *, within_s: float = 5.0) -> None:
    deadline = Deadline.after(within_s)
    while not await check():
        assert deadline.remaining_s() > 0, "it never came true"
        await asyncio.sleep(0.02)


def sees(client: Client, *engine_ids: str, fresh: bool = True) -> Callable[[], Awaitable[bool]]:
    async def check() -> bool:
        replicas = await client.replicas()
        return all(e in replicas and replicas[e].fresh is fresh for e in engine_ids)

    return check


async def test_a_quiet_replica_is_passed_over_as_stale_and_the_other_gets_the_request(fleet: Fleet, client: Client):
    fleet.set("A")
    fleet.set("B", itl_ms=44.0)
    await eventually(sees(client, "A", "B"))
    assert (await client.place()).engine_id == "A"

    del fleet.engines["A"]
    await eventually(sees(client, "A", fresh=False))
    placed = await client.place("req-1842", attempt=2)
    assert (placed.engine_id, placed.address) == ("B", "127.0.0.1:1")
    a, b = placed.considered
    assert (a.engine_id, a.verdict, b.verdict) == ("A", pb.VERDICT_STALE, pb.VERDICT_CHOSEN)
    assert a.age_s > FRESHNESS_S
    assert not a.HasField("estimate")
    assert b.estimate.total_s == pytest.approx(placed.estimate.total_s)
    assert not placed.degraded


async def test_the_last_view_serves_without_redis_until_the_bound_and_recovers_with_it(tmp_path: Path):
    with EmbeddedRedis.start(tmp_path) as redis:
        async with a_fleet(redis.url) as fleet, a_router(redis.url) as client:
            fleet.set("A")
            fleet.set("B")
            await eventually(client.healthy)
            await eventually(sees(client, "A", "B"))
            await asyncio.to_thread(redis.stop, grace_s=0.0)

            await eventually(lambda: _is_degraded(client))
            assert (await client.place("during")).degraded

            await eventually(sees(client, "A", "B", fresh=False))
            refusal = await client.refusal(request_id="late")
            assert (refusal.reason, refusal.retry_after_s) == ("ALL_STALE", 1.0)
            assert refusal.metadata["verdicts"] == "stale=2"
            assert refusal.metadata["degraded"] == "true"
            assert await client.healthy(), "it still decides; a restart would only lose the view"

            with await asyncio.to_thread(EmbeddedRedis.start, tmp_path, redis.port):
                await eventually(sees(client, "A", "B"))
                assert not (await client.place("after")).degraded


async def test_a_frozen_redis_degrades_placements_and_does_not_delay_them(
    redis_server: EmbeddedRedis, fleet: Fleet, client: Client
):
    fleet.set("A")
    await eventually(sees(client, "A"))
    os.kill(redis_server.pid, signal.SIGSTOP)
    try:
        await eventually(lambda: _is_degraded(client))
        started = time.monotonic()
        for _ in range(20):
            assert (await client.place()).engine_id == "A"
        # Waiting for the frozen Redis would take its 0.3 s timeout each time: 6 s.
        assert time.monotonic() - started < 3, "no placement waits for Redis"
    finally:
        os.kill(redis_server.pid, signal.SIGCONT)

    async def recovered() -> bool:
        return not await _is_degraded(client)

    await eventually(recovered)


async def _is_degraded(client: Client) -> bool:
    return (await client.listed()).degraded


async def test_a_router_that_never_reached_redis_is_not_healthy_and_says_so(tmp_path: Path):
    async with a_router("redis://127.0.0.1:1/0") as client:
        assert not await client.healthy()
        assert (await client.refusal()).reason == "NO_VIEW"


async def test_placements_do_not_need_telemetry(redis_server: EmbeddedRedis, fleet: Fleet):
    fleet.set("A")
    async with a_router(redis_server.url, otlp_endpoint="127.0.0.1:1") as client:
        await eventually(client.healthy)
        await eventually(sees(client, "A"))
        assert [(await client.place(f"r{i}")).engine_id for i in range(20)] == ["A"] * 20


async def test_an_empty_board_is_a_refusal_with_a_retry_hint(client: Client):
    refusal = await client.refusal()
    assert (refusal.reason, refusal.retry_after_s) == ("NO_REPLICA", 1.0)


async def test_a_prompt_beyond_every_context_is_the_clients_to_shorten(fleet: Fleet, client: Client):
    fleet.set("A", max_model_len=100)
    await eventually(sees(client, "A"))
    with pytest.raises(InvalidRequest) as caught:
        await client.place(prompt_tokens=140)
    assert (caught.value.field, caught.value.reason) == ("prompt", "CONTEXT_EXCEEDED")
    assert "100" in caught.value.message


async def test_a_bad_request_names_its_field_over_the_wire(client: Client):
    with pytest.raises(InvalidRequest) as caught:
        await client.place(attempt=0)
    assert caught.value.field == "attempt"


async def test_a_garbage_record_is_shown_counted_and_never_chosen(fleet: Fleet, client: Client):
    before = _metric("headrace_router_unreadable_records_total")
    fleet.set("A")
    fleet.set("broken", payload=b"\xff\xff\xff")
    await eventually(sees(client, "A"))
    await eventually(sees(client, "broken", fresh=False))
    assert (await client.place()).engine_id == "A"
    assert _metric("headrace_router_unreadable_records_total") > before
    assert _metric("headrace_router_replicas", state="unreadable") == 1.0


async def test_simultaneous_placements_spread_and_their_bookings_end_with_the_next_heartbeat(
    fleet: Fleet, client: Client
):
    for engine_id in ("A", "B", "C", "D"):
        fleet.set(engine_id)
    await eventually(sees(client, "A", "B", "C", "D"))
    placed = await asyncio.gather(*(client.place(f"s{i}") for i in range(8)))
    chosen = sorted(p.engine_id for p in placed)
    assert chosen == ["A", "A", "B", "B", "C", "C", "D", "D"]

    async def none_booked() -> bool:
        return all(r.bookings == 0 for r in (await client.replicas()).values())

    await eventually(none_booked)


async def test_releasing_twice_or_never_booked_is_no_error(fleet: Fleet, client: Client):
    fleet.set("A")
    await eventually(sees(client, "A"))
    await client.place("r1")
    for _ in range(2):
        await client.release("r1", 1)
    await client.release("unheard-of", 9)
    assert (await client.replicas())["A"].bookings == 0


async def test_a_replica_that_leaves_the_board_is_forgotten(fleet: Fleet, client: Client):
    fleet.set("A")
    fleet.set("B")
    await eventually(sees(client, "A", "B"))
    del fleet.engines["A"]

    async def gone() -> bool:
        await fleet.board.remove("A", (1 << 64) - 1)
        return (await client.replicas()).keys() == {"B"}

    await eventually(gone)


async def test_decisions_are_counted_by_outcome_and_verdict(fleet: Fleet, client: Client):
    fleet.set("A")
    fleet.set("B", phase=engine_pb.PHASE_WARMING)
    await eventually(sees(client, "A", "B"))
    placed, not_ready, seconds = (
        _metric("headrace_router_placements_total", outcome="placed"),
        _metric("headrace_router_verdicts_total", verdict="not_ready"),
        _metric("headrace_router_place_seconds_count"),
    )
    await client.place()
    assert _metric("headrace_router_placements_total", outcome="placed") == placed + 1
    assert _metric("headrace_router_verdicts_total", verdict="not_ready") == not_ready + 1
    assert _metric("headrace_router_place_seconds_count") == seconds + 1


async def test_a_router_that_starts_late_has_all_replicas_at_once(redis_server: EmbeddedRedis, fleet: Fleet):
    names = [f"e{n}" for n in range(8)]
    for engine_id in names:
        fleet.set(engine_id)
    await fleet.beat()
    started = time.monotonic()
    async with a_router(redis_server.url) as client:
        await eventually(client.healthy)
        await eventually(sees(client, *names))
        chosen = {(await client.place(f"r{n}")).engine_id for n in range(16)}
        assert time.monotonic() - started < 2
    assert chosen == set(names)


async def test_a_client_s_headers_and_fields_cannot_choose_the_policy(fleet: Fleet, client: Client):
    fleet.set("A")
    await eventually(sees(client, "A"))
    request = pb.PlaceRequest(
        request_id="r1", attempt=1, deployment="chat", bundle_digest="sb-27", prompt_tokens=9, max_tokens=9
    )
    headers = {"routing-strategy": "round_robin", "x-headrace-policy": "round_robin"}
    stub: Any = RoutingServiceStub(client.peer.channel)
    placed = await client.peer.unary(stub.Place, request, deadline=Deadline.after(5), metadata=headers)
    assert placed.policy == pb.POLICY_LEAST_COMPLETION_TIME


async def test_a_saturated_fleet_is_refused_over_the_wire_with_the_wait_and_free_again_after_a_release(
    fleet: Fleet, client: Client
):
    fleet.set("A", max_num_seqs=1)
    await eventually(sees(client, "A"))
    await client.place("r1", sequences=2)
    with pytest.raises(Exhausted) as caught:
        await client.place("r2")
    assert caught.value.reason == "SATURATED"
    assert caught.value.retry_after_s > 1
    await client.release("r1", 1)
    assert (await client.place("r2")).engine_id == "A"


async def test_two_deployments_have_a_saturation_of_their_own(fleet: Fleet, client: Client):
    fleet.set("A", running=32, waiting=40)
    fleet.set("B", deployment="other")
    await eventually(sees(client, "A", "B"))

    async def apart() -> bool:
        return (
            _metric("headrace_router_saturation", deployment="chat") == 1.0
            and _metric("headrace_router_saturation", deployment="other") == 0.0
        )

    await eventually(apart)


async def test_a_decision_is_explained_with_its_numbers_and_how_it_went(fleet: Fleet, client: Client):
    fleet.set("A")
    fleet.set("B", phase=engine_pb.PHASE_WARMING)
    await eventually(sees(client, "A", "B"))
    first = _metric("headrace_router_estimate_ratio_sum", deployment="chat", part="first_token")
    whole = _metric("headrace_router_estimate_ratio_sum", deployment="chat", part="total")
    placed = await client.place("told", block_hashes=b"h" * 16, block_size=16)
    e = placed.estimate
    outcome = pb.ReleaseRequest(
        request_id="told",
        attempt=1,
        outcome=pb.OUTCOME_OK,
        engine_id="A",
        epoch=placed.epoch,
        first_token_s=2 * (e.queue_s + e.prefill_s),
        total_s=3 * (e.queue_s + e.prefill_s + e.decode_s / 2),
        output_tokens=40,
    )
    await client.report(outcome)
    (decision,) = (await client.explain("told")).decisions
    assert decision.asked.prompt_tokens == 140
    assert not decision.asked.block_hashes
    assert decision.placed == placed
    assert [c.verdict for c in decision.placed.considered] == [pb.VERDICT_CHOSEN, pb.VERDICT_NOT_READY]
    assert decision.outcome == outcome
    grown = _metric("headrace_router_estimate_ratio_sum", deployment="chat", part="first_token") - first
    assert grown == pytest.approx(2.0)
    # 40 of the 80 tokens that were estimated for.
    grown = _metric("headrace_router_estimate_ratio_sum", deployment="chat", part="total") - whole
    assert grown == pytest.approx(3.0)


async def test_a_brief_answer_leaves_the_replicas_numbers_to_the_explanation(fleet: Fleet, client: Client):
    fleet.set("A")
    fleet.set("B", phase=engine_pb.PHASE_WARMING)
    await eventually(sees(client, "A", "B"))
    brief = await client.place("short", brief=True)
    assert (brief.engine_id, len(brief.considered)) == ("A", 0)
    (decision,) = (await client.explain("short")).decisions
    assert [c.verdict for c in decision.placed.considered] == [pb.VERDICT_CHOSEN, pb.VERDICT_NOT_READY]
    assert decision.placed.considered[0].estimate == brief.estimate


async def test_a_refusal_is_explained_too_and_what_is_not_remembered_is_not_found(fleet: Fleet, client: Client):
    fleet.set("A", phase=engine_pb.PHASE_WARMING)
    await eventually(sees(client, "A"))
    await client.refusal(request_id="refused")
    (decision,) = (await client.explain("refused")).decisions
    assert decision.refusal.startswith("NONE_READY")
    assert [c.verdict for c in decision.considered] == [pb.VERDICT_NOT_READY]
    with pytest.raises(NotFound):
        await client.explain("unheard-of")


async def test_the_oldest_decisions_are_forgotten_first(redis_server: EmbeddedRedis, fleet: Fleet):
    fleet.set("A")
    async with a_router(redis_server.url, remembered=2) as client:
        await eventually(sees(client, "A"))
        for request_id in ("r1", "r2", "r3"):
            await client.place(request_id)
        assert len((await client.explain("r3")).decisions) == 1
        with pytest.raises(NotFound):
            await client.explain("r1")


async def test_two_routers_list_each_others_bookings(redis_server: EmbeddedRedis, fleet: Fleet, client: Client):
    fleet.set("A")
    async with a_router(redis_server.url) as other:
        await eventually(sees(client, "A"))
        await eventually(sees(other, "A"))
        await other.place("r1", sequences=3)
        assert (await client.replicas())["A"].bookings == 3


def _metric(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0.0
