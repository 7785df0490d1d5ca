"""A small asyncio client of etcd's v3 API, over our own wire-compatible subset of it (docs/adr/0001).

Ours because the known clients cannot be imported beside protobuf 7, or hang after a compaction, or believe in a
lease however long etcd has been gone. Every call has a deadline; every stream is a context manager that cancels.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from headrace.base.deadline import Deadline
from headrace.base.errors import DeadlinePassed, InternalError, Unavailable
from headrace.coord.etcd.txn import created_at, put_op, unchanged_since
from headrace.coord.etcd.v3 import etcd_pb2 as pb
from headrace.coord.etcd.wire import Members, Stream


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A key's value, with the store's revisions of its last change and of its creation."""

    value: bytes
    mod_revision: int
    create_revision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyValue(Entry):
    """An entry with its key and the lease it lives by (0: none)."""

    key: str
    lease: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All keys under a prefix as of `revision`."""

    revision: int
    entries: Mapping[str, Entry]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One key was written (`entry`) or is gone (None)."""

    key: str
    entry: Entry | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TxnResult:
    """Whether all guards held, and the store's revision afterwards: that of the writes, if there were any."""

    succeeded: bool
    revision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted:
    """A new lease and its seconds, which may be more than were asked for."""

    lease_id: int
    ttl_s: int


class EtcdClient:
    """A client of the etcd members at `endpoints` (host:port, or https://host:port for TLS as `HEADRACE_ETCD_TLS_*`
    say); made and closed inside the running loop.

    Talks to one member and turns to the next when that one fails; only reads are tried again by themselves.
    Raises Unavailable (no member serves), DeadlinePassed (no answer within `timeout_s`), NotFound (no such lease),
    InternalError (etcd refused the request).
    """

    def __init__(self, endpoints: Sequence[str], *, timeout_s: float = 2.0) -> None:
        self.timeout_s = timeout_s
        self._members = Members(endpoints)

    async def get(self, key: str) -> KeyValue | None:
        """The key as it is now, or None."""
        answer = await self._range(pb.RangeRequest(key=key.encode()))
        return _key_value(answer.kvs[0]) if answer.kvs else None

    async def range(self, prefix: str) -> Snapshot:
        """All keys that begin with `prefix`, as of one revision."""
        answer = await self._range(pb.RangeRequest(key=prefix.encode(), range_end=_prefix_end(prefix)))
        entries = {kv.key.decode(): _entry(kv) for kv in answer.kvs}
        return Snapshot(revision=answer.header.revision, entries=entries)

    async def put(self, key: str, value: bytes, lease: int = 0) -> int:
        """Write the key; returns the revision. NotFound when the lease is over."""
        request = pb.PutRequest(key=key.encode(), value=value, lease=lease)
        answer = await self._members.unary("KV/Put", request, pb.PutResponse, timeout_s=self.timeout_s)
        return answer.header.revision

    async def delete(self, key: str) -> bool:
        """Delete the key; whether it was there."""
        request = pb.DeleteRangeRequest(key=key.encode())
        answer = await self._members.unary("KV/DeleteRange", request, pb.DeleteRangeResponse, timeout_s=self.timeout_s)
        return answer.deleted > 0

    async def txn(
        self, guards: Sequence[pb.Compare], success: Sequence[pb.RequestOp], failure: Sequence[pb.RequestOp] = ()
    ) -> TxnResult:
        """If all guards hold apply `success`, else `failure`, atomically. `headrace.coord.etcd.txn` makes both."""
        request = pb.TxnRequest(compare=guards, success=success, failure=failure)
        answer = await self._members.unary("KV/Txn", request, pb.TxnResponse, timeout_s=self.timeout_s)
        return TxnResult(succeeded=answer.succeeded, revision=answer.header.revision)

    async def create_if_absent(self, key: str, value: bytes, lease: int = 0) -> bool:
        """Write the key unless it exists; whether it was written. After an error it may have been: read it."""
        return (await self.txn([created_at(key, 0)], [put_op(key, value, lease)])).succeeded

    async def compare_and_put(self, key: str, value: bytes, mod_revision: int) -> bool:
        """Write the key if its last change was at `mod_revision` (0: it does not exist); whether it was written."""
        return (await self.txn([unchanged_since(key, mod_revision)], [put_op(key, value)])).succeeded

    async def compact(self, revision: int) -> None:
        """Throw away history before `revision`."""
        request = pb.CompactionRequest(revision=revision, physical=True)
        await self._members.unary("KV/Compact", request, pb.CompactionResponse, timeout_s=self.timeout_s)

    async def grant_lease(self, ttl_s: int) -> Granted:
        """A new lease; it must be renewed before it ends."""
        request = pb.LeaseGrantRequest(ttl=ttl_s)
        answer = await self._members.unary("Lease/LeaseGrant", request, pb.LeaseGrantResponse, timeout_s=self.timeout_s)
        if answer.error:
            raise InternalError(f"etcd granted no lease: {answer.error}")
        return Granted(lease_id=answer.id, ttl_s=answer.ttl)

    async def renew_lease(self, lease_id: int, *, deadline: Deadline) -> int:
        """Renew the lease; seconds until it ends, from etcd's receipt of this; 0 when it is over already."""
        # A stream for each renewal, twice per TTL, costs nothing and leaves no stream to mend after an outage.
        deadline = deadline.capped(self.timeout_s)
        async with self._members.stream("Lease/LeaseKeepAlive", pb.LeaseKeepAliveResponse, deadline=deadline) as stream:
            await stream.write(pb.LeaseKeepAliveRequest(id=lease_id))
            return (await stream.read()).ttl

    async def revoke_lease(self, lease_id: int) -> None:
        """End the lease and delete its keys. NotFound when it is over already."""
        request = pb.LeaseRevokeRequest(id=lease_id)
        await self._members.unary("Lease/LeaseRevoke", request, pb.LeaseRevokeResponse, timeout_s=self.timeout_s)

    @asynccontextmanager
    async def watch(self, key: str, *, after: int, prefix: bool) -> AsyncIterator[AsyncIterator[Sequence[Change]]]:
        """Changes of a key, or of all keys with that prefix, after revision `after`: in order, none left out.

        Entering waits until etcd has accepted the watch. The iterator ends by raising only: Unavailable, with reason
        WATCH_COMPACTED when the history after `after` is gone; in any case the caller has to list again.
        """
        end = _prefix_end(key) if prefix else b""
        create = pb.WatchCreateRequest(key=key.encode(), range_end=end, start_revision=after + 1)
        async with self._members.stream("Watch/Watch", pb.WatchResponse, deadline=Deadline.never()) as stream:
            try:
                async with asyncio.timeout(self.timeout_s):
                    await stream.write(pb.WatchRequest(create_request=create))
                    _require_open(await stream.read())
            except TimeoutError:
                raise DeadlinePassed(f"etcd did not accept a watch within {self.timeout_s:g} s") from None
            yield _changes(stream)

    async def close(self) -> None:
        """Close the connections; running calls are cancelled."""
        await self._members.close()

    async def _range(self, request: pb.RangeRequest) -> pb.RangeResponse:
        return await self._members.unary(
            "KV/Range", request, pb.RangeResponse, timeout_s=self.timeout_s, tries=self._members.count
        )


