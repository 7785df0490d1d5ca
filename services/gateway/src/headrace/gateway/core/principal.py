"""Who a request speaks for, as its credential says; nothing a client sends besides can change it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

from headrace.base.errors import Forbidden

USER = "user"
"""The role that asks models."""
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
    roles: frozenset[str] = frozenset({USER})
    priority: Priority = Priority.STANDARD
    deployments: frozenset[str] = field(default_factory=frozenset)
    adapters: frozenset[str] = field(default_factory=frozenset)

    def permits(self, deployment: str) -> bool:
        """Whether it may use this deployment."""
        return not self.deployments or deployment in self.deployments

    def granted(self, wanted: Priority | None) -> Priority:
        """The class a request gets that wants `wanted`: never above the credential's own."""
        return self.priority if wanted is None else min(wanted, self.priority)

    def require_user(self) -> None:
        """Forbidden unless it may ask models: whoever only looks after them need not be able to."""
        if USER not in self.roles:
            raise Forbidden(
                f"{self.credential!r} has the role {', '.join(sorted(self.roles))}; asking a model needs {USER}",
                reason="ROLE_REQUIRED",
                metadata={"role": USER},
            )

    def books_of(self, tenant: str) -> str:
        """The tenant whose usage and audit it sees that asks for `tenant`'s; "" is all that it may see.

        Forbidden for another's unless it is an operator, whether or not there is such a tenant.
        """
        if OPERATOR in self.roles:
            return tenant
        if tenant not in ("", self.tenant):
            raise Forbidden(
                f"usage and audit of other tenants than {self.tenant!r} need the role {OPERATOR}",
                reason="ROLE_REQUIRED",
                metadata={"role": OPERATOR},
            )
        return self.tenant
