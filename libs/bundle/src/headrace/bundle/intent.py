"""Intent as etcd holds it: protobuf JSON, checked on the way in and on the way out."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any, TypeVar

from google.protobuf import json_format

from headrace.api.common.v1.sampling_pb2 import SamplingParams
from headrace.api.control.v1.intent_pb2 import ApiKey, Bundle, Deployment, Issuer, Routing, Tenant
from headrace.base.errors import InvalidRequest
from headrace.base.saturation import Saturation

Intent = TypeVar("Intent", Bundle, Deployment, ApiKey, Tenant, Issuer)

PRECISIONS = ("float32", "bfloat16", "int8", "int4")
BACKENDS = ("model", "simulated")
POLICIES = ("least_completion_time", "least_loaded", "round_robin")
ROLES = ("user", "operator")
PRIORITIES = ("batch", "standard", "interactive")
MOST_DENIED_PATTERNS = 100
LONGEST_DENIED_PATTERN = 1000
LONGEST_CLAIM_NAME = 100
MOST_REPLICAS = 1000  # a typing error should not order four billion

_DIGEST = re.compile(r"[0-9a-f]{32}")
_NAME = re.compile(r"[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?")
_TENANT = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_NAME_WHY = "must be 1 to 63 of a-z, 0-9, '.', '_', '-', with a letter or digit at both ends"
_TENANT_WHY = "must be 1 to 63 letters, digits, '.', '_', '-', with a letter or digit at both ends"
# Over plain http anybody on the way could put his own keys in the set, and so forge every token.
_JWKS = re.compile(r"https://[^/\s]+\S*|http://(127\.0\.0\.1|\[::1\]|localhost)(:\d+)?(/\S*)?|/.+")
_SETTING = re.compile(r"[a-z][a-z0-9_]*")
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)")
_FIELD_IN_ERROR = re.compile(r"Failed to parse (\S+) field|has no field named \"(\w+)\"")


def encode(intent: Bundle | Deployment | ApiKey | Tenant | Issuer) -> bytes:
    """The value for etcd; InvalidRequest names the field that no reader would accept."""
    _validate(intent)
    return json_format.MessageToJson(intent, preserving_proto_field_name=True, sort_keys=True, indent=None).encode()


def decode(kind: type[Intent], value: bytes) -> Intent:
    """What `encode` made; InvalidRequest names the field at fault.

    Fields of a newer writer are ignored, except in a Bundle: each of its fields decides the answer.
    """
    intent = kind()
    try:
        json_format.Parse(value, intent, ignore_unknown_fields=kind is not Bundle)
    except (json_format.ParseError, UnicodeDecodeError) as error:
        found = _FIELD_IN_ERROR.search(str(error))
        field = (found[1] or found[2]) if found else kind.DESCRIPTOR.name.lower()
        raise InvalidRequest(field, f"cannot be read: {_first_line(error)}") from error
    _validate(intent)
    return intent


def validate_bundle(bundle: Bundle) -> None:
    """InvalidRequest unless every field can be acted upon."""
    for field in ("weights_digest", "tokenizer_digest"):
        _require(bool(_DIGEST.fullmatch(getattr(bundle, field))), field, "must be 32 hex digits")
    _require(bool(bundle.display_name), "display_name", "must not be empty")
    _require(bundle.precision in PRECISIONS, "precision", f"must be one of {', '.join(PRECISIONS)}")
    _require(bundle.max_model_len > 0, "max_model_len", "must be at least 1")
    default_sampling(bundle)


def validate_deployment(deployment: Deployment) -> None:
    """InvalidRequest unless every field can be acted upon; engine settings' values are the engine's to check."""
    _require(bool(_NAME.fullmatch(deployment.name)), "name", _NAME_WHY)
    _require(bool(_DIGEST.fullmatch(deployment.bundle_digest)), "bundle_digest", "must be 32 hex digits")
    _require(deployment.replicas <= MOST_REPLICAS, "replicas", f"must be at most {MOST_REPLICAS}")
    _require(deployment.backend in BACKENDS, "backend", f"must be one of {', '.join(BACKENDS)}")
    for name in deployment.engine_settings:
        why = "must be a flag's name without dashes, such as max_num_seqs"
        _require(bool(_SETTING.fullmatch(name)), f"engine_settings[{name!r}]", why)
    _check_names("tenants", deployment.tenants, _TENANT, _TENANT_WHY)
    _check_routing(deployment.routing)


def validate_api_key(api_key: ApiKey) -> None:
    """InvalidRequest unless every field can be acted upon."""
    _require(bool(_TENANT.fullmatch(api_key.tenant)), "tenant", _TENANT_WHY)
    _require(_is_time(api_key.created_at), "created_at", "must be an RFC 3339 time")
    _check_names("deployments", api_key.deployments, _NAME, "must be a deployment's name")
    for n, role in enumerate(api_key.roles):
        _require(role in ROLES, f"roles[{n}]", f"must be one of {', '.join(ROLES)}")
    _check_priority(api_key.priority)
    _check_names("adapters", api_key.adapters, _DIGEST, "must be an adapter's digest, 32 hex digits")
    expires_at = api_key.expires_at
    _require(not expires_at or _is_time(expires_at), "expires_at", "must be an RFC 3339 time, or empty for never")


def validate_tenant(tenant: Tenant) -> None:
    """InvalidRequest unless every field can be acted upon."""
    _require(bool(_TENANT.fullmatch(tenant.name)), "name", _TENANT_WHY)
    if tenant.HasField("weight"):
        _require(0 < tenant.weight <= 1e6, "weight", "must be above 0 and at most 1000000")
    if tenant.HasField("max_output_tokens"):
        _require(tenant.max_output_tokens > 0, "max_output_tokens", "must be at least 1")
    most = f"must be at most {MOST_DENIED_PATTERNS}"
    _require(len(tenant.denied_patterns) <= MOST_DENIED_PATTERNS, "denied_patterns", most)
    for n, pattern in enumerate(tenant.denied_patterns):
        field = f"denied_patterns[{n}]"
        why = f"must be 1 to {LONGEST_DENIED_PATTERN} characters"
        _require(0 < len(pattern) <= LONGEST_DENIED_PATTERN, field, why)
        try:
            re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise InvalidRequest(field, f"is no regular expression: {error}") from None


def validate_issuer(issuer: Issuer) -> None:
    """InvalidRequest unless every field can be acted upon."""
    _require(bool(_NAME.fullmatch(issuer.name)), "name", _NAME_WHY)
    _require(bool(issuer.issuer), "issuer", "must be the `iss` claim of its tokens")
    _require(bool(issuer.audiences), "audiences", "must name at least one: a token for somebody else is none for us")
    for n, audience in enumerate(issuer.audiences):
        _require(bool(audience), f"audiences[{n}]", "must not be empty")
    why = "must be an https:// URL, an http:// URL of this machine (127.0.0.1, [::1], localhost), or a file's full path"
    _require(bool(_JWKS.fullmatch(issuer.jwks)), "jwks", why)
    for field in ("tenant_claim", "roles_claim"):
        _require(len(getattr(issuer, field)) <= LONGEST_CLAIM_NAME, field, f"must be at most {LONGEST_CLAIM_NAME} long")
    _check_priority(issuer.priority)
    _check_names("deployments", issuer.deployments, _NAME, "must be a deployment's name")
    _check_names("tenants", issuer.tenants, _TENANT, _TENANT_WHY)


def saturation_of(routing: Routing) -> Saturation:
    """The bounds in force: those given, 0 included, the usual ones where none is; ValueError for one without sense."""
    bounds, usual = routing.saturation, Saturation()
    return Saturation(
        waiting=bounds.waiting if bounds.HasField("waiting") else usual.waiting,
        pressure=bounds.pressure if bounds.HasField("pressure") else usual.pressure,
        reserve=bounds.reserve if bounds.HasField("reserve") else usual.reserve,
    )


def default_sampling(bundle: Bundle) -> SamplingParams:
    """The bundle's sampling defaults, absent where it has none; InvalidRequest names the entry at fault."""
    defaults = SamplingParams()
    for name, value in sorted(bundle.sampling_defaults.items()):
        field = f"sampling_defaults[{name!r}]"
        try:
            json_format.ParseDict({name: json.loads(value)}, defaults)
        except (json_format.ParseError, ValueError) as error:
            raise InvalidRequest(
                field, f"is no field of SamplingParams with a JSON value: {_first_line(error)}"
            ) from error
    return defaults


