"""Who a request speaks for, as its credential says; nothing a client sends besides can change it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

OPERATOR = "operator"
"""The role that sees usage and audit of all tenants."""


class Priority(IntEnum):
    """Classes of requests, by urgency."""

    BATCH = 1
    STANDARD = 2
    INTERACTIVE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """`credential` names the key or issuer, for people. Empty `deployments` or `adapters` mean all."""

    tenant: str
    credential: str
    roles: frozenset[str] = frozenset({"user"})
    priority: Priority = Priority.STANDARD
    deployments: frozenset[str] = field(default_factory=frozenset)
    adapters: frozenset[str] = field(default_factory=frozenset)

    def permits(self, deployment: str) -> bool:
        """Whether it may use this deployment."""
        return not self.deployments or deployment in self.deployments

    def granted(self, wanted: Priority | None) -> Priority:
        """The class a request gets that wants `wanted`: never above the credential's own."""
        return self.priority if wanted is None else min(wanted, self.priority)
