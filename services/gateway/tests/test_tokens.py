"""Signed tokens: real signatures, real key sets from files and over HTTP, issuers in a real etcd."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from headrace.api.control.v1.intent_pb2 import Issuer
from headrace.base.errors import Unavailable
from headrace.bundle import intent, keys
from headrace.cli.certs import Authority
from headrace.coord.etcd.client import EtcdClient
from headrace.gateway.core.principal import Principal, Priority
from headrace.gateway.core.refusal import Refusal
from headrace.gateway.identity.identity import Identity
from headrace.gateway.identity.key_set import KeySetSettings
from headrace.gateway.identity.refused import CredentialRefused
from headrace.testkit.eventually import eventually

ISS = "https://login.example"
AUD = "headrace"
RSA = rsa.generate_private_key(public_exponent=65537, key_size=2048)
OTHER_RSA = rsa.generate_private_key(public_exponent=65537, key_size=2048)
EC = ec.generate_private_key(ec.SECP256R1())
ED = ed25519.Ed25519PrivateKey.generate()
ACME = Principal(tenant="acme", credential="sso")


def jwk(key: Any, kid: str, **more: Any) -> dict[str, Any]:
    kinds = {rsa.RSAPrivateKey: "RS256", ec.EllipticCurvePrivateKey: "ES256", ed25519.Ed25519PrivateKey: "EdDSA"}
    algorithm = next(name for kind, name in kinds.items() if isinstance(key, kind))
    made = jwt.get_algorithm_by_name(algorithm).to_jwk(key.public_key(), as_dict=True)  # type: ignore[call-overload]
    return {**made, "kid": kid, "use": "sig"} | more


def token(key: Any = RSA, *, kid: str | None = "k1", alg: str = "RS256", headers: Any = None, **claims: Any) -> str:
    now = int(time.time())
    body = {"iss": ISS, "aud": AUD, "exp": now + 300, "nbf": now - 5, "tenant": "acme"} | claims
    body = {name: value for name, value in body.items() if value is not None}
    return jwt.encode(body, key, algorithm=alg, headers=({"kid": kid} if kid else {}) | (headers or {}))


class Source:
    """A web server for a key set, which counts its readers and can be made to fail or to stall."""

    def __init__(self) -> None:
        self.keys: list[dict[str, Any]] = [jwk(RSA, "k1")]
        self.status = "200 OK"
        self.body: bytes | None = None
        self.stalls = False
        self.reads = 0
        self.url = ""
        self.writers: list[asyncio.StreamWriter] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        self.reads += 1
        self.writers.append(writer)
        body = json.dumps({"keys": self.keys}).encode() if self.body is None else self.body
        if not self.stalls:
            head = f"HTTP/1.1 {self.status}\r\nlocation: {self.url}\r\ncontent-length: {len(body)}\r\n"
            writer.write(f"{head}connection: close\r\n\r\n".encode() + body)
            await writer.drain()
            writer.close()

    async def close(self) -> None:
        for writer in self.writers:
            writer.transport.abort()


@pytest.fixture
async def source() -> AsyncIterator[Source]:
    source = Source()
    server = await asyncio.start_server(source.serve, "127.0.0.1", 0)
    source.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/jwks.json"
    async with server:
        yield source
        await source.close()


@pytest.fixture
async def etcd(etcd_endpoint: str) -> AsyncIterator[EtcdClient]:
    client = EtcdClient([etcd_endpoint])
    for key in (await client.range(keys.ISSUERS)).entries:
        await client.delete(key)
    yield client
    await client.close()


Start = Callable[..., Awaitable[Identity]]


@pytest.fixture
async def start(etcd: EtcdClient) -> AsyncIterator[Start]:
    """Starts an identity that trusts one issuer, named sso."""
    running: list[asyncio.Task[None]] = []

    async def begin(jwks: str, *, key_sets: KeySetSettings | None = None, **fields: Any) -> Identity:
        issuer = Issuer(**({"name": "sso", "issuer": ISS, "audiences": [AUD], "jwks": jwks} | fields))
        await etcd.put(keys.issuer_key("sso"), intent.encode(issuer))
        identity = Identity(etcd, key_sets or KeySetSettings(on_demand_s=60.0, read_within_s=1.0))
        running.append(asyncio.create_task(identity.run()))
        await identity.ready.wait()
        return identity

    yield begin
    for task in running:
        task.cancel()
    await asyncio.wait(running)


async def heard(identity: Identity, credential: str) -> Principal | Refusal:
    try:
        return await identity.authenticate({"authorization": f"Bearer {credential}"})
    except CredentialRefused as refused:
        return refused.refusal


async def test_a_good_token_speaks_for_its_tenant_with_what_the_issuer_is_worth(start: Start, source: Source) -> None:
    identity = await start(source.url, priority="batch", deployments=["a"])
    said = await heard(identity, token(roles=["operator", "accountant"]))
    assert said == Principal(
        tenant="acme",
        credential="sso",
        roles=frozenset({"operator"}),
        priority=Priority.BATCH,
        deployments=frozenset({"a"}),
    )


@pytest.mark.parametrize(
    ("key", "alg"), [(RSA, "RS256"), (RSA, "PS384"), (EC, "ES256"), (ED, "EdDSA")], ids=["rs", "ps", "es", "ed"]
)
async def test_each_asymmetric_algorithm_is_accepted_with_a_key_of_its_kind(
    start: Start, source: Source, key: Any, alg: str
) -> None:
    source.keys = [jwk(key, "k1")]
    assert await heard(await start(source.url), token(key, alg=alg)) == ACME


NOW = int(time.time())
_LATER = 10**6  # the whole suite runs between collection and this test


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (lambda: token(exp=NOW - 31), Refusal.TOKEN_EXPIRED),
        (lambda: token(nbf=NOW + _LATER, exp=NOW + 2 * _LATER), Refusal.TOKEN_NOT_YET_VALID),
        (lambda: token(aud="somebody-else"), Refusal.WRONG_AUDIENCE),
        (lambda: token(aud=["a", "b"]), Refusal.WRONG_AUDIENCE),
        (lambda: token(aud=None), Refusal.WRONG_AUDIENCE),
        (lambda: token(iss="https://evil.example"), Refusal.UNKNOWN_ISSUER),
        (lambda: token(iss=ISS + "/"), Refusal.UNKNOWN_ISSUER),
        (lambda: token(iss=None), Refusal.UNKNOWN_ISSUER),
        (lambda: token(exp=None), Refusal.BAD_CLAIMS),
        (lambda: token(kid="k2"), Refusal.UNKNOWN_SIGNING_KEY),
        (lambda: token(OTHER_RSA), Refusal.BAD_SIGNATURE),
        (lambda: token(EC, alg="ES256"), Refusal.UNKNOWN_SIGNING_KEY),
        (lambda: token(tenant=None), Refusal.NO_TENANT),
        (lambda: token(tenant=["acme"]), Refusal.NO_TENANT),
        (lambda: token(tenant="a/b"), Refusal.NO_TENANT),
        (lambda: token(tenant=""), Refusal.NO_TENANT),
        (lambda: token(None, alg="none"), Refusal.TOKEN_ALGORITHM),
        (lambda: token("s" * 64, alg="HS256"), Refusal.TOKEN_ALGORITHM),
        (lambda: token(padding="x" * 9000), Refusal.TOKEN_TOO_LARGE),
        (lambda: "a.b.c", Refusal.MALFORMED),
        (lambda: "..", Refusal.MALFORMED),
        (lambda: token()[:-4] + ".", Refusal.MALFORMED),
        (lambda: raw({"alg": "RS256", "kid": ["k1"]}, {"iss": ISS, "aud": AUD}), Refusal.MALFORMED),
        (lambda: raw({"alg": ["RS256"]}, {"iss": ISS, "aud": AUD}), Refusal.TOKEN_ALGORITHM),
        (lambda: raw({"alg": "RS256"}, {"iss": [ISS], "aud": {"a": 1}}), Refusal.UNKNOWN_ISSUER),
        (lambda: raw({"alg": "RS256"}, {"iss": ISS, "aud": 7}), Refusal.WRONG_AUDIENCE),
        (lambda: raw({"alg": "RS256"}, []), Refusal.MALFORMED),
        (lambda: raw_text('{"alg":"RS256"}', "[" * 4000), Refusal.MALFORMED),
    ],
)
async def test_a_token_with_anything_wrong_is_refused(
    start: Start, source: Source, made: Callable[[], str], why: Refusal
) -> None:
    identity = await start(source.url)
    assert await heard(identity, made()) is why
    assert await heard(identity, token()) == ACME


def raw(header: Any, claims: Any) -> str:
    return raw_text(json.dumps(header), json.dumps(claims))


def raw_text(header: str, claims: str) -> str:
    def part(text: str) -> str:
        return base64.urlsafe_b64encode(text.encode()).rstrip(b"=").decode()

    return f"{part(header)}.{part(claims)}.{part('signature')}"


async def test_a_public_key_cannot_be_passed_off_as_a_secret(start: Start, source: Source) -> None:
    """The classic confusion: HMAC keyed with the RSA public key, which everybody knows."""
    public = RSA.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    signed = token().rsplit(".", 1)[0].split(".", 1)[1]
    header = base64.urlsafe_b64encode(b'{"alg":"HS256","kid":"k1"}').rstrip(b"=").decode()
    mac = hmac.new(public, f"{header}.{signed}".encode(), hashlib.sha256).digest()
    forged = f"{header}.{signed}.{base64.urlsafe_b64encode(mac).rstrip(b'=').decode()}"
    assert await heard(await start(source.url), forged) is Refusal.TOKEN_ALGORITHM


async def test_keys_that_must_not_sign_are_passed_over(start: Start, source: Source) -> None:
    weak = rsa.generate_private_key(public_exponent=65537, key_size=1024)
    secret = {"kty": "oct", "k": "c2VjcmV0", "kid": "secret", "alg": "HS256"}
    source.keys = [secret, jwk(weak, "weak"), jwk(OTHER_RSA, "enc", use="enc"), {"kty": "RSA"}, 7, jwk(RSA, "k1")]  # type: ignore[list-item]
    identity = await start(source.url)
    assert await heard(identity, token()) == ACME
    assert await heard(identity, token(OTHER_RSA, kid="enc")) is Refusal.UNKNOWN_SIGNING_KEY


async def test_a_key_is_used_with_the_algorithm_it_is_for_alone(start: Start, source: Source) -> None:
    source.keys = [jwk(RSA, "k1", alg="PS256")]
    identity = await start(source.url)
    assert await heard(identity, token(alg="RS256")) is Refusal.UNKNOWN_SIGNING_KEY
    assert await heard(identity, token(alg="PS256")) == ACME


async def test_without_a_key_id_the_one_key_there_is_counts(start: Start, source: Source) -> None:
    identity = await start(source.url)
    assert await heard(identity, token(kid=None)) == ACME


async def test_an_issuer_speaks_for_its_own_tenants_only_and_makes_no_operators(start: Start, source: Source) -> None:
    identity = await start(source.url, tenants=["acme"])
    assert await heard(identity, token(tenant="rival")) is Refusal.FOREIGN_TENANT
    assert await heard(identity, token(roles="operator user")) == ACME


async def test_claims_may_have_other_names(start: Start, source: Source) -> None:
    identity = await start(source.url, tenant_claim="https://x/org", roles_claim="scope")
    said = await heard(identity, token(tenant=None, scope="openid operator", **{"https://x/org": "acme"}))
    assert said == Principal(tenant="acme", credential="sso", roles=frozenset({"operator"}))


async def test_a_rotated_key_is_fetched_when_first_seen_and_the_old_one_is_refused(
    start: Start, source: Source
) -> None:
    identity = await start(source.url)
    old = token()
    assert await heard(identity, old) == ACME
    source.keys = [jwk(OTHER_RSA, "k2")]
    assert await heard(identity, token(OTHER_RSA, kid="k2")) == ACME
    assert await heard(identity, old) is Refusal.UNKNOWN_SIGNING_KEY


async def test_made_up_key_ids_do_not_hammer_the_issuer(start: Start, source: Source) -> None:
    identity = await start(source.url)
    assert await heard(identity, token()) == ACME
    before = source.reads
    forged = [token(OTHER_RSA, kid=f"made-up-{n}") for n in range(50)]
    assert set(await asyncio.gather(*(heard(identity, one) for one in forged))) == {Refusal.UNKNOWN_SIGNING_KEY}
    for one in forged[:10]:
        assert await heard(identity, one) is Refusal.UNKNOWN_SIGNING_KEY
    assert source.reads <= before + 1


async def test_the_last_good_keys_outlive_their_source_whatever_it_says(start: Start, source: Source) -> None:
    settings = KeySetSettings(refresh_s=0.02, on_demand_s=0.0, read_within_s=0.2)
    identity = await start(source.url, key_sets=settings)
    assert await heard(identity, token()) == ACME
    for status, body in (
        ("500 Oops", b""),
        ("302 Found", b""),
        ("200 OK", b"<html>"),
        ("200 OK", b'{"keys": []}'),
        ("200 OK", b'"' + b"x" * (1 << 20) + b'"'),
    ):
        source.status, source.body = status, body
        seen = source.reads
        await eventually(lambda seen=seen: source.reads > seen)
        assert await heard(identity, token(jti=body[:9].hex())) == ACME
    source.stalls = True
    assert await heard(identity, token(jti="stalled")) == ACME


async def test_a_token_whose_issuers_keys_were_never_read_is_not_judged(start: Start, source: Source) -> None:
    source.status = "503 Away"
    identity = await start(source.url, key_sets=KeySetSettings(on_demand_s=0.0, read_within_s=1.0))
    with pytest.raises(Unavailable) as unknown:
        await identity.authenticate({"authorization": f"Bearer {token()}"})
    assert unknown.value.reason == "ISSUER_UNAVAILABLE"
    source.status = "200 OK"
    assert await heard(identity, token()) == ACME


async def test_a_stalled_issuer_holds_nobody_else_up(start: Start, source: Source) -> None:
    identity = await start(source.url, key_sets=KeySetSettings(on_demand_s=0.0, read_within_s=1.0))
    assert await heard(identity, token()) == ACME
    source.stalls = True
    waiting = asyncio.create_task(heard(identity, token(OTHER_RSA, kid="k2")))
    began = time.monotonic()
    for n in range(20):
        assert await heard(identity, token(jti=str(n))) == ACME
    assert time.monotonic() - began < 0.9
    assert not waiting.done()
    assert await waiting is Refusal.UNKNOWN_SIGNING_KEY


async def test_keys_come_from_a_file_and_follow_it(start: Start, tmp_path: Path) -> None:
    file = tmp_path / "jwks.json"
    file.write_text(json.dumps({"keys": [jwk(RSA, "k1")]}))
    identity = await start(str(file), key_sets=KeySetSettings(file_refresh_s=0.02, on_demand_s=0.0))
    old = token()
    assert await heard(identity, old) == ACME
    file.write_text(json.dumps({"keys": [jwk(EC, "k2")]}))
    assert await heard(identity, token(EC, kid="k2", alg="ES256")) == ACME
    assert await heard(identity, old) is Refusal.UNKNOWN_SIGNING_KEY


async def test_keys_come_over_https_from_a_server_that_can_prove_itself(
    start: Start, source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority.new("A company")
    pair = authority.issue("127.0.0.1")
    for name, content in (("ca.pem", authority.pem.cert), ("c.pem", pair.cert), ("k.pem", pair.key)):
        (tmp_path / name).write_bytes(content)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "c.pem", tmp_path / "k.pem")
    server = await asyncio.start_server(source.serve, "127.0.0.1", 0, ssl=context)
    async with server:
        url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}/jwks.json"
        identity = await start(url, key_sets=KeySetSettings(on_demand_s=0.0, read_within_s=2.0))
        with pytest.raises(Unavailable):
            await identity.authenticate({"authorization": f"Bearer {token()}"})
        assert source.reads == 0
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
        assert await heard(identity, token()) == ACME
        await source.close()


async def test_an_issuer_that_is_taken_away_or_changed_counts_at_once(
    start: Start, source: Source, etcd: EtcdClient
) -> None:
    identity = await start(source.url)
    good = token()
    assert await heard(identity, good) == ACME
    only_rival = Issuer(name="sso", issuer=ISS, audiences=[AUD], jwks=source.url, tenants=["rival"])
    await etcd.put(keys.issuer_key("sso"), intent.encode(only_rival))

    async def is_now(why: Refusal) -> bool:
        return await heard(identity, good) is why

    await eventually(lambda: is_now(Refusal.FOREIGN_TENANT))
    await etcd.delete(keys.issuer_key("sso"))
    await eventually(lambda: is_now(Refusal.UNKNOWN_ISSUER))


async def test_a_token_that_was_accepted_is_refused_once_it_has_expired(
    start: Start, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.gateway.identity import tokens

    monkeypatch.setattr(tokens, "LEEWAY_S", 0.0)
    identity = await start(source.url)
    short = token(exp=int(time.time()) + 2)
    assert await heard(identity, short) == ACME

    async def expired() -> bool:
        return await heard(identity, short) is Refusal.TOKEN_EXPIRED

    await eventually(expired)


async def test_what_is_remembered_is_bounded(start: Start, source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.gateway.identity import tokens

    monkeypatch.setattr(tokens, "MOST_VERIFIED", 3)
    identity = await start(source.url)
    for n in range(10):
        assert await heard(identity, token(jti=str(n))) == ACME
    assert len(identity._tokens._verified) == 3
