"""API keys and tenants' terms, followed in a real etcd."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import structlog

from headrace.api.control.v1.intent_pb2 import ApiKey, Limits, Tenant
from headrace.base.errors import Unauthenticated, Unavailable
from headrace.bundle import intent, keys
from headrace.coord.etcd.client import EtcdClient
from headrace.gateway.core.principal import Principal, Priority
from headrace.gateway.core.refusal import Refusal
from headrace.gateway.core.terms import TenantTerms
from headrace.gateway.identity.identity import Identity
from headrace.gateway.identity.refused import CredentialRefused
from headrace.gateway.identity.tenants import Tenants
from headrace.rpc.status import to_status
from headrace.testkit.eventually import eventually

CREATED = "2026-01-01T00:00:00Z"


@pytest.fixture
async def etcd(etcd_endpoint: str) -> AsyncIterator[EtcdClient]:
    client = EtcdClient([etcd_endpoint])
    for prefix in (keys.API_KEYS, keys.TENANTS, keys.ISSUERS):
        for key in (await client.range(prefix)).entries:
            await client.delete(key)
    yield client
    await client.close()


@pytest.fixture
async def identity(etcd: EtcdClient) -> AsyncIterator[Identity]:
    identity = Identity(etcd)
    running = asyncio.create_task(identity.run())
    await identity.ready.wait()
    yield identity
    running.cancel()
    await asyncio.wait({running})


@pytest.fixture
async def tenants(etcd: EtcdClient) -> AsyncIterator[Tenants]:
    tenants = Tenants(etcd)
    running = asyncio.create_task(tenants.run())
    await tenants.ready.wait()
    yield tenants
    running.cancel()
    await asyncio.wait({running})


async def grant(etcd: EtcdClient, **fields: Any) -> str:
    key = intent.new_api_key()
    record = ApiKey(**({"tenant": "acme", "name": "ci", "created_at": CREATED} | fields))
    await etcd.put(keys.api_key_key(intent.hash_api_key(key)), intent.encode(record))
    return key


def bearing(credential: str) -> dict[str, str]:
    return {"authorization": f"Bearer {credential}"}


async def principal(identity: Identity, key: str, **metadata: str) -> Principal | Refusal:
    try:
        return await identity.authenticate(bearing(key) | metadata)
    except CredentialRefused as refused:
        return refused.refusal


async def until(identity: Identity, key: str, wanted: Principal | Refusal) -> None:
    async def so() -> bool:
        return await principal(identity, key) == wanted

    await eventually(so, every_s=0.005)


async def test_a_key_speaks_for_what_its_record_says(etcd: EtcdClient, identity: Identity) -> None:
    key = await grant(etcd, deployments=["a"], roles=["user", "operator"], priority="interactive", adapters=["f" * 32])
    await until(
        identity,
        key,
        Principal(
            tenant="acme",
            credential="ci",
            roles=frozenset({"user", "operator"}),
            priority=Priority.INTERACTIVE,
            deployments=frozenset({"a"}),
            adapters=frozenset({"f" * 32}),
        ),
    )


async def test_a_key_of_the_first_version_is_a_standard_user(etcd: EtcdClient, identity: Identity) -> None:
    key = await grant(etcd)
    await until(identity, key, Principal(tenant="acme", credential="ci"))


async def test_a_revoked_key_is_refused_within_a_second(etcd: EtcdClient, identity: Identity) -> None:
    key = await grant(etcd)
    await until(identity, key, Principal(tenant="acme", credential="ci"))
    revoked_at = time.monotonic()
    await etcd.delete(keys.api_key_key(intent.hash_api_key(key)))
    await until(identity, key, Refusal.UNKNOWN_KEY)
    assert time.monotonic() - revoked_at < 1.0


async def test_a_key_is_refused_from_its_expiry_on(etcd: EtcdClient, identity: Identity) -> None:
    in_half_a_second = (datetime.now(UTC) + timedelta(seconds=0.5)).isoformat()
    key = await grant(etcd, expires_at=in_half_a_second)
    await until(identity, key, Principal(tenant="acme", credential="ci"))
    await until(identity, key, Refusal.KEY_EXPIRED)


async def test_a_changed_record_counts_at_once(etcd: EtcdClient, identity: Identity) -> None:
    key = await grant(etcd)
    await until(identity, key, Principal(tenant="acme", credential="ci"))
    record = ApiKey(tenant="acme", name="ci", created_at=CREATED, priority="batch")
    await etcd.put(keys.api_key_key(intent.hash_api_key(key)), intent.encode(record))
    await until(identity, key, Principal(tenant="acme", credential="ci", priority=Priority.BATCH))


@pytest.mark.parametrize(
    ("record", "why"),
    [
        (b"{not json", Refusal.KEY_UNREADABLE),
        (b'{"tenant": "a/b", "created_at": "2026-01-01T00:00:00Z"}', Refusal.KEY_UNREADABLE),
        (
            b'{"tenant": "a", "created_at": "2026-01-01T00:00:00Z", "expires_at": "tomorrow"}',
            Refusal.KEY_UNREADABLE,
        ),
    ],
)
async def test_a_record_that_cannot_be_read_lets_nobody_in(
    etcd: EtcdClient, identity: Identity, record: bytes, why: Refusal
) -> None:
    key = intent.new_api_key()
    await etcd.put(keys.api_key_key(intent.hash_api_key(key)), record)
    await until(identity, key, why)


@pytest.mark.parametrize(
    "header",
    [
        "Basic dTpw",
        "Bearer",
        "Bearer ",
        "hr_x",
        "Bearer hr_" + "x" * 43,
        "Bearer hr_" + "x" * 10_000,
        "Bearer a.b",
        "b",
    ],
)
async def test_whatever_is_wrong_the_client_hears_the_same(etcd: EtcdClient, identity: Identity, header: str) -> None:
    expired = await grant(etcd, expires_at="2026-01-02T00:00:00Z")
    await until(identity, expired, Refusal.KEY_EXPIRED)
    said = []
    for metadata in (bearing(expired), {"authorization": header}):
        with pytest.raises(Unauthenticated) as refused:
            await identity.authenticate(metadata)
        said.append(to_status(refused.value).SerializeToString())
    assert said[0] == said[1]


async def test_a_call_without_a_credential_is_told_how_to_send_one(identity: Identity) -> None:
    with pytest.raises(Unauthenticated, match="authorization: Bearer") as refused:
        await identity.authenticate({})
    assert refused.value.reason == "NO_CREDENTIAL"


FORGED = {
    "x-tenant": "rival",
    "x-tenant-id": "rival",
    "x-smg-tenant-id": "rival",
    "x-headrace-tenant": "rival",
    "tenant": "rival",
    "user": "rival",
    "x-user": "rival",
    "x-priority": "interactive",
    "priority": "interactive",
    "x-roles": "operator",
    "x-forwarded-user": "rival",
    "x-gateway-destination-endpoint": "10.0.0.1:1",
    "x-gateway-model-name": "other",
    "routing-strategy": "random",
    "x-routing-policy": "round_robin",
    "external-filter": "all=true",
    "x-worker-id": "e-9",
    "x-api-key": "hr_rival",
    "cookie": "tenant=rival",
}


async def test_no_header_but_the_credential_is_believed(etcd: EtcdClient, identity: Identity) -> None:
    key = await grant(etcd)
    await until(identity, key, Principal(tenant="acme", credential="ci"))
    assert await principal(identity, key, **FORGED) == await principal(identity, key)
    with pytest.raises(Unauthenticated):
        await identity.authenticate(FORGED)


async def test_keys_outlive_etcd(etcd: EtcdClient, tmp_path: Any) -> None:
    from headrace.coord.embedded import EmbeddedEtcd

    server = await asyncio.to_thread(EmbeddedEtcd.start, tmp_path)
    client = EtcdClient([server.endpoint])
    identity = Identity(client)
    running = asyncio.create_task(identity.run())
    try:
        key = await grant(client)
        await until(identity, key, Principal(tenant="acme", credential="ci"))
        await asyncio.to_thread(server.stop)
        assert await principal(identity, key) == Principal(tenant="acme", credential="ci")
    finally:
        running.cancel()
        await asyncio.wait({running})
        await client.close()
        await asyncio.to_thread(server.stop)


async def test_keys_never_reach_a_log_at_any_level(
    etcd: EtcdClient, identity: Identity, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    good, unknown, token = await grant(etcd), intent.new_api_key(), "eyJhbGciOiJub25lIn0.c2VjcmV0." + "s" * 43
    with structlog.testing.capture_logs() as events:
        await until(identity, good, Principal(tenant="acme", credential="ci"))
        await principal(identity, unknown)
        await principal(identity, token)
    told = repr(events) + caplog.text + "".join(capfd.readouterr())
    assert "credential_refused" in told
    for secret in (good, unknown, token, intent.hash_api_key(good)):
        assert secret not in told


async def test_terms_are_the_record_and_without_one_there_are_no_limits(etcd: EtcdClient, tenants: Tenants) -> None:
    assert tenants.terms("acme") == TenantTerms(tenant="acme")
    record = Tenant(
        name="acme",
        limits=Limits(requests_per_minute=60, tokens_per_day=0),
        weight=2.5,
        max_output_tokens=100,
        denied_patterns=[r"(?i)secret\s+plan"],
    )
    await etcd.put(keys.tenant_key("acme"), intent.encode(record))
    await eventually(lambda: tenants.terms("acme").weight == 2.5)
    terms = tenants.terms("acme")
    limits = terms.limits
    assert (limits.requests_per_minute, limits.tokens_per_day) == (60, 0)
    assert (limits.tokens_per_minute, limits.max_concurrent_requests) == (None, None)
    assert terms.max_output_tokens == 100
    assert terms.denied_patterns[0].search("the SECRET  plan")
    assert tenants.terms("other") == TenantTerms(tenant="other")
    await etcd.delete(keys.tenant_key("acme"))
    await eventually(lambda: tenants.terms("acme") == TenantTerms(tenant="acme"))


@pytest.mark.parametrize(
    "broken",
    [b"{", b'{"name": "acme", "weight": 0}', b'{"name": "acme", "denied_patterns": ["("]}', b'{"name": "other"}'],
)
async def test_a_tenant_record_that_cannot_be_read_leaves_the_last_good_one_in_force(
    etcd: EtcdClient, tenants: Tenants, broken: bytes
) -> None:
    good = Tenant(name="acme", limits=Limits(requests_per_minute=1))
    await etcd.put(keys.tenant_key("acme"), intent.encode(good))
    await eventually(lambda: tenants.terms("acme").limits.requests_per_minute == 1)
    await etcd.put(keys.tenant_key("acme"), broken)
    await etcd.put(keys.tenant_key("later"), intent.encode(Tenant(name="later", weight=3)))
    await eventually(lambda: tenants.terms("later").weight == 3)
    assert tenants.terms("acme").limits.requests_per_minute == 1


async def test_a_tenant_whose_record_was_never_readable_is_neither_unlimited_nor_refused_for_ever(
    etcd: EtcdClient, tenants: Tenants
) -> None:
    await etcd.put(keys.tenant_key("torn"), b"{")
    await etcd.put(keys.tenant_key("later"), intent.encode(Tenant(name="later", weight=3)))
    await eventually(lambda: tenants.terms("later").weight == 3)
    with pytest.raises(Unavailable) as unreadable:
        tenants.terms("torn")
    assert unreadable.value.reason == "TENANT_UNREADABLE"
    await etcd.put(keys.tenant_key("torn"), intent.encode(Tenant(name="torn")))
    await eventually(lambda: _readable(tenants, "torn"))


def _readable(tenants: Tenants, name: str) -> bool:
    try:
        return tenants.terms(name).tenant == name
    except Unavailable:
        return False
