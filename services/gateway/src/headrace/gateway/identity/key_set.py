"""An issuer's signing keys (a JWK set, RFC 7517) from a file or a URL: read at once, again and again, and on demand."""

from __future__ import annotations

import asyncio
import json
import random
import ssl
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jwt
import structlog

from headrace.base.backoff import Backoff
from headrace.gateway.identity import metrics

log = structlog.get_logger(__name__)

ALGORITHMS = {
    "RSA": ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"),
    "EC": ("ES256", "ES384", "ES512"),
    "OKP": ("EdDSA",),
}
"""By key type. No HMAC: whoever could check such a signature could also make one (and RFC 8725 §3.1)."""

MOST_BYTES = 1 << 20
MOST_KEYS = 100
LEAST_RSA_BITS = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class KeySetSettings:
    """Seconds. `on_demand_s` apart, at least, are the readings that unknown key ids cause, however many come."""

    refresh_s: float = 300.0
    file_refresh_s: float = 1.0
    on_demand_s: float = 10.0
    read_within_s: float = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SigningKey:
    """A public key and the algorithms it may be used with."""

    kid: str | None
    key: Any
    algorithms: tuple[str, ...]


class KeySet:
    """The last good keys; they outlive the outage of their source. `run` keeps them fresh."""

    def __init__(self, issuer: str, source: str, settings: KeySetSettings) -> None:
        self.version = 0
        """0 until keys have been read; grows with each change of them."""
        self._issuer = issuer
        self._source = source
        self._settings = settings
        self._keys: tuple[SigningKey, ...] = ()
        self._content = b""
        self._demanded_at = -float("inf")
        self._reading: asyncio.Task[bool] | None = None
        self._reachable = True

    def find(self, kid: str | None, algorithm: str) -> SigningKey | None:
        """The key of this id; without an id, the only key that fits the algorithm."""
        fitting = [key for key in self._keys if algorithm in key.algorithms and kid in (None, key.kid)]
        return fitting[0] if len(fitting) == 1 else None

    async def find_or_read(self, kid: str | None, algorithm: str) -> SigningKey | None:
        """`find`, after one more reading when the key is not there: issuers sign with new keys at any time."""
        found = self.find(kid, algorithm)
        if found is None:
            await self._read_on_demand()
            found = self.find(kid, algorithm)
        return found

    async def run(self) -> None:
        """Read now and ever after, until cancelled."""
        is_file = self._source.startswith("/")
        period_s = self._settings.file_refresh_s if is_file else self._settings.refresh_s
        backoff = Backoff(first_s=1.0, longest_s=30.0)
        try:
            while True:
                if await self._read():
                    backoff.reset()
                    await asyncio.sleep(period_s * random.uniform(0.9, 1.0))
                else:
                    await asyncio.sleep(min(backoff.next_s(), period_s))
        finally:
            if self._reading is not None:
                self._reading.cancel()

    async def _read_on_demand(self) -> None:
        now = time.monotonic()
        if self._reading is None:
            if now - self._demanded_at < self._settings.on_demand_s:
                return
            self._demanded_at = now
        await self._read()

    async def _read(self) -> bool:
        """Read once; whoever asks meanwhile waits for the same reading. A cancelled asker does not end it."""
        reading = self._reading
        if reading is None:
            reading = self._reading = asyncio.create_task(self._read_now(), name=f"jwks-{self._issuer}")
            reading.add_done_callback(self._read_over)
        await asyncio.wait({reading})
        return not reading.cancelled() and reading.result()

    def _read_over(self, reading: asyncio.Task[bool]) -> None:
        self._reading = None

    async def _read_now(self) -> bool:
        try:
            async with asyncio.timeout(self._settings.read_within_s):
                content = await _content(self._source)
            if content != self._content:
                self._take(parse_key_set(content))
                self._content = content
        except (_Unreadable, OSError, TimeoutError) as error:
            metrics.JWKS_FETCHES.labels(self._issuer, "failed").inc()
            if self._reachable:  # once per outage
                why = str(error) or f"no answer within {self._settings.read_within_s} s"
                log.warning("jwks_read_failed", issuer=self._issuer, source=self._source, why=why)
            self._reachable = False
            return False
        metrics.JWKS_FETCHES.labels(self._issuer, "read").inc()
        self._reachable = True
        return True

    def _take(self, keys: tuple[SigningKey, ...]) -> None:
        self._keys = keys
        self.version += 1
        log.info("jwks_taken_over", issuer=self._issuer, kids=[key.kid for key in keys])


class _Unreadable(Exception):
    """The source's content is no key set."""


def parse_key_set(content: bytes) -> tuple[SigningKey, ...]:
    """The usable keys: public, asymmetric, for signatures, long enough. Others are passed over; none at all raises."""
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise _Unreadable(f"it is no JSON: {error}") from None
    entries = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(entries, list):
        raise _Unreadable("it is no JWK set: there is no list `keys`")
    keys = tuple(key for entry in entries[:MOST_KEYS] if (key := _signing_key(entry)) is not None)
    if not keys:
        raise _Unreadable("it holds no public key for signatures that can be used")
    return keys


def _signing_key(entry: Any) -> SigningKey | None:
    if not isinstance(entry, dict) or entry.get("use", "sig") != "sig" or "d" in entry:
        return None
    kid, kind, only = entry.get("kid"), entry.get("kty"), entry.get("alg")
    algorithms = ALGORITHMS.get(kind, ()) if isinstance(kind, str) else ()
    if only is not None:
        algorithms = tuple(one for one in algorithms if one == only)
    if not algorithms or not (kid is None or isinstance(kid, str)):
        return None
    try:
        key = jwt.PyJWK(entry, algorithm=algorithms[0] if kind != "EC" else None).key
    except (jwt.PyJWTError, ValueError, TypeError) as error:
        log.warning("jwk_passed_over", kid=kid, why=str(error).splitlines()[0])
        return None
    if kind == "RSA" and key.key_size < LEAST_RSA_BITS:
        log.warning("jwk_passed_over", kid=kid, why=f"{key.key_size} bits are too few")
        return None
    return SigningKey(kid=kid, key=key, algorithms=algorithms)


async def _content(source: str) -> bytes:
    if source.startswith("/"):
        return await asyncio.to_thread(_file_content, Path(source))
    return await _fetched(source)


def _file_content(path: Path) -> bytes:
    with path.open("rb") as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise _Unreadable(f"it is larger than {MOST_BYTES} bytes")
    return content


async def _fetched(url: str) -> bytes:
    """The body of a 200; redirects are not followed, or the set could come from somebody the operator never named."""
    import httpx2  # 0.15 s of every gateway's start, for those only who fetch

    secure = url.startswith("https://")
    content = b""
    try:
        # SSL_CERT_FILE adds an authority of one's own. A proxy is for the way out, not for this machine.
        trust = await asyncio.to_thread(ssl.create_default_context)
        async with (
            httpx2.AsyncClient(verify=trust, trust_env=secure, follow_redirects=False, timeout=None) as client,
            client.stream("GET", url, headers={"accept": "application/json"}) as answer,
        ):
            if answer.status_code != 200:
                raise _Unreadable(f"HTTP status {answer.status_code}")
            async for chunk in answer.aiter_bytes():
                content += chunk
                if len(content) > MOST_BYTES:
                    raise _Unreadable(f"it is larger than {MOST_BYTES} bytes")
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise _Unreadable(f"{type(error).__name__}: {error}") from None
    return content
