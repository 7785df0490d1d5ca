"""The cache feed against real engine processes, and against streams that real engines do not send."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client import REGISTRY

from headrace.api.common.v1 import sampling_pb2
from headrace.api.engine.v1 import engine_service_pb2 as pb
from headrace.api.engine.v1 import engine_service_pb2_grpc as rpc
from headrace.base.deadline import Deadline
from headrace.base.errors import HeadraceError
from headrace.base.prefix import PrefixKey
from headrace.cli.child import Child, Lifeline, free_port, kill_tree, python_module
from headrace.router.adapters import cache_feed
from headrace.router.adapters.cache_feed import CacheFeed, Life
from headrace.router.core.overlap import Overlap
from headrace.router.core.prefix_index import Heard, PrefixIndex
from headrace.router.core.replica import EngineId
from headrace.rpc.client import Peer
from headrace.testkit.eventually import eventually

A = EngineId("a")
KEY = "5a" * 32
BLOCK = 16
_tokens = itertools.count(1000)


class Engine:
    """One replica, simulated, in its own processes, on one address over its lives."""

    def __init__(self, folder: Path) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self._folder = folder
        self._lifeline = Lifeline()
        self._lives = 0
        self.start()

    def start(self) -> None:
        self._lives += 1
        settings = {"ENGINE_ID": "a", "BACKEND": "simulated", "ADDRESS": self.address, "SIMULATE_ITL_MS": "1"}
        self._child = Child(
            name="engine",
            command=python_module("headrace.engine"),
            environ={f"HEADRACE_ENGINE_{k}": v for k, v in settings.items()} | {"HEADRACE_PREFIX_CACHE_KEY": KEY},
            log_path=self._folder / f"engine-{self._lives}.log",
            lifeline=self._lifeline,
        )
        self._child.start()

    def kill(self) -> None:
        kill_tree(self._child.pid)
        assert self._child.wait(10)

    def close(self) -> None:
        self.kill()
        self._lifeline.cut()

    async def life(self) -> pb.Heartbeat:
        """What it says of itself, once it is ready."""
        async with Peer(self.address) as peer:

            async def ready() -> pb.Heartbeat | None:
                try:
                    stub: Any = rpc.EngineServiceStub(peer.channel)
                    answer = await peer.unary(stub.Describe, pb.DescribeRequest(), deadline=Deadline.after(2))
                except HeadraceError as error:
                    raise AssertionError(str(error)) from error
                return answer.heartbeat if answer.heartbeat.phase == pb.PHASE_READY else None

            return await eventually(ready, within_s=60)

    async def run(self, token_ids: list[int], tenant: str = "t1") -> int:
        """Answer one prompt, as a gateway would have it; how many of its tokens were cached."""
        submit = pb.Submit(slot=1, request_id="r", attempt=1, token_ids=token_ids, isolation_domain=tenant)
        submit.sampling.CopyFrom(sampling_pb2.SamplingParams(max_tokens=2, seed=1))

        async def requests() -> AsyncIterator[pb.AttachRequest]:
            yield pb.AttachRequest(hello=pb.Hello(gateway_id="g"))
            yield pb.AttachRequest(submit=submit)
            await asyncio.Event().wait()

        async with Peer(self.address) as peer:
            stub: Any = rpc.EngineServiceStub(peer.channel)
            async with peer.stream(stub.Attach, requests(), deadline=Deadline.after(20)) as responses:
                async for response in responses:
                    for finish in response.step.finishes:
                        return int(finish.cached_tokens)
        raise AssertionError("no finish")


def prompt(blocks: int) -> list[int]:
    """Tokens of so many full blocks and one more, unlike any other prompt's."""
    return [next(_tokens), *range(5, 5 + blocks * BLOCK)]


def chain(life: pb.Heartbeat, token_ids: list[int], tenant: str = "t1") -> list[bytes]:
    """The prompt's chain, as a gateway computes it."""
    key = PrefixKey.parse(KEY)
    root = key.root(bundle_digest=life.bundle_digest, adapter_digest="", isolation_domain=tenant)
    return key.chain(root, token_ids, life.block_size)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    running = Engine(tmp_path_factory.mktemp("engine"))
    try:
        yield running
    finally:
        running.close()


