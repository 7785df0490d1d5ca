"""Intent as etcd holds it: protobuf JSON, checked on the way in and on the way out."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Callable
from typing import Any, TypeVar

from google.protobuf import json_format

from headrace.api.common.v1.sampling_pb2 import SamplingParams
from headrace.api.control.v1.intent_pb2 import ApiKey, Bundle, Deployment
from headrace.base.errors import InvalidRequest

Intent = TypeVar("Intent", Bundle, Deployment, ApiKey)

PRECISIONS = ("float32", "bfloat16", "int8", "int4")
BACKENDS = ("model", "simulated")
MOST_REPLICAS = 1000  # a typing error should not order four billion

_DIGEST = re.compile(r"[0-9a-f]{32}")
_NAME = re.compile(r"[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?")
_TENANT = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_SETTING = re.compile(r"[a-z][a-z0-9_]*")
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)")
_FIELD_IN_ERROR = re.compile(r"Failed to parse (\S+) field|has no field named \"(\w+)\"")


def encode(intent: Bundle | Deployment | ApiKey) -> bytes:
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
    why = "must be 1 to 63 of a-z, 0-9, '.', '_', '-', with a letter or digit at both ends"
    _require(bool(_NAME.fullmatch(deployment.name)), "name", why)
    _require(bool(_DIGEST.fullmatch(deployment.bundle_digest)), "bundle_digest", "must be 32 hex digits")
    _require(deployment.replicas <= MOST_REPLICAS, "replicas", f"must be at most {MOST_REPLICAS}")
    _require(deployment.backend in BACKENDS, "backend", f"must be one of {', '.join(BACKENDS)}")
    for name in deployment.engine_settings:
        why = "must be a flag's name without dashes, such as max_num_seqs"
        _require(bool(_SETTING.fullmatch(name)), f"engine_settings[{name!r}]", why)


def validate_api_key(api_key: ApiKey) -> None:
    """InvalidRequest unless every field can be acted upon."""
    why = "must be 1 to 63 letters, digits, '.', '_', '-', with a letter or digit at both ends"
    _require(bool(_TENANT.fullmatch(api_key.tenant)), "tenant", why)
    _require(bool(_TIME.fullmatch(api_key.created_at)), "created_at", "must be an RFC 3339 time")
    for n, name in enumerate(api_key.deployments):
        _require(bool(_NAME.fullmatch(name)), f"deployments[{n}]", "must be a deployment's name")


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
}


def _validate(intent: Bundle | Deployment | ApiKey) -> None:
    _VALIDATORS[type(intent)](intent)


def _first_line(error: Exception) -> str:
    """protobuf's errors list all fields on further lines."""
    return str(error).splitlines()[0]


def _require(holds: bool, field: str, why: str) -> None:
    if not holds:
        raise InvalidRequest(field, why)
