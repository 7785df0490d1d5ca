"""Domain errors to gRPC statuses and back: the only module that knows both sides.

Reasons and codes are stable; `ErrorInfo.domain` is constant; variable parts go into `ErrorInfo.metadata`.
"""

from __future__ import annotations

from typing import Any

from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2
from grpc import StatusCode
from grpc.aio import AioRpcError
from grpc_status import rpc_status

from headrace.base.errors import (
    Code,
    DeadlinePassed,
    Exhausted,
    Forbidden,
    HeadraceError,
    InternalError,
    InvalidRequest,
    NotFound,
    ReaderStalled,
    StaleEpoch,
    StreamBroken,
    Unauthenticated,
    Unavailable,
)

DOMAIN = "headrace"

_TYPES: dict[StatusCode, type[HeadraceError]] = {
    StatusCode.UNAUTHENTICATED: Unauthenticated,
    StatusCode.PERMISSION_DENIED: Forbidden,
    StatusCode.NOT_FOUND: NotFound,
    StatusCode.RESOURCE_EXHAUSTED: Exhausted,
    StatusCode.UNAVAILABLE: Unavailable,
    StatusCode.DEADLINE_EXCEEDED: DeadlinePassed,
    StatusCode.FAILED_PRECONDITION: StaleEpoch,
}

TRANSPORT = "TRANSPORT"
"""Reason of an error that gRPC itself made (peer away, frozen or reset), never a Headrace service."""


def grpc_code(code: Code) -> StatusCode:
    """The gRPC code of a domain code; the names are the same."""
    return StatusCode[code.value]


def to_status(error: HeadraceError, *, request_id: str = "") -> status_pb2.Status:
    """The rich status of a domain error: ErrorInfo always, BadRequest, RetryInfo and QuotaFailure where they apply."""
    metadata = dict(error.metadata)
    if request_id:
        metadata["request_id"] = request_id
    status = status_pb2.Status(code=grpc_code(error.code).value[0], message=error.message)
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=metadata))
    if error.field is not None:
        why = error.why if isinstance(error, InvalidRequest) else error.message
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=why)
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    if quota := error.metadata.get("quota"):
        exceeded = error_details_pb2.QuotaFailure.Violation(subject=quota, description=error.message)
        status.details.add().Pack(error_details_pb2.QuotaFailure(violations=[exceeded]))
    if error.retry_after_s is not None:
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=_duration(error.retry_after_s)))
    return status


def from_rpc_error(error: AioRpcError) -> HeadraceError:
    """The domain error behind a failed call; one without our ErrorInfo came from the transport."""
    status = _rich_status(error)
    info = error_details_pb2.ErrorInfo()
    bad = error_details_pb2.BadRequest()
    retry = error_details_pb2.RetryInfo()
    for detail in status.details if status is not None else ():
        for message in (info, bad, retry):
            if detail.Is(message.DESCRIPTOR):
                detail.Unpack(message)
    message = error.details() or error.code().name
    reason = info.reason or _transport_reason(error.code())
    metadata = dict(info.metadata)
    retry_after_s = retry.retry_delay.ToTimedelta().total_seconds() if retry.HasField("retry_delay") else None
    if error.code() is StatusCode.INVALID_ARGUMENT:
        violation = bad.field_violations[0] if bad.field_violations else None
        invalid = InvalidRequest(
            violation.field if violation else "request", violation.description if violation else message, reason=reason
        )
        invalid.metadata.update(metadata)
        return invalid
    if error.code() is StatusCode.ABORTED and reason == ReaderStalled.default_reason:
        return ReaderStalled(message, metadata=metadata)
    if error.code() is StatusCode.ABORTED:
        broken = StreamBroken(message, tokens_emitted=int(metadata.get("tokens_emitted", "0")))
        broken.metadata.update(metadata)
        return broken
    kind = _TYPES.get(error.code(), InternalError)
    return kind(message, reason=reason, retry_after_s=retry_after_s, metadata=metadata)


def _transport_reason(code: StatusCode) -> str:
    return "DEADLINE_EXCEEDED" if code is StatusCode.DEADLINE_EXCEEDED else TRANSPORT


def _rich_status(error: Any) -> status_pb2.Status | None:
    try:
        return rpc_status.from_call(error)
    except ValueError:  # trailers whose code differs from the call's: not ours
        return None


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(int(seconds * 1e9))
    return duration
