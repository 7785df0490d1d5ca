"""From what a verified token says to whom a request speaks for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.gateway.core.principal import OPERATOR, USER, Principal, Priority
from headrace.gateway.core.refusal import Refusal

_KNOWN_ROLES = frozenset({USER, OPERATOR})
_TENANT = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")


@dataclass(frozen=True, slots=True, kw_only=True)
class IssuerTerms:
    """What an issuer's tokens are worth here. Empty `deployments` or `tenants` mean all."""

    name: str
    issuer: str
    audiences: tuple[str, ...]
    jwks: str
    tenant_claim: str = "tenant"
    roles_claim: str = "roles"
    priority: Priority = Priority.STANDARD
    deployments: frozenset[str] = frozenset()
    tenants: frozenset[str] = frozenset()


def principal_of(claims: Mapping[str, Any], terms: IssuerTerms) -> Principal | Refusal:
    """The principal behind the claims of a token whose signature, times, issuer and audience are right.

    Roles that are not Headrace's are passed over; without one of Headrace's it is a user. An issuer that speaks for
    some tenants only cannot make operators, who see all tenants.
    """
    tenant = claims.get(terms.tenant_claim)
    if not isinstance(tenant, str) or not _TENANT.fullmatch(tenant):
        return Refusal.NO_TENANT
    if terms.tenants and tenant not in terms.tenants:
        return Refusal.FOREIGN_TENANT
    roles = _roles(claims.get(terms.roles_claim)) & _KNOWN_ROLES
    if terms.tenants:
        roles -= {OPERATOR}
    return Principal(
        tenant=tenant,
        credential=terms.name,
        roles=roles or frozenset({USER}),
        priority=terms.priority,
        deployments=terms.deployments,
    )


def _roles(claim: Any) -> frozenset[str]:
    """A list of names, or one text with spaces between them, as OAuth 2 writes scopes."""
    if isinstance(claim, str):
        return frozenset(claim.split())
    if isinstance(claim, list):
        return frozenset(role for role in claim if isinstance(role, str))
    return frozenset()