@contextlib.asynccontextmanager
async def a_feed(index: PrefixIndex | None = None) -> AsyncIterator[tuple[PrefixIndex, CacheFeed]]:
    index = index or PrefixIndex(100_000)
    feed = CacheFeed(index, first_retry_s=0.02, longest_retry_s=0.2)
    running = asyncio.create_task(feed.run())
    try:
        yield index, feed
    finally:
        await feed.close()
        running.cancel()
        await asyncio.wait({running})
        if not running.cancelled():
            running.result()


def blocks(index: PrefixIndex, hashes: list[bytes]) -> int:
    return index.overlap(hashes, time.monotonic()).of(A).blocks


def failures(why: str) -> float:
    return REGISTRY.get_sample_value("headrace_router_cache_feed_failures_total", {"why": why}) or 0.0


def events(kind: str) -> float:
    return REGISTRY.get_sample_value("headrace_router_cache_events_total", {"kind": kind}) or 0.0


async def test_what_an_engine_stores_is_found_by_the_gateways_chain_and_by_no_other_tenants(engine: Engine):
    life = await engine.life()
    tokens = prompt(6)
    async with a_feed() as (index, feed):
        feed.follow({A: Life(epoch=life.epoch, address=engine.address)})
        await eventually(lambda: not index.in_doubt(A))
        assert await engine.run(tokens) == 0
        hashes = chain(life, tokens)
        assert len(hashes) == 6
        await eventually(lambda: blocks(index, hashes) == 6)
        assert index.overlap(hashes, 0.0)[A] == Overlap(life.epoch, 6, 0)
        assert blocks(index, chain(life, tokens, tenant="t2")) == 0
        assert await engine.run(tokens) == 6 * BLOCK, "as the index said"


async def test_an_index_younger_than_its_engine_knows_from_the_snapshot_what_is_cached(engine: Engine):
    life = await engine.life()
    tokens = prompt(5)
    await engine.run(tokens)
    async with a_feed() as (index, feed):
        feed.follow({A: Life(epoch=life.epoch, address=engine.address)})
        await eventually(lambda: blocks(index, chain(life, tokens)) == 5)
        longer = [*tokens, *prompt(3)]
        await engine.run(longer)
        await eventually(lambda: blocks(index, chain(life, longer)) == 8)


async def test_an_engine_that_leaves_has_no_entries_also_after_late_events(engine: Engine):
    life = await engine.life()
    tokens = prompt(4)
    async with a_feed() as (index, feed):
        feed.follow({A: Life(epoch=life.epoch, address=engine.address)})
        await engine.run(tokens)
        await eventually(lambda: blocks(index, chain(life, tokens)) == 4)
        feed.follow({})
        assert (blocks(index, chain(life, tokens)), index.indexed_blocks(A)) == (0, 0)
        await engine.run(prompt(4))
        assert index.stored(A, life.epoch, chain(life, tokens), 10**9) is Heard.LATE
        await eventually(lambda: len(index) == 0)


async def test_a_restart_at_the_same_address_drops_the_old_blocks_and_brings_the_new(tmp_path: Path):
    engine = Engine(tmp_path)
    try:
        life = await engine.life()
        tokens, others = prompt(4), prompt(3)
        async with a_feed() as (index, feed):
            feed.follow({A: Life(epoch=life.epoch, address=engine.address)})
            await engine.run(tokens)
            await eventually(lambda: blocks(index, chain(life, tokens)) == 4)
            before = failures("other_epoch")
            engine.kill()
            await eventually(lambda: index.in_doubt(A))
            assert blocks(index, chain(life, tokens)) == 0
            engine.start()
            again = await engine.life()
            await engine.run(others)
            await eventually(lambda: failures("other_epoch") > before)
            assert index.in_doubt(A), "until the board says so, it is not the engine that was asked for"
            feed.follow({A: Life(epoch=again.epoch, address=engine.address)})
            await eventually(lambda: blocks(index, chain(again, others)) == 3)
            assert blocks(index, chain(life, tokens)) == 0
    finally:
        engine.close()


