import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from headrace.base.errors import HeadraceError, StaleEpoch
from headrace.coord.embedded import EmbeddedEtcd
from headrace.coord.etcd.client import EtcdClient
from headrace.coord.etcd.election import Election
from headrace.coord.etcd.txn import put_op

CANDIDATE = """
import asyncio, sys
import structlog
from headrace.coord.etcd.client import EtcdClient
from headrace.coord.etcd.election import Election

structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))

async def main():
    election = Election(EtcdClient([sys.argv[1]]), "process", "first", ttl_s=1)
    running = asyncio.create_task(election.run())
    while not election.leading:
        await asyncio.sleep(0.01)
    print(election.fence, flush=True)
    await running

asyncio.run(main())
"""


@asynccontextmanager
async def running(election: Election) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(election.run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait([task])


async def test_when_the_leading_process_is_killed_the_other_candidate_leads(
    shared_etcd: EmbeddedEtcd, shared_client: EtcdClient, eventually
) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CANDIDATE, shared_etcd.endpoint, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    first_fence = int(await asyncio.wait_for(process.stdout.readline(), 20))
    second = Election(shared_client, "process", "second", ttl_s=1)
    async with running(second):

        async def standing() -> bool:
            return len(await _candidacies(shared_client, "process")) == 2

        await eventually(standing)
        assert not second.leading
        assert second.fence is None
        process.kill()
        await eventually(lambda: second.leading, within_s=6)
        assert second.fence is not None
        assert second.fence > first_fence
    await process.wait()


async def test_of_many_candidates_one_leads_and_hands_over_at_once_when_it_leaves(
    shared_client: EtcdClient, eventually
) -> None:
    candidates = [Election(shared_client, "many", f"candidate-{i}", ttl_s=30) for i in range(5)]
    tasks = {candidate.candidate_id: asyncio.create_task(candidate.run()) for candidate in candidates}
    fences = []
    while tasks:
        # Far below the TTL: leaving revokes the lease.
        await eventually(lambda: any(candidate.leading for candidate in candidates), within_s=5)
        (leader,) = [candidate for candidate in candidates if candidate.leading]
        fences.append(leader.fence)
        task = tasks.pop(leader.candidate_id)
        task.cancel()
        await asyncio.wait([task])
        assert not leader.leading

    assert fences == sorted(set(fences))


async def test_a_deposed_leader_cannot_write_whether_it_knows_or_not(shared_client: EtcdClient, eventually) -> None:
    first = Election(shared_client, "fence", "first", ttl_s=30)
    second = Election(shared_client, "fence", "second", ttl_s=30)
    async with running(first):
        await eventually(lambda: first.leading)
        await first.put("/fenced/key", b"first")
        stale = first.guard()
        async with running(second):

            async def standing() -> bool:
                return len(await _candidacies(shared_client, "fence")) == 2

            await eventually(standing)
            await shared_client.delete((await _candidacies(shared_client, "fence"))[0])
            # Whether `first` has heard of it by now or not.
            with pytest.raises(StaleEpoch):
                await first.put("/fenced/key", b"first again")

            await eventually(lambda: second.leading)
            await second.put("/fenced/key", b"second")
            assert not (await shared_client.txn([stale], [put_op("/fenced/key", b"late")])).succeeded
            found = await shared_client.get("/fenced/key")
            assert found is not None
            assert found.value == b"second"


async def _candidacies(client: EtcdClient, name: str) -> list[str]:
    """Their keys, the leader's first."""
    entries = (await client.range(f"/headrace/v1/leader/{name}/")).entries
    return sorted(entries, key=lambda key: entries[key].create_revision)


async def test_a_leader_cut_off_from_etcd_stops_leading_by_itself(
    etcd: EmbeddedEtcd, client: EtcdClient, eventually, freeze
) -> None:
    election = Election(client, "frozen", "only", ttl_s=1)
    async with running(election):
        await eventually(lambda: election.leading)
        fence = election.fence
        freeze(etcd.pid)
        await eventually(lambda: not election.leading, within_s=1.5)
        with pytest.raises(StaleEpoch):
            await election.put("/key", b"")

        os.kill(etcd.pid, signal.SIGCONT)
        await eventually(lambda: election.leading)
        assert fence is not None
        assert election.fence is not None
        assert election.fence > fence


async def test_an_outage_shorter_than_the_lease_ends_no_term(etcd: EmbeddedEtcd, client: EtcdClient) -> None:
    election = Election(client, "outage", "only", ttl_s=5)
    async with running(election):
        async with asyncio.timeout(5):
            while not election.leading:
                await asyncio.sleep(0.01)
        fence = election.fence
        etcd.kill()
        with EmbeddedEtcd.start(etcd.data_dir, etcd.port):
            async with asyncio.timeout(4):
                while not await _writes(election):
                    assert election.leading
            assert election.fence == fence


async def _writes(election: Election) -> bool:
    try:
        await election.put("/outage/key", b"")
    except HeadraceError:
        await asyncio.sleep(0.05)
        return False
    return True
