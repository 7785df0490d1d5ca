import asyncio
import time

from headrace.coord.embedded import EmbeddedEtcd
from headrace.coord.etcd.client import EtcdClient
from headrace.coord.etcd.lease import Lease


async def test_a_key_lives_by_its_lease_and_goes_with_it(shared_client: EtcdClient) -> None:
    async with Lease(shared_client, ttl_s=1) as lease:
        await shared_client.put("/lease/held", b"", lease.lease_id)
        # Twice the TTL: only renewals can have kept it.
        await asyncio.sleep(2.0)
        assert lease.alive
        found = await shared_client.get("/lease/held")
        assert found is not None
        assert found.lease == lease.lease_id

    assert not lease.alive
    assert await shared_client.get("/lease/held") is None


async def test_a_key_vanishes_when_its_holder_stops_renewing(shared_client: EtcdClient, eventually) -> None:
    granted = await shared_client.grant_lease(1)
    await shared_client.put("/lease/dead", b"", granted.lease_id)

    async def gone() -> bool:
        return await shared_client.get("/lease/dead") is None

    await eventually(gone, within_s=6)


async def test_a_lease_ends_locally_while_etcd_is_frozen(etcd: EmbeddedEtcd, client: EtcdClient, freeze) -> None:
    started = time.monotonic()
    async with Lease(client, ttl_s=1) as lease:
        freeze(etcd.pid)
        await asyncio.wait_for(lease.lost.wait(), 5)
        lasted = time.monotonic() - started
        assert not lease.alive

    # Counted from before the grant was sent, so never past the TTL but for the wake-up.
    assert 0.7 < lasted < 1.3


async def test_a_blocked_event_loop_does_not_prolong_a_lease(etcd: EmbeddedEtcd, client: EtcdClient, freeze) -> None:
    async with Lease(client, ttl_s=1) as lease:
        freeze(etcd.pid)
        time.sleep(1.1)  # noqa: ASYNC251  # blocking the loop is the point
        assert not lease.lost.is_set()
        assert not lease.alive


async def test_a_lease_revoked_by_others_is_lost_at_the_next_renewal(shared_client: EtcdClient) -> None:
    async with Lease(shared_client, ttl_s=2) as lease:
        await shared_client.revoke_lease(lease.lease_id)
        await asyncio.wait_for(lease.lost.wait(), 1.9)
        assert not lease.alive


async def test_a_lease_outlives_an_outage_shorter_than_its_ttl(etcd: EmbeddedEtcd, client: EtcdClient) -> None:
    async with Lease(client, ttl_s=2) as lease:
        first_end = time.monotonic() + 2
        await client.put("/key", b"", lease.lease_id)
        etcd.kill()
        with EmbeddedEtcd.start(etcd.data_dir, etcd.port):
            await asyncio.sleep(first_end + 0.2 - time.monotonic())
            # Only a renewal with the etcd that came back can have carried it past its first end.
            assert lease.alive
            assert await client.get("/key") is not None
