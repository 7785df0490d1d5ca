"""The engines' cache events, brought to the prefix index: one stream per engine life on the board.

A stream that breaks puts its life in doubt at once and is opened again where it was, by asking for the last event once
more: an engine without news would otherwise leave it open whether it is listening. A gap, or anything that is not
understood, is mended by a snapshot. All of it is counted; until it is mended the engine counts as one with nothing
cached.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from headrace.api.engine.v1 import engine_service_pb2 as pb
from headrace.api.engine.v1.engine_service_pb2_grpc import EngineServiceStub
from headrace.base.backoff import Backoff
from headrace.base.deadline import Deadline
from headrace.base.errors import HeadraceError
from headrace.base.prefix import HASH_BYTES
from headrace.observe.log import get_logger
from headrace.observe.metrics import counter, gauge
from headrace.router.core.prefix_index import SLICE, Heard, PrefixIndex
from headrace.router.core.replica import EngineId
from headrace.rpc.client import Peer
from headrace.rpc.status import TRANSPORT

log = get_logger(__name__)

FIRST_MESSAGE_S = 5.0
"""An engine answers a subscription at once, with a snapshot or the last event; later silences are keepalive's."""

_FAILURES = counter("headrace_router_cache_feed_failures_total", "Cache-event streams that ended, by why.", ("why",))
_EVENTS = counter("headrace_router_cache_events_total", "Cache events received, by kind.", ("kind",))
_DOUBT = gauge("headrace_router_cache_lives_in_doubt", "Replicas whose cached prefixes are not known at present.")
_FOLLOWED = gauge("headrace_router_cache_lives", "Replicas whose cache events are followed.")
_INDEXED = gauge("headrace_router_prefix_index_blocks", "Blocks in the prefix index.")
_PREDICTED = gauge("headrace_router_prefix_index_predicted_blocks", "Blocks predicted from placements.")
_EVICTED = counter("headrace_router_prefix_index_evicted_blocks_total", "Blocks that had to leave the full index.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """One life of an engine, and where it listens."""

    epoch: int
    address: str


class Why(Enum):
    """Why a stream ended."""

    ENDED = "ended"  # by the engine, which is about to leave
    REFUSED = "refused"  # it is not ready, or knows no such call
    UNREACHABLE = "unreachable"
    SILENT = "silent"
    OTHER_EPOCH = "other_epoch"  # somebody else listens there now; the board will tell
    GAP = "gap"
    MALFORMED = "malformed"


class _StreamEnd(Exception):
    def __init__(self, why: Why, detail: str = "") -> None:
        super().__init__(detail)
        self.why = why
        self.detail = detail


class CacheFeed:
    """Keeps `index` at what the followed engines say. Belongs to one event loop."""

    def __init__(
        self,
        index: PrefixIndex,
        *,
        clock: Callable[[], float] = time.monotonic,
        first_retry_s: float = 0.1,
        longest_retry_s: float = 2.0,
    ) -> None:
        self._index = index
        self._clock = clock
        self._retry_s = (first_retry_s, longest_retry_s)
        self._streams: dict[EngineId, tuple[Life, asyncio.Task[None]]] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._woken = asyncio.Event()
        self._evicted = 0

    def follow(self, lives: Mapping[EngineId, Life]) -> None:
        """These are all lives on the board: new ones are subscribed to, others are forgotten at once."""
        for engine_id in [e for e, (life, _) in self._streams.items() if lives.get(e) != life]:
            self._leave(engine_id)
            if engine_id not in lives:
                self._index.forget(engine_id)
        for engine_id, life in lives.items():
            if engine_id not in self._streams:
                self._index.begin(engine_id, life.epoch)
                task = asyncio.create_task(self._stay_subscribed(engine_id, life), name=f"cache-feed-{engine_id}")
                self._streams[engine_id] = life, task
        self._show()
        self._woken.set()

    async def run(self) -> None:
        """Keep the index tidy until cancelled; raises what a subscription died of, for that is a fault of ours."""
        while True:
            await self._woken.wait()
            self._woken.clear()
            for _, task in self._streams.values():
                if task.done():
                    task.result()
            while self._index.tidy(self._clock()):
                await asyncio.sleep(0)  # a part at a time, under 1 ms each: placements go in between

    async def close(self) -> None:
        """End every stream; every engine is forgotten."""
        for engine_id in list(self._streams):
            self._leave(engine_id)
            self._index.forget(engine_id)
        if self._ending:
            await asyncio.wait(self._ending)
        self._show()

    def _leave(self, engine_id: EngineId) -> None:
        life, task = self._streams.pop(engine_id)
        self._index.suspend(engine_id, life.epoch)
        task.cancel()
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    def _show(self) -> None:
        _FOLLOWED.set(len(self._streams))
        _DOUBT.set(self._index.lives_in_doubt)
        _INDEXED.set(len(self._index))
        _PREDICTED.set(self._index.predicted_blocks)
        _EVICTED.inc(self._index.evicted - self._evicted)
        self._evicted = self._index.evicted

    async def _stay_subscribed(self, engine_id: EngineId, life: Life) -> None:
        first_s, longest_s = self._retry_s
        backoff = Backoff(first_s=first_s, longest_s=longest_s)
        async with Peer(life.address) as peer:
            while True:
                began_at = self._clock()
                try:
                    await self._listen(peer, engine_id, life)
                except _StreamEnd as end:
                    self._broke(engine_id, life, end)
                # Not at the first message: one that breaks after it every time must not be asked ten times a second.
                if self._clock() - began_at > longest_s:
                    backoff.reset()
                await asyncio.sleep(backoff.next_s())

    def _broke(self, engine_id: EngineId, life: Life, end: _StreamEnd) -> None:
        self._index.suspend(engine_id, life.epoch, resumable=end.why is not Why.MALFORMED)
        self._show()
        _FAILURES.labels(end.why.value).inc()
        log.info("cache_feed_broke", engine=engine_id, epoch=life.epoch, why=end.why.value, detail=end.detail)

    async def _listen(self, peer: Peer, engine_id: EngineId, life: Life) -> None:
        """One stream, to its end: always a _StreamEnd."""
        stub: Any = EngineServiceStub(peer.channel)
        position = self._index.position(engine_id, life.epoch)
        request = pb.SubscribeCacheEventsRequest()
        if position:  # the last one again; before the first there is none, and a snapshot of next to nothing does it
            request.epoch, request.sequence = life.epoch, position - 1
        try:
            async with peer.stream(stub.SubscribeCacheEvents, request, deadline=Deadline.never()) as messages:
                await self._take(await _first(messages), engine_id, life)
                blocks = self._index.indexed_blocks(engine_id)
                log.info("cache_feed_began", engine=engine_id, epoch=life.epoch, blocks=blocks)
                async for message in messages:
                    await self._take(message, engine_id, life)
        except HeadraceError as error:
            why = Why.UNREACHABLE if error.reason == TRANSPORT else Why.REFUSED
            raise _StreamEnd(why, f"{error.reason}: {error.message}") from error
        raise _StreamEnd(Why.ENDED)

    async def _take(self, message: pb.SubscribeCacheEventsResponse, engine_id: EngineId, life: Life) -> None:
        kind = message.WhichOneof("event")
        _EVENTS.labels(kind or "none").inc()
        if message.epoch != life.epoch:
            raise _StreamEnd(Why.OTHER_EPOCH, f"epoch {message.epoch}")
        index, epoch, sequence = self._index, message.epoch, message.sequence
        heard = Heard.APPLIED
        match kind:
            case "snapshot":
                hashes = await _checked_in_slices(message.snapshot.block_hashes)
                for _ in index.snapshot_in_slices(engine_id, epoch, hashes, sequence):
                    await asyncio.sleep(0)
            case "stored":
                heard = index.stored(engine_id, epoch, _checked(message.stored.block_hashes), sequence)
            case "removed":
                heard = index.removed(engine_id, epoch, _checked(message.removed.block_hashes), sequence)
            case "cleared":
                heard = index.cleared(engine_id, epoch, sequence)
            case _:
                raise _StreamEnd(Why.MALFORMED, "an event of no kind we know")
        if heard is Heard.GAP:
            raise _StreamEnd(Why.GAP, f"at {sequence}")


async def _first(messages: AsyncIterator[Any]) -> Any:
    try:
        async with asyncio.timeout(FIRST_MESSAGE_S):
            return await anext(messages)
    except TimeoutError as error:
        raise _StreamEnd(Why.SILENT, f"nothing for {FIRST_MESSAGE_S} s") from error
    except StopAsyncIteration as error:
        raise _StreamEnd(Why.ENDED) from error


async def _checked_in_slices(hashes: Sequence[bytes]) -> list[bytes]:
    """A snapshot's hashes out of their message, a slice at a time: 10^5 at once would take 10 ms."""
    checked: list[bytes] = []
    for at in range(0, len(hashes), SLICE):
        checked += _checked(hashes[at : at + SLICE])
        await asyncio.sleep(0)
    return checked


def _checked(hashes: Sequence[bytes]) -> Sequence[bytes]:
    if any(len(h) != HASH_BYTES for h in hashes):
        raise _StreamEnd(Why.MALFORMED, "a block hash of another size")
    return hashes
