"""Why a credential is not accepted: for logs, metrics and audit, never for the one who sent it."""

from __future__ import annotations

from enum import Enum


class Refusal(Enum):
    """The values are labels of a metric."""

    NO_CREDENTIAL = "no_credential"
    MALFORMED = "malformed"
    UNKNOWN_KEY = "unknown_key"
    KEY_EXPIRED = "key_expired"
    KEY_UNREADABLE = "key_unreadable"
    TOKEN_TOO_LARGE = "token_too_large"
    TOKEN_ALGORITHM = "token_algorithm"
    UNKNOWN_ISSUER = "unknown_issuer"
    WRONG_AUDIENCE = "wrong_audience"
    UNKNOWN_SIGNING_KEY = "unknown_signing_key"
    BAD_SIGNATURE = "bad_signature"
    TOKEN_EXPIRED = "token_expired"
    TOKEN_NOT_YET_VALID = "token_not_yet_valid"
    BAD_CLAIMS = "bad_claims"
    NO_TENANT = "no_tenant"
    FOREIGN_TENANT = "foreign_tenant"
