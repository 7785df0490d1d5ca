import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from headrace.coord.embedded import EmbeddedEtcd
from headrace.coord.etcd.client import EtcdClient, Snapshot
from headrace.coord.etcd.watch import PrefixMap


@asynccontextmanager
async def running(map_: PrefixMap) -> AsyncIterator[PrefixMap]:
    task = asyncio.create_task(map_.run())
    try:
        await asyncio.wait_for(map_.synced.wait(), 10)
        yield map_
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.wait([task])


async def test_the_map_holds_what_was_there_and_follows_what_changes(shared_client: EtcdClient, eventually) -> None:
    await shared_client.put("/map/a", b"1")
    await shared_client.put("/other/a", b"1")
    async with running(PrefixMap(shared_client, "/map/")) as map_:
        assert map_.snapshot == {"/map/a": b"1"}

        await shared_client.put("/map/b", b"2")
        await eventually(lambda: map_.snapshot == {"/map/a": b"1", "/map/b": b"2"})
        await shared_client.put("/map/a", b"3")
        await eventually(lambda: map_.snapshot == {"/map/a": b"3", "/map/b": b"2"})
        await shared_client.delete("/map/b")
        await eventually(lambda: map_.snapshot == {"/map/a": b"3"})
        assert map_.connected


async def test_an_empty_prefix_is_synced_too(shared_client: EtcdClient) -> None:
    async with running(PrefixMap(shared_client, "/nothing/here/")) as map_:
        assert map_.snapshot == {}
        assert map_.version == 1


async def test_a_waiting_reader_wakes_at_the_next_change_and_a_snapshot_never_changes(
    shared_client: EtcdClient,
) -> None:
    async with running(PrefixMap(shared_client, "/wake/")) as map_:
        before, version = map_.snapshot, map_.version
        waiting = [asyncio.create_task(map_.changed(version)) for _ in range(3)]
        await shared_client.put("/wake/a", b"")

        assert await asyncio.wait_for(asyncio.gather(*waiting), 5) == [version + 1] * 3
        assert await map_.changed(0) == version + 1
        assert before == {}
        assert map_.snapshot == {"/wake/a": b""}
        with pytest.raises(TypeError):
            map_.snapshot["/wake/a"] = b"mine"  # type: ignore[index]


class CompactingOnce(EtcdClient):
    """Between its first list and the watch from there, other clients write and the history is compacted."""

    lists = 0

    async def range(self, prefix: str) -> Snapshot:
        listed = await super().range(prefix)
        self.lists += 1
        if self.lists == 1:
            await self.put("/c/new", b"")
            await self.delete("/c/old")
            await self.compact(await self.put("/c/last", b""))
        return listed


async def test_a_map_that_falls_behind_a_compaction_lists_again(etcd: EmbeddedEtcd, eventually) -> None:
    client = CompactingOnce([etcd.endpoint])
    await client.put("/c/old", b"")
    async with running(PrefixMap(client, "/c/")) as map_:
        await eventually(lambda: set(map_.snapshot) == {"/c/new", "/c/last"})
        await client.put("/c/after", b"")
        await eventually(lambda: "/c/after" in map_.snapshot)
        assert client.lists == 2
    await client.close()


async def test_the_map_outlives_its_etcd_and_sees_what_changed_meanwhile(
    etcd: EmbeddedEtcd, client: EtcdClient, eventually
) -> None:
    await client.put("/m/kept", b"1")
    await client.put("/m/deleted", b"1")
    async with running(PrefixMap(client, "/m/")) as map_:
        await eventually(lambda: map_.connected)
        version = map_.version
        etcd.kill()
        await eventually(lambda: not map_.connected)
        assert map_.snapshot == {"/m/kept": b"1", "/m/deleted": b"1"}
        assert map_.version == version

        with EmbeddedEtcd.start(etcd.data_dir, etcd.port) as again:
            other = EtcdClient([again.endpoint])
            await other.delete("/m/deleted")
            await other.put("/m/added", b"2")
            await eventually(lambda: map_.snapshot == {"/m/kept": b"1", "/m/added": b"2"})
            await other.put("/m/added", b"3")
            await eventually(lambda: map_.snapshot["/m/added"] == b"3" and map_.connected)
            await other.close()


async def test_a_frozen_etcd_is_noticed(etcd: EmbeddedEtcd, client: EtcdClient, eventually, freeze) -> None:
    await client.put("/f/a", b"")
    async with running(PrefixMap(client, "/f/")) as map_:
        await eventually(lambda: map_.connected)
        freeze(etcd.pid)
        await eventually(lambda: not map_.connected, within_s=12)
        assert map_.snapshot == {"/f/a": b""}
        os.kill(etcd.pid, signal.SIGCONT)
        await eventually(lambda: map_.connected)


async def test_full_lists_in_between_lose_no_change(shared_client: EtcdClient, eventually) -> None:
    async with running(PrefixMap(shared_client, "/relist/", relist_s=0.02)) as map_:
        await eventually(lambda: map_.connected)
        seen: list[bytes] = []
        for i in range(200):
            version = map_.version
            await shared_client.put("/relist/key", str(i).encode())
            await asyncio.wait_for(map_.changed(version), 5)
            seen.append(map_.snapshot["/relist/key"])
            assert map_.connected

    assert seen == [str(i).encode() for i in range(200)]
    assert not map_.connected


async def test_the_map_waits_for_an_etcd_that_is_not_there_yet(etcd: EmbeddedEtcd, client: EtcdClient) -> None:
    await client.put("/late/a", b"")
    etcd.stop()
    map_ = PrefixMap(client, "/late/")
    task = asyncio.create_task(map_.run())
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(map_.synced.wait(), 0.3)

    with EmbeddedEtcd.start(etcd.data_dir, etcd.port):
        await asyncio.wait_for(map_.synced.wait(), 10)
        assert map_.snapshot == {"/late/a": b""}
        task.cancel()
        await asyncio.wait([task])
