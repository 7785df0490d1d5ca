"""One leader among candidates, and writes that only the leader of now can make."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

import structlog

from headrace.base.backoff import Backoff
from headrace.base.errors import HeadraceError, StaleEpoch
from headrace.coord.etcd.client import EtcdClient, Snapshot
from headrace.coord.etcd.lease import Lease
from headrace.coord.etcd.txn import created_at, put_op
from headrace.coord.etcd.v3 import etcd_pb2 as pb

_log = structlog.get_logger(__name__)

PREFIX = "/headrace/v1/leader"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Term:
    """One candidacy: its key lives by the lease, and the revision that created the key is its number."""

    lease: Lease
    key: str
    fence: int


class Election:
    """A candidacy for `name`: each candidate holds a leased key, and the one created first leads.

    `run()` stands for election until cancelled, again and again. `leading` alone protects nothing, because a leader
    may be paused at any instruction: what must not be done by two leaders is written with `guard()` in the transaction.
    """

    def __init__(self, client: EtcdClient, name: str, candidate_id: str, ttl_s: int = 10) -> None:
        self.candidate_id = candidate_id
        self._client = client
        self._prefix = f"{PREFIX}/{name}/"
        self._ttl_s = ttl_s
        self._term: _Term | None = None

    @property
    def leading(self) -> bool:
        """Whether this candidate leads, as far as it can know; False from the local end of its lease on."""
        return self._term is not None and self._term.lease.alive

    @property
    def fence(self) -> int | None:
        """The number of this term, growing from leader to leader; None when not leading."""
        return self._term.fence if self._term is not None and self._term.lease.alive else None

    def guard(self) -> pb.Compare:
        """For a transaction: holds while this term does, whatever we believe. StaleEpoch when not leading."""
        if self._term is None or not self._term.lease.alive:
            raise StaleEpoch(f"{self.candidate_id} does not lead")
        return created_at(self._term.key, self._term.fence)

    async def put(self, key: str, value: bytes) -> None:
        """Write the key as the leader; StaleEpoch when this candidate is not the leader (any more)."""
        guard = self.guard()
        if not (await self._client.txn([guard], [put_op(key, value)])).succeeded:
            raise StaleEpoch(f"{self.candidate_id} no longer leads")

    async def run(self) -> None:
        """Stand for election until cancelled; a term that ends, or an etcd that fails, is followed by the next try."""
        backoff = Backoff(first_s=0.1, longest_s=2.0)
        failing = False
        while True:
            try:
                await self._stand()
                backoff.reset()
                failing = False
            except HeadraceError as error:
                if not failing:  # once per outage, not once per try
                    _log.warning("candidacy_failed", candidate=self.candidate_id, error=error.message)
                failing = True
            await asyncio.sleep(backoff.next_s())

    async def _stand(self) -> None:
        """One candidacy, from the grant of its lease until that is lost or its key is gone."""
        async with Lease(self._client, self._ttl_s) as lease:
            key = f"{self._prefix}{lease.lease_id:016x}"
            written = await self._client.txn([], [put_op(key, self.candidate_id.encode(), lease.lease_id)])
            term = _Term(lease=lease, key=key, fence=written.revision)
            try:
                await _first_of(lease.lost.wait(), self._serve(term))
            finally:
                if self._term is not None:
                    _log.warning("leadership_ended", candidate=self.candidate_id, fence=term.fence)
                self._term = None

    async def _serve(self, term: _Term) -> None:
        """Wait for the turn, then lead; returns when the key is gone. Only the lease ends a term, no outage as such."""
        backoff = Backoff(first_s=0.1, longest_s=2.0)
        while True:
            try:
                queue = await self._client.range(self._prefix)
                if term.key not in queue.entries:
                    return
                awaited = _predecessor(queue, term)
                if awaited is None and self._term is None:
                    self._term = term
                    _log.info("leadership_won", candidate=self.candidate_id, fence=term.fence)
                await self._deleted(awaited or term.key, after=queue.revision)
                backoff.reset()
            except HeadraceError:
                await asyncio.sleep(backoff.next_s())

    async def _deleted(self, key: str, *, after: int) -> None:
        async with self._client.watch(key, after=after, prefix=False) as changes:
            async for batch in changes:
                if any(change.entry is None for change in batch):
                    return


def _predecessor(queue: Snapshot, term: _Term) -> str | None:
    """The candidate right before this one. Each waits for one other, so an end wakes one heir and not a crowd."""
    earlier = [
        (entry.create_revision, key) for key, entry in queue.entries.items() if entry.create_revision < term.fence
    ]
    return max(earlier)[1] if earlier else None


async def _first_of(*waits: Coroutine[Any, Any, object]) -> None:
    """Run all until the first ends; the others are cancelled. Raises what it raised."""
    tasks = [asyncio.create_task(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
