"""Write intent into etcd: a bundle, a deployment that serves it, and the user's API key."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from headrace.api.control.v1 import intent_pb2
from headrace.base.errors import InvalidRequest, NotFound, StartError, Unavailable
from headrace.bundle import intent, keys
from headrace.bundle.bundle import describe, digest
from headrace.bundle.shipped import shipped_model_path
from headrace.cli.home import Home, write_private
from headrace.coord.etcd.client import EtcdClient

DEFAULT_DEPLOYMENT = "smollm2-135m"
CHANGE_TRIES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What the user wants served.

    None keeps what the deployment has; of a new deployment it means one replica of the model that ships, in float32,
    with the engine's own settings, open to all tenants, each of which meets its own cached prefixes only. No `tenants`
    (empty, not None) opens it to all.
    """

    deployment: str = DEFAULT_DEPLOYMENT
    model: Path | None = None
    replicas: int | None = None
    backend: str | None = None
    engine_settings: Mapping[str, str] | None = None
    precision: str | None = None
    tenants: Sequence[str] | None = None
    shared_prefixes: bool | None = None


async def apply(etcd: EtcdClient, wanted: Wanted, *, bundle: intent_pb2.Bundle | None = None) -> intent_pb2.Deployment:
    """Write the bundle (given, or made from `wanted.model`) and the deployment, validated; twice changes nothing."""
    if bundle is None and (wanted.model is not None or wanted.precision is not None):
        bundle = await asyncio.to_thread(describe_wanted, wanted, await _present_model(etcd, wanted.deployment))
    key = keys.deployment_key(wanted.deployment)
    for _ in range(CHANGE_TRIES):
        found = await etcd.get(key)
        if found is None and bundle is None:
            bundle = await asyncio.to_thread(describe_wanted, wanted)
        before = intent.decode(intent_pb2.Deployment, found.value) if found else _new(wanted.deployment)
        deployment = _changed(before, wanted, bundle)
        intent.validate_deployment(deployment)
        if bundle is not None:
            await etcd.put(keys.bundle_key(deployment.bundle_digest), intent.encode(bundle))
        value = intent.encode(deployment)
        # Somebody else's change between our read and our write must not be lost: then read again.
        if await (etcd.compare_and_put(key, value, found.mod_revision) if found else etcd.create_if_absent(key, value)):
            return deployment
    raise Unavailable(f"{wanted.deployment} is being changed by others all the time: nothing was written")


def describe_wanted(wanted: Wanted, present_model: Path | None = None) -> intent_pb2.Bundle:
    """The bundle of the wanted model: the one named, else the present one, else the one that ships."""
    path = wanted.model or present_model or shipped_model_path()
    return describe(path, precision=wanted.precision or "float32")


async def _present_model(etcd: EtcdClient, deployment: str) -> Path | None:
    """Where the deployment's model lies now; None when there is no such deployment."""
    found = await etcd.get(keys.deployment_key(deployment))
    if found is None:
        return None
    digest_now = intent.decode(intent_pb2.Deployment, found.value).bundle_digest
    bundle = await etcd.get(keys.bundle_key(digest_now))
    return Path(intent.decode(intent_pb2.Bundle, bundle.value).model_path) if bundle is not None else None


def _new(name: str) -> intent_pb2.Deployment:
    return intent_pb2.Deployment(name=name, replicas=1, backend="model")


def _changed(before: intent_pb2.Deployment, wanted: Wanted, bundle: intent_pb2.Bundle | None) -> intent_pb2.Deployment:
    after = intent_pb2.Deployment()
    after.CopyFrom(before)
    if bundle is not None:
        after.bundle_digest = digest(bundle)
    if wanted.replicas is not None:
        after.replicas = wanted.replicas
    if wanted.backend is not None:
        after.backend = wanted.backend
    if wanted.engine_settings is not None:
        after.engine_settings.clear()
        after.engine_settings.update(wanted.engine_settings)
    if wanted.tenants is not None:
        after.tenants[:] = sorted(set(wanted.tenants))
    if wanted.shared_prefixes is not None:
        after.shared_prefixes = wanted.shared_prefixes
    return after


async def delete(etcd: EtcdClient, name: str) -> intent_pb2.Deployment:
    """Delete a deployment; returns what it was. Its bundle stays: others may serve it, and it may come back.

    NotFound when there is none, with the names of those there are.
    """
    found = await etcd.get(keys.deployment_key(name))
    if found is None:
        there = [keys.name_in(key, keys.DEPLOYMENTS) for key in (await etcd.range(keys.DEPLOYMENTS)).entries]
        raise NotFound(f"there is no deployment {name!r}; there are: {', '.join(sorted(there)) or 'none'}")
    await etcd.delete(keys.deployment_key(name))
    try:
        return intent.decode(intent_pb2.Deployment, found.value)
    except InvalidRequest:
        return intent_pb2.Deployment(name=name)  # one that cannot be read can still be deleted


