"""Deployments' rules from etcd, last known good; the router works without etcd, on defaults."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.api.control.v1 import intent_pb2 as pb
from headrace.base.errors import InvalidRequest
from headrace.bundle import intent, keys
from headrace.observe.log import get_logger
from headrace.router.core.rules import Policy, Rules

log = get_logger(__name__)


class Deployments:
    """Each deployment's rules by name. A record that cannot be read leaves the rules that were there before."""

    def __init__(self, *, freshness_s: float) -> None:
        self._defaults = Rules(freshness_s=freshness_s)
        self._records: dict[str, bytes] = {}
        self._rules: dict[str, Rules] = {}

    def rules_of(self, deployment: str) -> Rules:
        """The rules of a deployment; the defaults when it is not known."""
        return self._rules.get(deployment, self._defaults)

    def freshness_of(self, deployment: str) -> float:
        """The oldest heartbeat on which its replicas may be chosen, seconds."""
        return self.rules_of(deployment).freshness_s

    def update(self, records: Mapping[str, bytes]) -> None:
        """What etcd holds now, by key."""
        known = {keys.name_in(key, keys.DEPLOYMENTS): value for key, value in records.items()}
        for name in self._records.keys() - known.keys():
            self._rules.pop(name, None)
        for name, value in known.items():
            if self._records.get(name) != value:
                self._read(name, value)
        self._records = known

    def _read(self, name: str, value: bytes) -> None:
        try:
            rules = self._rules_in(intent.decode(pb.Deployment, value))
        except InvalidRequest as error:
            log.warning("deployment_not_understood", deployment=name, why=error.message)
            return
        if rules != self.rules_of(name):
            log.info("routing_changed", deployment=name, policy=rules.policy.value, freshness_s=rules.freshness_s)
        self._rules[name] = rules

    def _rules_in(self, deployment: pb.Deployment) -> Rules:
        routing = deployment.routing
        return Rules(
            policy=Policy(routing.policy) if routing.policy else self._defaults.policy,
            freshness_s=routing.freshness_s if routing.HasField("freshness_s") else self._defaults.freshness_s,
            slow_start_s=routing.slow_start_s,
            saturation=intent.saturation_of(routing),
            tenants=frozenset(deployment.tenants),
        )
