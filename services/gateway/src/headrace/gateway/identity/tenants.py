"""Tenants' terms, as etcd said last."""

from __future__ import annotations

import asyncio

from headrace.base.errors import Unavailable
from headrace.bundle import keys
from headrace.coord.etcd.client import EtcdClient
from headrace.coord.etcd.watch import PrefixMap
from headrace.gateway.core.terms import TenantTerms
from headrace.gateway.identity.records import read_all, tenant_terms


class Tenants:
    """The last known good terms of each tenant; they outlive etcd, and a record that cannot be read."""

    def __init__(self, client: EtcdClient) -> None:
        self._records = PrefixMap(client, keys.TENANTS)
        self._terms: dict[str, TenantTerms] = {}
        self._unreadable: frozenset[str] = frozenset()
        self.ready = asyncio.Event()
        """Set once the records have been read."""

    def terms(self, tenant: str) -> TenantTerms:
        """What `tenant` may use; without a record, no limits of its own.

        Unavailable for a tenant whose record could never be read: no limits would be wrong, and so would be none left.
        """
        if tenant in self._unreadable:
            raise Unavailable("this tenant's record cannot be read", reason="TENANT_UNREADABLE", retry_after_s=5.0)
        return self._terms.get(tenant) or TenantTerms(tenant=tenant)

    async def run(self) -> None:
        """Follow etcd until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._records.run())
            group.create_task(self._follow())

    async def _follow(self) -> None:
        version = 0
        while True:
            version = await self._records.changed(version)
            snapshot = self._records.snapshot
            self._terms = read_all(snapshot, keys.TENANTS, tenant_terms, self._terms)
            self._unreadable = frozenset(keys.name_in(path, keys.TENANTS) for path in snapshot) - self._terms.keys()
            self.ready.set()