async def other_deployments(etcd: EtcdClient, name: str) -> list[str]:
    """Deployments besides `name` that this etcd wants replicas of, as "2 x name"."""
    others = []
    for key, entry in (await etcd.range(keys.DEPLOYMENTS)).entries.items():
        if key != keys.deployment_key(name):
            try:
                found = intent.decode(intent_pb2.Deployment, entry.value)
            except InvalidRequest as error:
                others.append(f"{keys.name_in(key, keys.DEPLOYMENTS)} (cannot be read: {error.message})")
                continue
            if found.replicas:
                others.append(f"{found.replicas} x {found.name}")
    return others


async def grant_key(
    etcd: EtcdClient, key: str, rights: intent_pb2.ApiKey | None = None, *, tenant: str = "", name: str = ""
) -> None:
    """Make `key` valid with these rights (default: a user's, for `tenant`): only its hash is written."""
    record = intent_pb2.ApiKey(tenant=tenant, name=name)
    if rights is not None:
        record.CopyFrom(rights)
    record.created_at = datetime.now(UTC).isoformat(timespec="seconds")
    await etcd.put(keys.api_key_key(intent.hash_api_key(key)), intent.encode(record))


async def local_key(etcd: EtcdClient, home: Home) -> str:
    """The local user's API key, from the data folder or made now; valid in etcd afterwards."""
    return await kept_key(etcd, home.key_file)


async def kept_key(etcd: EtcdClient, key_file: Path) -> str:
    """The key kept in `key_file` (made there, private, when there is none); valid in etcd afterwards."""
    key = await asyncio.to_thread(_read_or_make_key, key_file)
    if await etcd.get(keys.api_key_key(intent.hash_api_key(key))) is None:
        await grant_key(etcd, key, tenant="local", name="local-user")
    return key


def _read_or_make_key(key_file: Path) -> str:
    try:
        return key_file.read_text().strip()
    except FileNotFoundError:
        key = intent.new_api_key()
        write_private(key_file, key + "\n")
        return key
    except OSError as error:
        raise StartError(f"cannot read the API key in {key_file}: {error.strerror}") from error


def etcd_endpoints(home: Home) -> list[str]:
    """HEADRACE_ETCD_ENDPOINTS, else those of the stack running on `home`."""
    given = os.environ.get("HEADRACE_ETCD_ENDPOINTS")
    return given.split(",") if given else [home.running().addresses["etcd"]]


@asynccontextmanager
async def etcd_client(endpoints: Sequence[str]) -> AsyncIterator[EtcdClient]:
    """A client, closed on leaving."""
    client = EtcdClient(endpoints)
    try:
        yield client
    finally:
        await client.close()


async def apply_and_say(endpoints: Sequence[str], wanted: Wanted) -> None:
    """`apply`, and print what was written."""
    async with etcd_client(endpoints) as etcd:
        deployment = await apply(etcd, wanted)
    print(
        f"wanted: {deployment.replicas} x {deployment.name}, bundle {deployment.bundle_digest}{_for_whom(deployment)}"
    )


def _for_whom(deployment: intent_pb2.Deployment) -> str:
    tenants = f", for {', '.join(deployment.tenants)} only" if deployment.tenants else ""
    return tenants + (", prefixes shared among its tenants" if deployment.shared_prefixes else "")


async def delete_and_say(endpoints: Sequence[str], name: str) -> None:
    """`delete`, and print what ends by it."""
    async with etcd_client(endpoints) as etcd:
        deployment = await delete(etcd, name)
    print(f"deleted: {name}; its {deployment.replicas} replicas finish their answers and end (see headrace status)")


async def setup(endpoints: Sequence[str], wanted: Wanted, key_file: Path) -> None:
    """The deployment and a first key; the key itself is not printed.

    The bundle is always made anew: after an upgrade of the image, the engines serve the new one.
    """
    bundle = await asyncio.to_thread(describe_wanted, wanted)
    async with etcd_client(endpoints) as etcd:
        deployment = await apply(etcd, wanted, bundle=bundle)
        await kept_key(etcd, key_file)
    print(f"wanted: {deployment.replicas} x {deployment.name}; API key in {key_file}")
