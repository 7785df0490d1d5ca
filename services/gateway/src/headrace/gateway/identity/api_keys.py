"""API keys, as etcd said last."""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache

import structlog

from headrace.api.control.v1.intent_pb2 import ApiKey
from headrace.base.errors import HeadraceError
from headrace.bundle import intent, keys
from headrace.coord.etcd.client import EtcdClient
from headrace.coord.etcd.watch import PrefixMap
from headrace.gateway.core.principal import USER, Principal
from headrace.gateway.core.refusal import Refusal
from headrace.gateway.identity.records import priority_of
from headrace.gateway.identity.refused import CredentialRefused

log = structlog.get_logger(__name__)

PREFIX = "hr_"
LONGEST_KEY = 256


class ApiKeys:
    """Looked up by hash: the key itself is stored nowhere. A revoked key is refused once the watch has said so."""

    def __init__(self, client: EtcdClient) -> None:
        self.records = PrefixMap(client, keys.API_KEYS)

    def authenticate(self, key: str, now_s: float) -> Principal:
        """Whom `key` speaks for at the unix time `now_s`; CredentialRefused when nobody."""
        if len(key) > LONGEST_KEY:
            raise CredentialRefused(Refusal.MALFORMED)
        hashed = intent.hash_api_key(key)
        path = keys.api_key_key(hashed)
        record = self.records.snapshot.get(path)
        # The map finds it by its hash, which says nothing about the key; equality is still judged in constant time.
        stored = path if record is not None else ""
        if record is None or not hmac.compare_digest(stored, keys.api_key_key(hashed)):
            raise CredentialRefused(Refusal.UNKNOWN_KEY)
        try:
            grant = _grant(hashed, record)
        except HeadraceError as error:
            log.error("api_key_unreadable", hash_prefix=hashed[:8], why=error.message)
            raise CredentialRefused(Refusal.KEY_UNREADABLE, f"key {hashed[:8]}") from None
        if grant.expires_at_s is not None and now_s >= grant.expires_at_s:
            raise CredentialRefused(Refusal.KEY_EXPIRED, grant.principal.credential)
        return grant.principal


@dataclass(frozen=True, slots=True, kw_only=True)
class _Grant:
    principal: Principal
    expires_at_s: float | None


@lru_cache(maxsize=4096)
def _grant(hashed: str, record: bytes) -> _Grant:
    """Keyed by the record's content, so that a changed record is read anew; parsing one costs 60 µs."""
    key = intent.decode(ApiKey, record)
    principal = Principal(
        tenant=key.tenant,
        credential=key.name or f"key {hashed[:8]}",
        roles=frozenset(key.roles) or frozenset({USER}),
        priority=priority_of(key.priority),
        deployments=frozenset(key.deployments),
        adapters=frozenset(key.adapters),
    )
    return _Grant(principal=principal, expires_at_s=_unix(key.expires_at) if key.expires_at else None)


def _unix(text: str) -> float:
    at = datetime.fromisoformat(text)
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
