"""Wanted deployments from etcd: parsed, checked, and kept when a newer value is no good or etcd is away."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace

from headrace.api.control.v1.intent_pb2 import Bundle, Deployment
from headrace.base.errors import InvalidRequest
from headrace.bundle.bundle import digest as digest_of
from headrace.bundle.intent import decode, saturation_of
from headrace.bundle.keys import BUNDLES, DEPLOYMENTS, bundle_key, name_in
from headrace.controller.core.fleet import Intent, Spec, Unreadable, Wanted
from headrace.controller.metrics import INVALID_INTENT
from headrace.controller.wait import first_of
from headrace.coord.etcd.client import EtcdClient
from headrace.coord.etcd.watch import PrefixMap
from headrace.observe.log import get_logger

log = get_logger(__name__)

RESERVED_SETTINGS = frozenset(
    {
        "address",
        "advertise",
        "backend",
        "bundle",
        "deployment",
        "engine_id",
        "model",
        "otlp_endpoint",
        "precision",
        "redis_url",
    }
)
"""Engine settings that the controller or the bundle decides."""


class EtcdIntent:
    """Deployments and bundles as etcd has them; `run` keeps it up to date."""

    def __init__(self, client: EtcdClient) -> None:
        self._deployments = PrefixMap(client, DEPLOYMENTS)
        self._bundles = PrefixMap(client, BUNDLES)
        self._seen = (0, 0)
        self._good: dict[str, Wanted] = {}
        self._problems: dict[str, str] = {}

    async def run(self) -> None:
        """Follow etcd until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._deployments.run())
            group.create_task(self._bundles.run())

    @property
    def connected(self) -> bool:
        """Whether both watches are up."""
        return self._deployments.connected and self._bundles.connected

    async def changed(self) -> None:
        """Return when something changed since the last `read`."""
        deployments, bundles = self._seen
        await first_of(self._deployments.changed(deployments), self._bundles.changed(bundles))

    def read(self) -> Mapping[str, Intent] | None:
        """Every deployment there is; None until both lists were read once."""
        if not (self._deployments.synced.is_set() and self._bundles.synced.is_set()):
            return None
        self._seen = (self._deployments.version, self._bundles.version)
        values = {name_in(key, DEPLOYMENTS): value for key, value in self._deployments.snapshot.items()}
        for gone in self._good.keys() - values.keys():
            del self._good[gone]
        for gone in self._problems.keys() - values.keys():
            del self._problems[gone]
        return {name: self._intent(name, value) for name, value in values.items()}

    def bundle(self, digest: str) -> bytes | None:
        """The bundle of this digest as protobuf JSON; None when etcd does not have it."""
        return self._bundles.snapshot.get(bundle_key(digest))

    def _intent(self, name: str, value: bytes) -> Intent:
        try:
            wanted = self._parse(name, value)
        except InvalidRequest as error:
            self._report(name, error.message)
            good = self._good.get(name)
            if good is None:
                return Unreadable(problem=error.message)
            return replace(good, problem=error.message)
        self._problems.pop(name, None)
        self._good[name] = wanted
        return wanted

    def _parse(self, name: str, value: bytes) -> Wanted:
        deployment = decode(Deployment, value)
        if deployment.name != name:
            raise InvalidRequest("name", f"is {deployment.name!r} under the key of {name!r}")
        for setting in sorted(deployment.engine_settings):
            if setting in RESERVED_SETTINGS:
                raise InvalidRequest(f"engine_settings[{setting!r}]", "is not for a deployment to set")
        self._require_bundle(deployment.bundle_digest)
        return Wanted(
            spec=Spec(
                bundle_digest=deployment.bundle_digest,
                backend=deployment.backend,
                settings=tuple(sorted(deployment.engine_settings.items())),
            ),
            replicas=deployment.replicas,
            saturation=saturation_of(deployment.routing),
        )

    def _require_bundle(self, digest: str) -> None:
        value = self.bundle(digest)
        if value is None:
            raise InvalidRequest("bundle_digest", f"there is no bundle {digest} in etcd")
        try:
            bundle = decode(Bundle, value)
        except InvalidRequest as error:
            raise InvalidRequest("bundle_digest", f"bundle {digest} cannot be used: {error.message}") from error
        if digest_of(bundle) != digest:
            raise InvalidRequest("bundle_digest", f"bundle {digest} has other content than its digest says")

    def _report(self, name: str, problem: str) -> None:
        """Log and count a problem when it is new."""
        if self._problems.get(name) != problem:
            self._problems[name] = problem
            INVALID_INTENT.inc()
            log.error("intent_refused", deployment=name, error=problem)