def new_api_key() -> str:
    """A fresh key, 256 random bits; show it once and store only its hash."""
    return "hr_" + secrets.token_urlsafe(32)


def hash_api_key(key: str) -> str:
    """BLAKE2b-256 hex. A slow, salted hash is for passwords that people choose; these are random."""
    return hashlib.blake2b(key.encode(errors="surrogatepass"), digest_size=32).hexdigest()


_VALIDATORS: dict[type, Callable[[Any], None]] = {
    Bundle: validate_bundle,
    Deployment: validate_deployment,
    ApiKey: validate_api_key,
    Tenant: validate_tenant,
    Issuer: validate_issuer,
}


def _validate(intent: Bundle | Deployment | ApiKey | Tenant | Issuer) -> None:
    _VALIDATORS[type(intent)](intent)


def _check_routing(routing: Routing) -> None:
    _require(routing.policy in ("", *POLICIES), "routing.policy", f"must be one of {', '.join(POLICIES)}")
    if routing.HasField("freshness_s"):
        _require(0.1 <= routing.freshness_s <= 60, "routing.freshness_s", "must be from 0.1 to 60 seconds")
    _require(0 <= routing.slow_start_s <= 3600, "routing.slow_start_s", "must be from 0 to 3600 seconds")
    try:
        saturation_of(routing)
    except ValueError as error:
        field, _, why = str(error).partition(" ")
        raise InvalidRequest(f"routing.{field}", why) from None


def _check_priority(priority: str) -> None:
    _require(priority in ("", *PRIORITIES), "priority", f"must be one of {', '.join(PRIORITIES)}")


def _check_names(field: str, names: Iterable[str], shape: re.Pattern[str], why: str) -> None:
    for n, name in enumerate(names):
        _require(bool(shape.fullmatch(name)), f"{field}[{n}]", why)


def _is_time(text: str) -> bool:
    if not _TIME.fullmatch(text):
        return False
    try:
        datetime.fromisoformat(text)
    except ValueError:  # a thirteenth month
        return False
    return True


def _first_line(error: Exception) -> str:
    """protobuf's errors list all fields on further lines."""
    return str(error).splitlines()[0]


def _require(holds: bool, field: str, why: str) -> None:
    if not holds:
        raise InvalidRequest(field, why)
