"""etcd's records of tenants and issuers, as the values decisions are made of."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TypeVar

import structlog

from headrace.api.control.v1.intent_pb2 import Issuer, Tenant
from headrace.base.errors import HeadraceError
from headrace.bundle import intent, keys
from headrace.gateway.core.claims import IssuerTerms
from headrace.gateway.core.principal import Priority
from headrace.gateway.core.terms import Limits, TenantTerms

log = structlog.get_logger(__name__)
T = TypeVar("T")


def priority_of(name: str) -> Priority:
    """By a record's name for it; empty: standard."""
    return Priority[name.upper()] if name else Priority.STANDARD


def tenant_terms(record: bytes) -> TenantTerms:
    """What a tenant's record says; InvalidRequest when it cannot be read."""
    tenant = intent.decode(Tenant, record)
    limits = {field.name: getattr(tenant.limits, field.name) for field, _ in tenant.limits.ListFields()}
    return TenantTerms(
        tenant=tenant.name,
        limits=Limits(**limits),
        weight=tenant.weight if tenant.HasField("weight") else 1.0,
        max_output_tokens=tenant.max_output_tokens if tenant.HasField("max_output_tokens") else None,
        denied_patterns=tuple(re.compile(pattern) for pattern in tenant.denied_patterns),
    )


def issuer_terms(record: bytes) -> IssuerTerms:
    """What an issuer's record says; InvalidRequest when it cannot be read."""
    issuer = intent.decode(Issuer, record)
    return IssuerTerms(
        name=issuer.name,
        issuer=issuer.issuer,
        audiences=tuple(issuer.audiences),
        jwks=issuer.jwks,
        tenant_claim=issuer.tenant_claim or "tenant",
        roles_claim=issuer.roles_claim or "roles",
        priority=priority_of(issuer.priority),
        deployments=frozenset(issuer.deployments),
        tenants=frozenset(issuer.tenants),
    )


def read_all(
    snapshot: Mapping[str, bytes], prefix: str, read: Callable[[bytes], T], before: Mapping[str, T]
) -> dict[str, T]:
    """Every record by name. One that cannot be read, or is under another's name, leaves what was good before."""
    found: dict[str, T] = {}
    for path, record in snapshot.items():
        name = keys.name_in(path, prefix)
        try:
            value = read(record)
            named = getattr(value, "tenant", None) or getattr(value, "name", None)
            if named == name:
                found[name] = value
                continue
            why = f"its name is {named!r}"
        except HeadraceError as error:
            why = error.message
        log.error("record_unreadable", path=path, why=why)
        if name in before:
            found[name] = before[name]
    return found
