"""Who may sign tokens, as etcd said last, each with its keys."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from headrace.bundle import keys
from headrace.coord.etcd.client import EtcdClient
from headrace.coord.etcd.watch import PrefixMap
from headrace.gateway.core.claims import IssuerTerms
from headrace.gateway.identity.key_set import KeySet, KeySetSettings
from headrace.gateway.identity.records import issuer_terms, read_all


@dataclass(frozen=True, slots=True, kw_only=True)
class TrustedIssuer:
    """One record and the keys behind it; a changed record is another one."""

    terms: IssuerTerms
    key_set: KeySet


class Issuers:
    """The last known good issuers. `run` follows etcd and keeps their keys fresh."""

    def __init__(self, client: EtcdClient, settings: KeySetSettings) -> None:
        self._records = PrefixMap(client, keys.ISSUERS)
        self._settings = settings
        self._trusted: dict[str, TrustedIssuer] = {}
        self._refreshing: dict[KeySet, asyncio.Task[None]] = {}
        self.ready = asyncio.Event()
        """Set once the records have been read; their keys may still be on the way."""

    def named(self, issuer: str) -> list[TrustedIssuer]:
        """Those whose tokens say `issuer`, by name: several records may differ in audience."""
        return [one for _, one in sorted(self._trusted.items()) if one.terms.issuer == issuer]

    def holds(self, trusted: TrustedIssuer) -> bool:
        """Whether this very record is still in force."""
        return self._trusted.get(trusted.terms.name) is trusted

    async def run(self) -> None:
        """Follow etcd until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._records.run())
            group.create_task(self._follow(group))

    async def _follow(self, group: asyncio.TaskGroup) -> None:
        version = 0
        while True:
            version = await self._records.changed(version)
            before = {name: one.terms for name, one in self._trusted.items()}
            wanted = read_all(self._records.snapshot, keys.ISSUERS, issuer_terms, before)
            self._trusted = {name: self._kept_or_new(terms) for name, terms in wanted.items()}
            self._refresh(group)
            self.ready.set()

    def _kept_or_new(self, terms: IssuerTerms) -> TrustedIssuer:
        """A record whose keys come from where they came from keeps them."""
        known = self._trusted.get(terms.name)
        if known is not None and known.terms == terms:
            return known
        if known is not None and known.terms.jwks == terms.jwks:
            return TrustedIssuer(terms=terms, key_set=known.key_set)
        return TrustedIssuer(terms=terms, key_set=KeySet(terms.name, terms.jwks, self._settings))

    def _refresh(self, group: asyncio.TaskGroup) -> None:
        """One refreshing task for each key set in use."""
        wanted = {one.key_set for one in self._trusted.values()}
        for key_set in self._refreshing.keys() - wanted:
            self._refreshing.pop(key_set).cancel()
        for key_set in wanted - self._refreshing.keys():
            self._refreshing[key_set] = group.create_task(key_set.run())
