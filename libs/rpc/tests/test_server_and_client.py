"""A real server and a real client, over loopback, with a tiny service on a generated contract."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from opentelemetry import trace

from headrace.api.engine.v1 import engine_service_pb2 as engine_pb2
from headrace.api.engine.v1 import engine_service_pb2_grpc as engine_grpc
from headrace.api.routing.v1 import routing_service_pb2 as routing_pb2
from headrace.api.routing.v1 import routing_service_pb2_grpc as routing_grpc
from headrace.base.deadline import Deadline
from headrace.base.errors import (
    DeadlinePassed,
    Exhausted,
    InternalError,
    InvalidRequest,
    ReaderStalled,
    StartError,
    StreamBroken,
    Unavailable,
)
from headrace.observe.tracing import Tracing
from headrace.rpc.client import Peer
from headrace.rpc.context import CallContext, current_call, enter_call
from headrace.rpc.server import Server, ServerSettings
from headrace.rpc.status import TRANSPORT

ROUTING = "headrace.api.routing.v1.RoutingService"


class Routing(routing_grpc.RoutingServiceServicer):
    """Raises or answers what the test put into `outcome`; remembers the call it saw."""

    def __init__(self) -> None:
        self.outcome: Exception | None = None
        self.seen: list[CallContext] = []
        self.traces: list[int] = []
        self.hold_s = 0.0
        self.cancelled = asyncio.Event()

    async def Place(self, request: routing_pb2.PlaceRequest, context: Any) -> routing_pb2.PlaceResponse:
        self.seen.append(current_call())
        self.traces.append(trace.get_current_span().get_span_context().trace_id)
        try:
            await asyncio.sleep(self.hold_s)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        if self.outcome is not None:
            raise self.outcome
        return routing_pb2.PlaceResponse(engine_id="e-1")


class Engine(engine_grpc.EngineServiceServicer):
    """Streams three events, then does what the test asked for."""

    def __init__(self) -> None:
        self.outcome: Exception | None = None
        self.ended = asyncio.Event()

    async def Generate(self, request: engine_pb2.GenerateRequest, context: Any) -> AsyncIterator[Any]:
        try:
            for _ in range(3):
                yield engine_pb2.GenerateResponse()
            if self.outcome is not None:
                raise self.outcome
            await asyncio.sleep(30)
        finally:
            self.ended.set()


@pytest.fixture
async def stack() -> AsyncIterator[tuple[Server, Peer, Routing, Engine]]:
    tracing = Tracing("test", "test", None)
    await tracing.start()
    server = Server(ServerSettings(grace_s=0.5), service_name="test")
    routing, engine = Routing(), Engine()
    server.add(routing_grpc.add_RoutingServiceServicer_to_server, routing, ROUTING)
    server.add(engine_grpc.add_EngineServiceServicer_to_server, engine, "headrace.api.engine.v1.EngineService")
    address = await server.start()
    peer = Peer(address)
    yield server, peer, routing, engine
    await peer.close()
    await server.drain(0)
    await tracing.shutdown()


def place(peer: Peer) -> Any:
    return routing_grpc.RoutingServiceStub(peer.channel).Place


async def test_each_domain_error_arrives_as_itself_with_its_facts(stack: Any) -> None:
    _, peer, routing, _ = stack
    routing.outcome = InvalidRequest("sampling.top_p", "must be in (0, 1]")
    with pytest.raises(InvalidRequest) as invalid:
        await peer.unary(place(peer), routing_pb2.PlaceRequest(), deadline=Deadline.after(5))
    assert (invalid.value.field, invalid.value.why) == ("sampling.top_p", "must be in (0, 1]")
    assert invalid.value.metadata["request_id"]
    routing.outcome = Unavailable("none", reason="ALL_STALE", retry_after_s=0.25, metadata={"stale": "2"})
    with pytest.raises(Unavailable) as away:
        await peer.unary(place(peer), routing_pb2.PlaceRequest(), deadline=Deadline.after(5))
    assert (away.value.reason, away.value.retry_after_s) == ("ALL_STALE", 0.25)
    assert away.value.metadata["stale"] == "2"
    routing.outcome = Exhausted("full", reason="QUEUE_FULL")
    with pytest.raises(Exhausted, match="full"):
        await peer.unary(place(peer), routing_pb2.PlaceRequest(), deadline=Deadline.after(5))


async def test_a_bug_becomes_internal_with_a_request_id_and_no_text_of_the_bug(stack: Any) -> None:
    _, peer, routing, _ = stack
    routing.outcome = KeyError("secret detail")
    with pytest.raises(InternalError) as bug:
        await peer.unary(
            place(peer), routing_pb2.PlaceRequest(), deadline=Deadline.after(5), metadata={"x-request-id": "req-7"}
        )
    assert "secret" not in bug.value.message
    assert bug.value.metadata["request_id"] == "req-7"


async def test_a_broken_stream_says_how_many_tokens_it_had_emitted(stack: Any) -> None:
    _, peer, _, engine = stack
    engine.outcome = StreamBroken("gone", tokens_emitted=3)
    stub = engine_grpc.EngineServiceStub(peer.channel)
    seen = 0
    with pytest.raises(StreamBroken) as broken:
        async with peer.stream(stub.Generate, engine_pb2.GenerateRequest(), deadline=Deadline.after(5)) as events:
            async for _ in events:
                seen += 1
    assert seen == 3
    assert broken.value.metadata["tokens_emitted"] == "3"


async def test_leaving_the_stream_block_cancels_the_handler(stack: Any) -> None:
    server, peer, _, engine = stack
    stub = engine_grpc.EngineServiceStub(peer.channel)
    async with peer.stream(stub.Generate, engine_pb2.GenerateRequest(), deadline=Deadline.after(30)) as events:
        async for _ in events:
            break
    await asyncio.wait_for(engine.ended.wait(), 1)
    while server.in_flight:
        await asyncio.sleep(0.005)


async def test_deadline_and_ids_reach_the_handler(stack: Any) -> None:
    _, peer, routing, _ = stack
    with trace.get_tracer("test").start_as_current_span("client") as span:
        await peer.unary(
            place(peer), routing_pb2.PlaceRequest(), deadline=Deadline.after(7), metadata={"x-request-id": "r-1"}
        )
    call = routing.seen[-1]
    assert call.request_id == "r-1"
    assert 5 < call.deadline.remaining_s() < 7.5  # the wire rounds up
    assert routing.traces[-1] == span.get_span_context().trace_id


@pytest.mark.parametrize("timeout", [None, 1e9])
async def test_a_call_without_a_real_deadline_gets_the_servers_own(stack: Any, timeout: float | None) -> None:
    _, peer, routing, _ = stack
    await place(peer)(routing_pb2.PlaceRequest(), timeout=timeout)
    assert 290 < routing.seen[-1].deadline.remaining_s() <= 300


async def test_the_request_id_goes_along_with_calls_made_for_it(stack: Any) -> None:
    _, peer, routing, _ = stack
    enter_call(CallContext(request_id="r-9", deadline=Deadline.after(5), peer="", metadata={}))
    await peer.unary(place(peer), routing_pb2.PlaceRequest(), deadline=Deadline.after(5))
    assert routing.seen[-1].request_id == "r-9"


async def test_an_ill_formed_request_id_is_replaced(stack: Any) -> None:
    _, peer, routing, _ = stack
    for bad in ("x" * 65, "a b", "a/b"):
        await peer.unary(
            place(peer), routing_pb2.PlaceRequest(), deadline=Deadline.after(5), metadata={"x-request-id": bad}
        )
        assert routing.seen[-1].request_id != bad
        assert len(routing.seen[-1].request_id) == 26


async def test_a_passed_deadline_is_reported_without_calling(stack: Any) -> None:
    _, peer, routing, _ = stack
    with pytest.raises(DeadlinePassed):
        await peer.unary(place(peer), routing_pb2.PlaceRequest(), deadline=Deadline.after(-1))
    assert routing.seen == []


async def test_a_deadline_that_passes_during_the_call_cancels_the_handler(stack: Any) -> None:
    _, peer, routing, _ = stack
    routing.hold_s = 30
    with pytest.raises(DeadlinePassed):
        await peer.unary(place(peer), routing_pb2.PlaceRequest(), deadline=Deadline.after(0.1))
    await asyncio.wait_for(routing.cancelled.wait(), 1)


async def test_an_absent_peer_is_unavailable_by_transport() -> None:
    async with Peer("127.0.0.1:9") as peer:
        with pytest.raises(Unavailable) as away:
            await peer.unary(place(peer), routing_pb2.PlaceRequest(), deadline=Deadline.after(5))
    assert away.value.reason == TRANSPORT


async def test_health_follows_serving_and_covers_each_service(stack: Any) -> None:
    server, peer, _, _ = stack
    assert not await peer.healthy(ROUTING, deadline=Deadline.after(2))
    await server.set_serving(True)
    assert await peer.healthy(ROUTING, deadline=Deadline.after(2))
    assert await peer.healthy("", deadline=Deadline.after(2))


async def test_drain_waits_for_running_calls_and_not_for_idle_health_watches(stack: Any) -> None:
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    server, peer, routing, _ = stack
    watch = health_pb2_grpc.HealthStub(peer.channel).Watch(health_pb2.HealthCheckRequest(service=""))
    await watch.read()
    routing.hold_s = 0.2
    running = asyncio.ensure_future(peer.unary(place(peer), routing_pb2.PlaceRequest(), deadline=Deadline.after(5)))
    while not server.in_flight:
        await asyncio.sleep(0.005)
    started = time.monotonic()
    await server.drain(5)
    assert (await running).engine_id == "e-1"
    assert time.monotonic() - started < 2
    watch.cancel()


async def test_a_draining_server_refuses_new_calls_while_old_ones_finish(stack: Any) -> None:
    server, peer, routing, _ = stack
    routing.hold_s = 0.3
    running = asyncio.ensure_future(peer.unary(place(peer), routing_pb2.PlaceRequest(), deadline=Deadline.after(5)))
    while not server.in_flight:
        await asyncio.sleep(0.005)
    draining = asyncio.ensure_future(server.drain(5))
    await asyncio.sleep(0.05)
    with pytest.raises(Unavailable) as late:
        await peer.unary(place(peer), routing_pb2.PlaceRequest(), deadline=Deadline.after(5))
    assert late.value.reason == "DRAINING"
    assert (await running).engine_id == "e-1"
    await draining


async def test_drain_cuts_calls_that_outlive_the_grace(stack: Any) -> None:
    server, peer, routing, _ = stack
    routing.hold_s = 30
    running = asyncio.ensure_future(peer.unary(place(peer), routing_pb2.PlaceRequest(), deadline=Deadline.after(60)))
    while not server.in_flight:
        await asyncio.sleep(0.005)
    await server.drain(0.2)
    with pytest.raises((Unavailable, DeadlinePassed)):
        await running


async def test_a_taken_port_is_one_clear_line() -> None:
    first = Server(ServerSettings(), service_name="a")
    address = await first.start()
    second = Server(ServerSettings(address=address), service_name="b")
    with pytest.raises(StartError, match="port is taken"):
        await second.start()
    await first.drain(0)
    for malformed in ("7000", "127.0.0.1:", "127.0.0.1:99999", ":7000"):
        with pytest.raises(StartError, match="host:port"):
            await Server(ServerSettings(address=malformed), service_name="c").start()


async def test_status_codes_on_the_wire_are_grpcs_own(stack: Any) -> None:
    _, peer, routing, _ = stack
    routing.outcome = Unavailable("x", retry_after_s=1)
    with pytest.raises(grpc.aio.AioRpcError) as raw:
        await place(peer)(routing_pb2.PlaceRequest(), timeout=5)
    assert raw.value.code() is grpc.StatusCode.UNAVAILABLE


class Flood(engine_grpc.EngineServiceServicer):
    """Streams without end, as fast as it is taken."""

    def __init__(self) -> None:
        self.sent = 0
        self.ended = asyncio.Event()

    async def Generate(self, request: engine_pb2.GenerateRequest, context: Any) -> AsyncIterator[Any]:
        event = engine_pb2.GenerateResponse()
        event.delta.text = "x" * 4000
        try:
            while True:
                yield event
                self.sent += 1
                await asyncio.sleep(0)
        finally:
            self.ended.set()


async def test_a_client_that_takes_nothing_is_cut_off_and_told_why() -> None:
    server = Server(ServerSettings(grace_s=0.5, stalled_reader_s=0.3), service_name="test")
    flood = Flood()
    server.add(engine_grpc.add_EngineServiceServicer_to_server, flood, "headrace.api.engine.v1.EngineService")
    peer = Peer(await server.start())
    stub = engine_grpc.EngineServiceStub(peer.channel)
    request = engine_pb2.GenerateRequest()
    with pytest.raises(ReaderStalled, match="0\\.3 s"):
        async with peer.stream(stub.Generate, request, deadline=Deadline.after(20)) as events:
            await anext(events)
            async with asyncio.timeout(10):
                await flood.ended.wait()
            held = flood.sent * 4000
            async for _ in events:
                pass
    assert held < 32 << 20, "what nobody reads must not be made without bound"
    assert server.in_flight == 0
    await peer.close()
    await server.drain(0)


async def test_a_client_that_reads_slowly_is_served_to_the_end() -> None:
    server = Server(ServerSettings(grace_s=0.5, stalled_reader_s=0.3), service_name="test")
    flood = Flood()
    server.add(engine_grpc.add_EngineServiceServicer_to_server, flood, "headrace.api.engine.v1.EngineService")
    peer = Peer(await server.start())
    stub = engine_grpc.EngineServiceStub(peer.channel)
    began = time.monotonic()
    async with peer.stream(stub.Generate, engine_pb2.GenerateRequest(), deadline=Deadline.after(20)) as events:
        async for _ in events:
            if time.monotonic() - began > 1.0:
                break
            await asyncio.sleep(0.0001)
    assert flood.sent > 100
    await peer.close()
    await server.drain(0)
