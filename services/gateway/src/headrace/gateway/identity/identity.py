"""Who asks: the one place where a credential becomes a principal."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

import structlog

from headrace.coord.etcd.client import EtcdClient
from headrace.gateway.core.principal import Principal
from headrace.gateway.core.refusal import Refusal
from headrace.gateway.identity import metrics
from headrace.gateway.identity.api_keys import PREFIX, ApiKeys
from headrace.gateway.identity.issuers import Issuers
from headrace.gateway.identity.key_set import KeySetSettings
from headrace.gateway.identity.refused import CredentialRefused
from headrace.gateway.identity.tokens import Tokens

log = structlog.get_logger(__name__)

_BEARER = "bearer "


class Identity:
    """API keys and token issuers, last known good; they outlive etcd. `run` keeps them fresh."""

    def __init__(self, client: EtcdClient, key_sets: KeySetSettings | None = None) -> None:
        self._api_keys = ApiKeys(client)
        self._issuers = Issuers(client, key_sets or KeySetSettings())
        self._tokens = Tokens(self._issuers)
        self.ready = asyncio.Event()
        """Set once keys and issuers have been read."""

    async def authenticate(self, metadata: Mapping[str, str]) -> Principal:
        """Whom the call with this metadata speaks for.

        Only `authorization` is looked at: no other header can choose a tenant, a priority or anything else. Raises
        CredentialRefused, with one text for all reasons; Unavailable when an issuer's keys could never be read.
        It waits for another process only when a token is signed with a key not seen before: 5 s at most.
        """
        try:
            return await self._principal(metadata.get("authorization", ""))
        except CredentialRefused as refused:
            metrics.REFUSED.labels(refused.refusal.value).inc()
            log.info("credential_refused", why=refused.refusal.value, credential=refused.credential)
            raise

    async def _principal(self, header: str) -> Principal:
        if not header:
            raise CredentialRefused(Refusal.NO_CREDENTIAL)
        if not header[: len(_BEARER)].lower() == _BEARER:
            raise CredentialRefused(Refusal.MALFORMED)
        credential = header[len(_BEARER) :].strip()
        if credential.startswith(PREFIX):
            return self._api_keys.authenticate(credential, time.time())
        if credential.count(".") == 2:
            return await self._tokens.authenticate(credential, time.time())
        raise CredentialRefused(Refusal.MALFORMED)

    async def run(self) -> None:
        """Follow etcd and the issuers until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._api_keys.records.run())
            group.create_task(self._issuers.run())
            await self._api_keys.records.synced.wait()
            await self._issuers.ready.wait()
            self.ready.set()
