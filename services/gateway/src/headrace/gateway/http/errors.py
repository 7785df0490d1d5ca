"""What a client of the HTTP edge hears of an error: a status, and one envelope."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

from headrace.base.errors import Code, HeadraceError, InvalidRequest
from headrace.gateway.http.sampling_fields import param_of

_STATUSES = {
    Code.INVALID_ARGUMENT: (400, "invalid_request_error"),
    Code.UNAUTHENTICATED: (401, "authentication_error"),
    Code.PERMISSION_DENIED: (403, "permission_error"),
    Code.NOT_FOUND: (404, "not_found_error"),
    Code.FAILED_PRECONDITION: (409, "conflict_error"),
    Code.RESOURCE_EXHAUSTED: (429, "rate_limit_error"),
    Code.INTERNAL: (500, "server_error"),
    Code.ABORTED: (502, "server_error"),
    Code.UNAVAILABLE: (503, "unavailable_error"),
    Code.DEADLINE_EXCEEDED: (504, "timeout_error"),
}
# Where OpenAI has a word of its own, clients look for it.
_CODES = {
    "BAD_CREDENTIAL": "invalid_api_key",
    "NO_CREDENTIAL": "invalid_api_key",
    "NOT_FOUND": "model_not_found",
    "CONTEXT_EXCEEDED": "context_length_exceeded",
    "RATE_LIMITED": "rate_limit_exceeded",
    "QUOTA_EXCEEDED": "insufficient_quota",
    "INVALID_FIELD": "invalid_value",
    "UNKNOWN_FIELD": "unknown_parameter",
}
_RETRY_AFTER_S = 1.0


class HttpError(HeadraceError):
    """A refusal that only HTTP knows, with its own status: no such path, a wrong method, too large a body."""

    code = Code.INVALID_ARGUMENT

    def __init__(self, status: int, message: str, *, reason: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message, reason=reason)
        self.status = status
        self.headers = dict(headers or {})


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An error ready to be sent."""

    status: int
    body: bytes
    headers: tuple[tuple[str, str], ...]


def failure_of(error: HeadraceError, names: Mapping[str, str]) -> Failure:
    """The status, envelope and headers of an error; `names` as in `Parsed`."""
    status, kind = _STATUSES[error.code]
    headers: dict[str, str] = {}
    if isinstance(error, HttpError):
        status = error.status
        headers |= error.headers
    param, message = None, error.message
    if isinstance(error, InvalidRequest):
        param = param_of(error.field or "", names)
        message = f"{param}: {error.why}"
    headers |= _retry_headers(status, error.retry_after_s)
    code = _CODES.get(error.reason, error.reason.lower())
    # Escaped to ASCII: a refusal may quote whatever the client has sent, lone surrogates included.
    body = json.dumps({"error": {"message": message, "type": kind, "param": param, "code": code}})
    return Failure(status=status, body=body.encode(), headers=tuple(headers.items()))


def _retry_headers(status: int, wait_s: float | None) -> dict[str, str]:
    """When to try again, or that it is no use; OpenAI's clients heed each of these."""
    if status == 503 and wait_s is None:
        wait_s = _RETRY_AFTER_S
    if status in (429, 503) and wait_s is not None:
        return {"retry-after": str(max(1, math.ceil(wait_s))), "retry-after-ms": str(max(0, math.ceil(1000 * wait_s)))}
    # A limit that waiting does not lift, or a time that is up: the same again would only cost the client twice.
    return {"x-should-retry": "false"} if status in (429, 504) else {}
