"""The prefix cache's changes, for whoever wants to know what this replica could reuse.

The newest changes are kept in a ring. A subscriber asks for what follows the last one it has seen, at its own pace: one
that falls behind the ring gets a snapshot instead, so a slow one costs no memory.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence

from headrace.api.engine.v1 import engine_service_pb2 as pb
from headrace.engine.core.cache_event import CacheEvent, Cleared, Removed, Stored

RING = 4096


class CacheFeed:
    """What is cached now, and the last `RING` changes of it. Belongs to the event loop."""

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch
        self._sequence = 0
        self._ring: deque[CacheEvent] = deque(maxlen=RING)
        self._cached: dict[bytes, None] = {}  # in the order of storing
        self._changed = asyncio.Event()
        self._closed = False

    def apply(self, events: Sequence[CacheEvent]) -> None:
        """Note changes, in order."""
        for event in events:
            if isinstance(event, Stored):
                self._cached.update(dict.fromkeys(event.block_hashes))
            elif isinstance(event, Removed):
                for block_hash in event.block_hashes:
                    self._cached.pop(block_hash, None)
            else:
                self._cached.clear()
            self._ring.append(event)
            self._sequence += 1
        if events:
            self._wake()

    def close(self) -> None:
        """End every subscription, after what it has not seen yet."""
        self._closed = True
        self._wake()

    async def follow(self, epoch: int, sequence: int) -> AsyncIterator[pb.SubscribeCacheEventsResponse]:
        """Every change after `sequence` of `epoch`; a snapshot first when the ring does not reach back to it."""
        seen: int | None = sequence if epoch == self._epoch and sequence <= self._sequence else None
        while True:
            changed = self._changed
            if seen is None or seen < self._sequence - len(self._ring):
                seen = self._sequence
                yield pb.SubscribeCacheEventsResponse(
                    epoch=self._epoch, sequence=seen, snapshot=pb.CacheSnapshot(block_hashes=self._cached)
                )
            elif seen < self._sequence:
                seen += 1
                yield _message(self._epoch, seen, self._ring[seen - self._sequence - 1])
            elif self._closed:
                return
            else:
                await changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _message(epoch: int, sequence: int, event: CacheEvent) -> pb.SubscribeCacheEventsResponse:
    message = pb.SubscribeCacheEventsResponse(epoch=epoch, sequence=sequence)
    match event:
        case Stored(block_hashes):
            message.stored.block_hashes.extend(block_hashes)
        case Removed(block_hashes):
            message.removed.block_hashes.extend(block_hashes)
        case Cleared():
            message.cleared.SetInParent()
    return message