class Relay:
    """A TCP relay that can be cut."""

    def __init__(self, target: str) -> None:
        self._host, _, self._port = target.rpartition(":")
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.address = f"127.0.0.1:{free_port()}"

    async def start(self) -> None:
        host, _, port = self.address.rpartition(":")
        self._server = await asyncio.start_server(self._accept, host, int(port))

    async def cut(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(self._host, self._port)
        for source, sink in ((reader, back), (there, writer)):
            task = asyncio.create_task(self._pass(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pass(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(65536):
                sink.write(data)
        except ConnectionError:
            pass
        finally:
            sink.close()


async def test_a_cut_stream_is_counted_and_zero_reuse_and_goes_on_where_it_was(engine: Engine):
    life = await engine.life()
    tokens, meanwhile = prompt(4), prompt(3)
    relay = Relay(engine.address)
    await relay.start()
    async with a_feed() as (index, feed):
        feed.follow({A: Life(epoch=life.epoch, address=relay.address)})
        await engine.run(tokens)
        await eventually(lambda: blocks(index, chain(life, tokens)) == 4)
        cut, snapshots = failures("unreachable"), events("snapshot")
        await relay.cut()
        await eventually(lambda: failures("unreachable") > cut)
        assert (blocks(index, chain(life, tokens)), index.lives_in_doubt) == (0, 1)
        assert REGISTRY.get_sample_value("headrace_router_cache_lives_in_doubt") == 1.0
        await engine.run(meanwhile)
        await relay.start()
        await eventually(lambda: blocks(index, chain(life, meanwhile)) == 3)
        assert blocks(index, chain(life, tokens)) == 4
        await relay.cut()
        await eventually(lambda: index.in_doubt(A))
        await relay.start()
        await eventually(lambda: blocks(index, chain(life, tokens)) == 4)
        assert events("snapshot") == snapshots, "nothing was sent twice, also when there was no news"
    await relay.cut()


class Scripted(rpc.EngineServiceServicer):
    """An engine's cache events, said word for word."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []
        self.script: list[list[pb.SubscribeCacheEventsResponse]] = []

    async def SubscribeCacheEvents(
        self, request: pb.SubscribeCacheEventsRequest, context: Any
    ) -> AsyncIterator[pb.SubscribeCacheEventsResponse]:
        self.asked.append((request.epoch, request.sequence))
        for message in self.script.pop(0) if self.script else []:
            yield message
        await asyncio.Event().wait()


@contextlib.asynccontextmanager
async def scripted() -> AsyncIterator[tuple[Scripted, str]]:
    server, servicer = grpc.aio.server(), Scripted()
    rpc.add_EngineServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield servicer, f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


def said(sequence: int, epoch: int = 7, **event: Any) -> pb.SubscribeCacheEventsResponse:
    return pb.SubscribeCacheEventsResponse(epoch=epoch, sequence=sequence, **event)


def hashes(*numbers: int) -> list[bytes]:
    return [n.to_bytes(16, "big") for n in numbers]


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        (said(5, stored=pb.CacheStored(block_hashes=hashes(9))), "gap"),
        (said(3), "malformed"),
        (said(3, stored=pb.CacheStored(block_hashes=[b"short"])), "malformed"),
        (said(3, snapshot=pb.CacheSnapshot(block_hashes=[b""])), "malformed"),
    ],
)
async def test_what_cannot_be_followed_is_counted_and_mended_by_a_snapshot(
    broken: pb.SubscribeCacheEventsResponse, why: str
):
    async with scripted() as (engine, address), a_feed() as (index, feed):
        start = said(2, snapshot=pb.CacheSnapshot(block_hashes=hashes(1, 2)))
        engine.script = [[start, broken], [said(8, snapshot=pb.CacheSnapshot(block_hashes=hashes(1)))]]
        before = failures(why)
        feed.follow({A: Life(epoch=7, address=address)})
        await eventually(lambda: blocks(index, hashes(1, 2)) == 1)
        assert (failures(why) - before, engine.asked) == (1, [(0, 0), (0, 0)])


async def test_a_flush_leaves_nothing():
    async with scripted() as (engine, address), a_feed() as (index, feed):
        engine.script = [
            [
                said(2, snapshot=pb.CacheSnapshot(block_hashes=hashes(1, 2))),
                said(3, cleared=pb.CacheCleared()),
                said(4, stored=pb.CacheStored(block_hashes=hashes(1))),
            ]
        ]
        feed.follow({A: Life(epoch=7, address=address)})
        await eventually(lambda: blocks(index, hashes(1, 2)) == 1)
        assert index.indexed_blocks(A) == 1


async def test_an_engine_that_accepts_and_says_nothing_is_asked_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cache_feed, "FIRST_MESSAGE_S", 0.05)
    async with scripted() as (engine, address), a_feed() as (index, feed):
        engine.script = [[], [said(0, snapshot=pb.CacheSnapshot())]]
        before = failures("silent")
        feed.follow({A: Life(epoch=7, address=address)})
        await eventually(lambda: not index.in_doubt(A))
        assert failures("silent") > before


async def test_a_stream_that_always_breaks_is_asked_ever_more_rarely():
    async with scripted() as (engine, address):
        gap = [said(0, snapshot=pb.CacheSnapshot()), said(2, cleared=pb.CacheCleared())]
        engine.script = [list(gap) for _ in range(100)]
        feed = CacheFeed(PrefixIndex(100), first_retry_s=0.02, longest_retry_s=60.0)
        began = time.monotonic()
        feed.follow({A: Life(epoch=7, address=address)})
        await eventually(lambda: len(engine.asked) >= 5)
        # 20, 40, 80 and 160 ms, each shortened by half at most.
        assert time.monotonic() - began >= 0.15
        await feed.close()


async def test_a_snapshot_of_a_hundred_thousand_blocks_does_not_stop_the_event_loop():
    async with scripted() as (engine, address), a_feed(PrefixIndex(1_000_000)) as (index, feed):
        many = hashes(*(n * 0x9E3779B97F4A7C15F39CC0605CEDC835 % 2**128 for n in range(1, 100_001)))
        engine.script = [[said(1, snapshot=pb.CacheSnapshot(block_hashes=many))]]
        pauses = await longest_pauses(
            lambda: feed.follow({A: Life(epoch=7, address=address)}), lambda: index.indexed_blocks(A) == 100_000
        )
        # One message of 1.8 MB is parsed in one piece, on both sides here; what we do with it comes in slices.
        assert sorted(pauses)[-4] < 0.005, f"pauses of {[round(p * 1000, 1) for p in sorted(pauses)[-6:]]} ms"


async def longest_pauses(begin: Callable[[], None], done: Callable[[], bool]) -> list[float]:
    """Seconds of our own work in each turn of the event loop from `begin` until `done`."""
    pauses = []
    begin()
    until = time.monotonic() + 20
    last = time.thread_time()
    while not done():
        await asyncio.sleep(0)
        now = time.thread_time()  # what other processes do to this machine meanwhile is not ours
        pauses.append(now - last)
        last = now
        assert time.monotonic() < until
    return pauses


async def test_a_subscription_that_dies_ends_the_feed(monkeypatch: pytest.MonkeyPatch):
    async def broken(*args: object) -> None:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(CacheFeed, "_listen", broken)
    feed = CacheFeed(PrefixIndex(100))
    lives = {A: Life(epoch=7, address="127.0.0.1:9")}
    feed.follow(lives)
    running = asyncio.create_task(feed.run())

    def died() -> bool:
        feed.follow(lives)  # as the view loop does each period
        return running.done()

    await eventually(died)
    with pytest.raises(RuntimeError, match="a fault of ours"):
        running.result()
    await feed.close()
