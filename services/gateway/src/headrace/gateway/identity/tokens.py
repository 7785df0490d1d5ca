"""Signed tokens (JWT, RFC 7519; the practices of RFC 8725) to principals."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import jwt

from headrace.base.errors import Unavailable
from headrace.gateway.core.claims import principal_of
from headrace.gateway.core.principal import Principal
from headrace.gateway.core.refusal import Refusal
from headrace.gateway.identity.issuers import Issuers, TrustedIssuer
from headrace.gateway.identity.key_set import ALGORITHMS, SigningKey
from headrace.gateway.identity.refused import CredentialRefused

LEEWAY_S = 30.0
"""How far clocks may differ."""

LONGEST_TOKEN = 8192
MOST_VERIFIED = 10_000
"""Verified tokens that are remembered, 1 kB each: to verify one costs 290 µs of the loop, to know it 8 (measured)."""

_ASYMMETRIC = frozenset(name for names in ALGORITHMS.values() for name in names)
_UNVERIFIED: Any = {"verify_signature": False}
_STRICT: Any = {"require": ["exp", "iss", "aud"], "enforce_minimum_key_length": True}
# What a hostile text can bring a parser to raise, besides its own errors.
_HOSTILE = (ValueError, TypeError, ArithmeticError, RecursionError)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Verified:
    principal: Principal
    expires_at_s: float
    issuer: TrustedIssuer
    keys_version: int


class Tokens:
    """Verifies, and remembers what it verified until it expires or its issuer or keys change."""

    def __init__(self, issuers: Issuers) -> None:
        self._issuers = issuers
        self._verified: OrderedDict[bytes, _Verified] = OrderedDict()

    async def authenticate(self, token: str, now_s: float) -> Principal:
        """Whom `token` speaks for at the unix time `now_s`; CredentialRefused when nobody.

        Unavailable while the keys of its issuer have never been read: then nothing can be said about it.
        """
        if len(token) > LONGEST_TOKEN:
            raise CredentialRefused(Refusal.TOKEN_TOO_LARGE)
        digest = hashlib.blake2b(token.encode(errors="surrogatepass"), digest_size=32).digest()
        known = self._verified.get(digest)
        if known is not None and self._still_good(known, now_s):
            self._verified.move_to_end(digest)
            return known.principal
        self._verified.pop(digest, None)
        verified = await self._verify(token)
        self._verified[digest] = verified
        if len(self._verified) > MOST_VERIFIED:
            self._verified.popitem(last=False)
        return verified.principal

    def _still_good(self, known: _Verified, now_s: float) -> bool:
        return (
            now_s < known.expires_at_s
            and self._issuers.holds(known.issuer)
            and known.keys_version == known.issuer.key_set.version
        )

    async def _verify(self, token: str) -> _Verified:
        issuer, kid, algorithm = self._addressed(token)
        key = await issuer.key_set.find_or_read(kid, algorithm)
        if issuer.key_set.version == 0:
            raise Unavailable("the issuer's keys could not be read yet", reason="ISSUER_UNAVAILABLE", retry_after_s=1.0)
        if key is None:
            raise CredentialRefused(Refusal.UNKNOWN_SIGNING_KEY, issuer.terms.name)
        keys_version = issuer.key_set.version
        claims = _checked(token, key, algorithm, issuer)
        principal = principal_of(claims, issuer.terms)
        if isinstance(principal, Refusal):
            raise CredentialRefused(principal, issuer.terms.name)
        return _Verified(
            principal=principal,
            expires_at_s=float(claims["exp"]) + LEEWAY_S,
            issuer=issuer,
            keys_version=keys_version,
        )

    def _addressed(self, token: str) -> tuple[TrustedIssuer, str | None, str]:
        """The issuer a token names, the key and the algorithm: as it says, unverified, so only to choose by."""
        try:
            header = jwt.get_unverified_header(token)
            claims = jwt.decode(token, options=_UNVERIFIED)
        except (jwt.PyJWTError, *_HOSTILE):
            raise CredentialRefused(Refusal.MALFORMED) from None
        algorithm, kid = header.get("alg"), header.get("kid")
        if not isinstance(algorithm, str) or algorithm not in _ASYMMETRIC:
            raise CredentialRefused(Refusal.TOKEN_ALGORITHM)
        named = self._issuers.named(str(claims.get("iss", "")))
        if not named:
            raise CredentialRefused(Refusal.UNKNOWN_ISSUER)
        meant = _names(claims.get("aud"))
        for issuer in named:
            if meant & set(issuer.terms.audiences):
                return issuer, kid, algorithm
        raise CredentialRefused(Refusal.WRONG_AUDIENCE, named[0].terms.name)


def _names(claim: Any) -> set[str]:
    """A claim that is one name or a list of them; whatever else it is names nobody."""
    if isinstance(claim, str):
        return {claim}
    return {one for one in claim if isinstance(one, str)} if isinstance(claim, list) else set()


def _checked(token: str, key: SigningKey, algorithm: str, issuer: TrustedIssuer) -> dict[str, Any]:
    """The claims of a token whose signature, times, issuer and audience hold."""
    try:
        return jwt.decode(
            token,
            key.key,
            algorithms=[algorithm],
            audience=list(issuer.terms.audiences),
            issuer=issuer.terms.issuer,
            leeway=LEEWAY_S,
            options=_STRICT,
        )
    except jwt.ExpiredSignatureError:
        refusal = Refusal.TOKEN_EXPIRED
    except jwt.ImmatureSignatureError:
        refusal = Refusal.TOKEN_NOT_YET_VALID
    except jwt.InvalidAudienceError:
        refusal = Refusal.WRONG_AUDIENCE
    except (jwt.InvalidSignatureError, jwt.InvalidKeyError, jwt.InvalidAlgorithmError):
        refusal = Refusal.BAD_SIGNATURE
    except (jwt.PyJWTError, *_HOSTILE):
        refusal = Refusal.BAD_CLAIMS
    raise CredentialRefused(refusal, issuer.terms.name)