async def _changes(stream: Stream[pb.WatchResponse]) -> AsyncIterator[Sequence[Change]]:
    while True:
        answer = await stream.read()
        _require_open(answer)
        if answer.events:
            yield [_change(event) for event in answer.events]


def _require_open(answer: pb.WatchResponse) -> None:
    if answer.compact_revision:
        raise Unavailable(
            f"the history before revision {answer.compact_revision} is gone", reason="WATCH_COMPACTED", retry_after_s=0
        )
    if answer.canceled:
        raise Unavailable(f"etcd cancelled the watch: {answer.cancel_reason}", reason="WATCH_CANCELED", retry_after_s=1)


def _change(event: pb.Event) -> Change:
    gone = event.type == pb.EVENT_TYPE_DELETE
    return Change(key=event.kv.key.decode(), entry=None if gone else _entry(event.kv))


def _entry(kv: pb.KeyValue) -> Entry:
    return Entry(value=kv.value, mod_revision=kv.mod_revision, create_revision=kv.create_revision)


def _key_value(kv: pb.KeyValue) -> KeyValue:
    return KeyValue(
        key=kv.key.decode(),
        value=kv.value,
        lease=kv.lease,
        mod_revision=kv.mod_revision,
        create_revision=kv.create_revision,
    )


def _prefix_end(prefix: str) -> bytes:
    """The first key after all that begin with `prefix`. UTF-8 has no byte 0xff, so the last one can be raised."""
    key = prefix.encode()
    return key[:-1] + bytes([key[-1] + 1])
