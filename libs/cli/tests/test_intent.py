"""Deployments and keys as the command writes them, in a real etcd."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from headrace.api.control.v1 import intent_pb2
from headrace.base.errors import InvalidRequest, NotFound, StartError
from headrace.bundle import intent, keys
from headrace.bundle.bundle import describe, digest
from headrace.bundle.shipped import shipped_model_path
from headrace.cli.intent import (
    Wanted,
    apply,
    delete,
    etcd_client,
    kept_key,
    other_deployments,
    setup,
)
from headrace.coord.embedded import EmbeddedEtcd
from headrace.coord.etcd.client import EtcdClient


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedEtcd]:
    with EmbeddedEtcd.start(tmp_path_factory.mktemp("etcd")) as etcd:
        yield etcd


@pytest.fixture
async def etcd(server: EmbeddedEtcd) -> AsyncIterator[EtcdClient]:
    """A client of an empty etcd."""
    async with etcd_client([server.endpoint]) as client:
        for key in (await client.range(keys.ROOT)).entries:
            await client.delete(key)
        yield client


async def stored(etcd: EtcdClient, name: str) -> intent_pb2.Deployment:
    found = await etcd.get(keys.deployment_key(name))
    assert found is not None
    return intent.decode(intent_pb2.Deployment, found.value)


async def test_a_new_deployment_serves_one_replica_of_the_model_that_ships(etcd: EtcdClient) -> None:
    written = await apply(etcd, Wanted(deployment="m"))
    assert written == await stored(etcd, "m")
    assert (written.replicas, written.backend, dict(written.engine_settings)) == (1, "model", {})
    bundle = await etcd.get(keys.bundle_key(written.bundle_digest))
    assert bundle is not None
    assert digest(intent.decode(intent_pb2.Bundle, bundle.value)) == written.bundle_digest


async def test_what_is_left_out_of_a_change_stays_as_it_is(etcd: EtcdClient) -> None:
    first = await apply(etcd, Wanted(deployment="m", backend="simulated", engine_settings={"max_num_seqs": "4"}))
    await apply(etcd, Wanted(deployment="m", replicas=3))
    now = await stored(etcd, "m")
    assert now.replicas == 3
    assert (now.backend, dict(now.engine_settings)) == ("simulated", {"max_num_seqs": "4"})
    assert now.bundle_digest == first.bundle_digest
    await apply(etcd, Wanted(deployment="m", replicas=0, engine_settings={}))
    now = await stored(etcd, "m")
    assert (now.replicas, dict(now.engine_settings)) == (0, {}), "zero and empty are values, not left out"


async def test_a_change_made_meanwhile_by_others_is_not_lost(etcd: EtcdClient) -> None:
    await apply(etcd, Wanted(deployment="m", backend="simulated"))
    rival = Rival(etcd)
    await apply(rival, Wanted(deployment="m", replicas=5))  # type: ignore[arg-type]
    now = await stored(etcd, "m")
    assert (now.replicas, dict(now.engine_settings)) == (5, {"block_size": "32"})


class Rival:
    """An etcd client in whose first read-and-write another writer comes between."""

    def __init__(self, etcd: EtcdClient) -> None:
        self._etcd = etcd
        self._done = False

    async def compare_and_put(self, key: str, value: bytes, mod_revision: int) -> bool:
        if not self._done:
            self._done = True
            await apply(self._etcd, Wanted(deployment="m", engine_settings={"block_size": "32"}))
        return await self._etcd.compare_and_put(key, value, mod_revision)

    def __getattr__(self, name: str) -> object:
        return getattr(self._etcd, name)


@pytest.mark.parametrize(
    ("wanted", "field"),
    [
        (Wanted(deployment="Bad Name"), "name"),
        (Wanted(deployment="m", backend="quantum"), "backend"),
        (Wanted(deployment="m", engine_settings={"a b": "1"}), "engine_settings"),
    ],
)
async def test_a_bad_deployment_is_refused_before_anything_is_written(
    etcd: EtcdClient, wanted: Wanted, field: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await apply(etcd, wanted)
    assert str(refused.value.field).startswith(field)
    assert (await etcd.range(keys.ROOT)).entries == {}


async def test_a_model_that_is_not_there_is_named(etcd: EtcdClient) -> None:
    with pytest.raises(StartError, match=r"no model at /nope\.gguf"):
        await apply(etcd, Wanted(deployment="m", model=Path("/nope.gguf")))


async def test_deployments_of_earlier_days_are_told(etcd: EtcdClient) -> None:
    bundle = describe(shipped_model_path())
    for name, replicas in (("now", 1), ("old", 2), ("idle", 0)):
        await apply(etcd, Wanted(deployment=name, replicas=replicas), bundle=bundle)
    assert await other_deployments(etcd, "now") == ["2 x old"]


async def test_setup_makes_a_working_key_and_a_second_run_keeps_key_and_replicas(
    etcd: EtcdClient, server: EmbeddedEtcd, tmp_path: Path
) -> None:
    key_file = tmp_path / "api-key"
    await setup([server.endpoint], Wanted(deployment="m"), key_file)
    key = key_file.read_text().strip()
    assert await etcd.get(keys.api_key_key(intent.hash_api_key(key))) is not None
    assert key_file.stat().st_mode & 0o777 == 0o600
    await apply(etcd, Wanted(deployment="m", replicas=4))
    await setup([server.endpoint], Wanted(deployment="m"), key_file)
    assert key_file.read_text().strip() == key
    assert (await stored(etcd, "m")).replicas == 4


async def test_a_kept_key_is_valid_again_in_an_empty_etcd(etcd: EtcdClient, tmp_path: Path) -> None:
    key = await kept_key(etcd, tmp_path / "api-key")
    await etcd.delete(keys.api_key_key(intent.hash_api_key(key)))
    assert await kept_key(etcd, tmp_path / "api-key") == key
    assert await etcd.get(keys.api_key_key(intent.hash_api_key(key))) is not None


async def test_a_change_keeps_what_other_commands_have_written(etcd: EtcdClient) -> None:
    """Tenants, shared prefixes, routing: whatever `apply` has no option for."""
    written = await apply(etcd, Wanted(deployment="m", backend="simulated"))
    written.tenants.append("acme")
    written.shared_prefixes = True
    written.routing.policy = "least_loaded"
    await etcd.put(keys.deployment_key("m"), intent.encode(written))
    changed = await apply(etcd, Wanted(deployment="m", replicas=3))
    assert (list(changed.tenants), changed.shared_prefixes, changed.routing.policy) == (["acme"], True, "least_loaded")
    assert changed.replicas == 3


async def test_a_deployment_is_closed_to_some_tenants_and_opened_again(etcd: EtcdClient) -> None:
    written = await apply(etcd, Wanted(deployment="m", tenants=["zenith", "acme", "acme"], shared_prefixes=True))
    assert (list(written.tenants), written.shared_prefixes) == (["acme", "zenith"], True)
    written = await apply(etcd, Wanted(deployment="m", replicas=2))
    assert (list(written.tenants), written.shared_prefixes) == (["acme", "zenith"], True)
    written = await apply(etcd, Wanted(deployment="m", tenants=[], shared_prefixes=False))
    assert (list(written.tenants), written.shared_prefixes, written.replicas) == ([], False, 2)
    with pytest.raises(InvalidRequest, match=r"tenants\[0\]"):
        await apply(etcd, Wanted(deployment="m", tenants=["no spaces"]))


async def test_a_deleted_deployment_is_gone_its_bundle_stays_and_another_is_refused_by_name(etcd: EtcdClient) -> None:
    written = await apply(etcd, Wanted(deployment="m"))
    await apply(etcd, Wanted(deployment="other"))
    with pytest.raises(NotFound, match="no deployment 'n'; there are: m, other"):
        await delete(etcd, "n")
    assert await delete(etcd, "m") == written
    assert await etcd.get(keys.deployment_key("m")) is None
    assert await etcd.get(keys.bundle_key(written.bundle_digest)) is not None
    await etcd.put(keys.deployment_key("other"), b"no JSON")
    assert (await delete(etcd, "other")).name == "other"
