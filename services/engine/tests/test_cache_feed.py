"""What subscribers of the prefix cache hear: a snapshot, then every change, or a snapshot again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from headrace.api.engine.v1 import engine_service_pb2 as pb
from headrace.engine.cache_feed import RING, CacheFeed
from headrace.engine.core.cache_event import Cleared, Removed, Stored

EPOCH = 77


def hashes(*numbers: int) -> tuple[bytes, ...]:
    return tuple(n.to_bytes(16, "big") for n in numbers)


async def take(changes: AsyncIterator[pb.SubscribeCacheEventsResponse], count: int) -> list[tuple[int, str]]:
    async with asyncio.timeout(5):
        messages = [await anext(changes) for _ in range(count)]
    assert {message.epoch for message in messages} == {EPOCH}
    return [(message.sequence, message.WhichOneof("event")) for message in messages]


async def test_a_new_subscriber_gets_a_snapshot_and_then_each_change() -> None:
    feed = CacheFeed(EPOCH)
    feed.apply([Stored(hashes(1, 2, 3)), Removed(hashes(2))])
    changes = feed.follow(0, 0)
    first = await anext(changes)
    assert (first.sequence, list(first.snapshot.block_hashes)) == (2, list(hashes(1, 3)))
    feed.apply([Stored(hashes(4)), Cleared()])
    assert await take(changes, 2) == [(3, "stored"), (4, "cleared")]


async def test_a_change_wakes_who_waits_for_one() -> None:
    feed = CacheFeed(EPOCH)
    changes = feed.follow(EPOCH, 0)
    waiting = asyncio.ensure_future(anext(changes))
    await asyncio.sleep(0)
    assert not waiting.done()
    feed.apply([Stored(hashes(1))])
    assert (await asyncio.wait_for(waiting, 5)).stored.block_hashes == list(hashes(1))


async def test_who_comes_back_goes_on_where_he_was_and_another_epoch_starts_anew() -> None:
    feed = CacheFeed(EPOCH)
    feed.apply([Stored(hashes(n)) for n in range(5)])
    assert await take(feed.follow(EPOCH, 3), 2) == [(4, "stored"), (5, "stored")]
    assert await take(feed.follow(EPOCH + 1, 3), 1) == [(5, "snapshot")]
    assert await take(feed.follow(EPOCH, 9), 1) == [(5, "snapshot")]  # has seen more than there was: not this process


async def test_who_falls_behind_the_ring_gets_a_snapshot_and_costs_no_memory() -> None:
    feed = CacheFeed(EPOCH)
    feed.apply([Stored(hashes(0))])
    slow = feed.follow(EPOCH, 0)
    assert await take(slow, 1) == [(1, "stored")]
    for n in range(1, RING + 2):
        feed.apply([Stored(hashes(n)), Removed(hashes(n))])
    last = 1 + 2 * (RING + 1)
    assert await take(slow, 1) == [(last, "snapshot")]
    assert await take(feed.follow(EPOCH, last - RING), RING) == [
        (n, "stored" if n % 2 == 0 else "removed") for n in range(last - RING + 1, last + 1)
    ]
    assert len(feed._ring) == RING


async def test_a_closed_feed_ends_its_subscriptions_after_the_last_change() -> None:
    feed = CacheFeed(EPOCH)
    changes = feed.follow(EPOCH, 0)
    feed.apply([Stored(hashes(1))])
    feed.close()
    assert [change.sequence async for change in changes] == [1]
