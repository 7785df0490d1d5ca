"""What is served, as etcd said last: deployments, bundles and their loaded models."""

from __future__ import annotations

import asyncio

import structlog

from headrace.api.control.v1 import intent_pb2
from headrace.base.backoff import Backoff
from headrace.base.deadline import Deadline
from headrace.base.errors import (
    DeadlinePassed,
    Forbidden,
    HeadraceError,
    NotFound,
    StartError,
    Unavailable,
)
from headrace.bundle import intent, keys
from headrace.coord.etcd.client import EtcdClient
from headrace.coord.etcd.watch import PrefixMap
from headrace.gateway.core.principal import Principal
from headrace.gateway.model import Model, load_model

log = structlog.get_logger(__name__)

_LOADING_RETRY_S = 1.0


class Catalog:
    """The last known good view; it outlives etcd. `run` keeps it fresh and loads the models that deployments name."""

    def __init__(self, client: EtcdClient) -> None:
        self._deployment_records = PrefixMap(client, keys.DEPLOYMENTS)
        self._bundle_records = PrefixMap(client, keys.BUNDLES)
        self._deployments: dict[str, intent_pb2.Deployment] = {}
        self._loads: dict[str, asyncio.Task[Model]] = {}
        self._changed = asyncio.Event()
        self.ready = asyncio.Event()
        """Set once everything was read and the models wanted then were loaded, or could not be."""

    def permitted(self, principal: Principal) -> list[tuple[str, Model]]:
        """The loaded deployments that `principal` may use, sorted by name."""
        found = []
        for name, deployment in sorted(self._deployments.items()):
            load = self._loads.get(deployment.bundle_digest)
            if principal.permits(name) and _open_to(deployment, principal) and load is not None and _loaded(load):
                found.append((name, load.result().narrowed(deployment)))
        return found

    async def model(self, name: str, principal: Principal, deadline: Deadline) -> Model:
        """The model that deployment `name` serves, waiting for it while it loads.

        Forbidden before NotFound: a restricted credential learns nothing of other deployments' names. A deployment
        that is closed to the tenant does not exist for it.
        """
        if not principal.permits(name):
            raise Forbidden(f"this API key or token may not use {name!r}", metadata={"model": name})
        deployment = self._deployments.get(name)
        if deployment is None or not _open_to(deployment, principal):
            raise NotFound(
                f"there is no deployment {name!r}; ListModels shows those there are", metadata={"model": name}
            )
        load = self._loads.get(deployment.bundle_digest)
        if load is not None:
            done, _ = await asyncio.wait({load}, timeout=max(0.0, deadline.remaining_s()))
            if not done:
                raise DeadlinePassed(f"the deadline passed while {name!r} was being loaded")
        if load is None or not _loaded(load):
            raise Unavailable(
                f"{name!r} cannot be tokenized for here: its bundle is missing or unreadable",
                reason="MODEL_NOT_LOADED",
                retry_after_s=_LOADING_RETRY_S,
            )
        return load.result().narrowed(deployment)

    async def run(self) -> None:
        """Follow etcd until cancelled."""
        async with asyncio.TaskGroup() as group:
            for records in (self._deployment_records, self._bundle_records):
                group.create_task(records.run())
            group.create_task(self._wake_on(self._deployment_records))
            group.create_task(self._wake_on(self._bundle_records))
            group.create_task(self._follow())

    async def _wake_on(self, records: PrefixMap) -> None:
        version = 0
        while True:
            version = await records.changed(version)
            self._changed.set()

    async def _follow(self) -> None:
        for records in (self._deployment_records, self._bundle_records):
            await records.synced.wait()
        self._refresh()
        if self._loads:
            await asyncio.wait(self._loads.values())
        self.ready.set()
        log.info("catalog_ready", deployments=sorted(self._deployments))
        backoff = Backoff(first_s=1.0, longest_s=30.0)
        while True:
            timeout_s = backoff.next_s() if self._failed() else None
            try:
                async with asyncio.timeout(timeout_s):
                    await self._changed.wait()
                backoff.reset()
            except TimeoutError:
                for digest in self._failed():
                    del self._loads[digest]
            self._changed.clear()
            self._refresh()

    def _failed(self) -> list[str]:
        return [digest for digest, load in self._loads.items() if load.done() and not _loaded(load)]

    def _refresh(self) -> None:
        """Compare wanted with loaded; requests under way keep the models they began with."""
        self._deployments = self._decoded_deployments()
        wanted = {deployment.bundle_digest for deployment in self._deployments.values()}
        for digest in self._loads.keys() - wanted:
            del self._loads[digest]
        for digest in wanted - self._loads.keys():
            record = self._bundle_records.snapshot.get(keys.bundle_key(digest))
            if record is not None:
                self._loads[digest] = asyncio.create_task(_load(digest, record))
                self._loads[digest].add_done_callback(_report)

    def _decoded_deployments(self) -> dict[str, intent_pb2.Deployment]:
        decoded = {}
        for path, record in self._deployment_records.snapshot.items():
            name = keys.name_in(path, keys.DEPLOYMENTS)
            try:
                decoded[name] = intent.decode(intent_pb2.Deployment, record)
            except HeadraceError as error:
                log.error("deployment_unreadable", deployment=name, why=error.message)
                if name in self._deployments:  # what was good yesterday serves on
                    decoded[name] = self._deployments[name]
        return decoded


async def _load(digest: str, record: bytes) -> Model:
    bundle = intent.decode(intent_pb2.Bundle, record)
    return await asyncio.to_thread(load_model, digest, bundle)


def _report(load: asyncio.Task[Model]) -> None:
    if load.cancelled():
        return
    error = load.exception()
    if error is None:
        log.info("model_loaded", bundle=load.result().bundle_digest)
    elif isinstance(error, StartError | HeadraceError):
        log.error("model_load_failed", why=str(error))
    else:
        log.error("model_load_failed", exc_info=error)


def _loaded(load: asyncio.Task[Model]) -> bool:
    return load.done() and not load.cancelled() and load.exception() is None


def _open_to(deployment: intent_pb2.Deployment, principal: Principal) -> bool:
    return not deployment.tenants or principal.tenant in deployment.tenants
