"""Slots and audit events as the messages that telemetry takes."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from headrace.api.telemetry.v1 import telemetry_service_pb2 as pb
from headrace.gateway.core.account import MOST_AUDIT_BODY, AttemptNote, Entry, Kind
from headrace.gateway.core.audit import Audit
from headrace.rpc.ids import new_request_id

GATEWAY_LOST = "GATEWAY_LOST"
"""How a request ended whose gateway did, and each attempt that was under way then."""

_MOST_UINT32 = 2**32 - 1
_MOST_TEXT = 80
_MOST_FACT = 200
# Field 1, length-delimited: `records` of RecordUsageRequest as well as `events` of RecordAuditRequest.
_REPEATED_FIELD_1 = b"\x0a"

Request = pb.RecordUsageRequest | pb.RecordAuditRequest


def opening(
    *,
    request_id: str,
    tenant: str,
    credential: str,
    model: str,
    bundle_digest: str,
    admitted_unix_ns: int,
    gateway_id: str,
) -> bytes:
    """What is known of a request at its admission; longer names than any valid one are cut, so that it fits a slot."""
    return pb.UsageRecord(
        request_id=_fitting(request_id),
        tenant=_fitting(tenant),
        credential=_fitting(credential),
        model=_fitting(model),
        bundle_digest=_fitting(bundle_digest),
        admitted_unix_ns=admitted_unix_ns,
        gateway_id=_fitting(gateway_id),
    ).SerializeToString()


def audit_body(audit: Audit) -> bytes:
    """The message for a decision; long facts are cut, and left out when they do not fit a slot even so."""
    event = pb.AuditEvent(
        event_id=new_request_id(),
        at_unix_ns=time.time_ns(),
        service="gateway",
        tenant=_fitting(audit.tenant),
        credential=_fitting(audit.credential),
        request_id=_fitting(audit.request_id),
        subject=_fitting(audit.subject),
        decision=_fitting(audit.decision.value),
        reason=_fitting(audit.reason),
        facts={key[:_MOST_TEXT]: value[:_MOST_FACT] for key, value in audit.facts.items()},
    )
    if event.ByteSize() > MOST_AUDIT_BODY:
        event.facts.clear()
        event.facts["left_out"] = "longer than a slot"
    return event.SerializeToString()


def body_of(entry: Entry, extra: Iterable[AttemptNote] = (), *, found_ns: int = 0) -> bytes:
    """The message for a slot. One whose gateway ended first ends at `found_ns`: when that was noticed."""
    if entry.kind is Kind.AUDIT:
        return entry.body
    record = pb.UsageRecord.FromString(entry.body)
    record.prompt_tokens = min(entry.prompt, _MOST_UINT32)
    record.cached_tokens = min(entry.cached, entry.prompt, _MOST_UINT32)
    record.output_tokens = min(entry.output, _MOST_UINT32)
    record.outcome = entry.outcome if entry.closed else GATEWAY_LOST
    record.ended_unix_ns = entry.ended_ns if entry.closed else found_ns
    record.recovered = not entry.closed
    record.attempts.extend(_attempt(note, record.outcome) for note in (*entry.attempts, *extra))
    return record.SerializeToString()


def request_of(kind: Kind, bodies: Sequence[bytes]) -> Request:
    """One request that carries the messages; they are joined as they are, which costs 0.3 µs each."""
    wire = b"".join(part for body in bodies for part in (_REPEATED_FIELD_1, _varint(len(body)), body))
    return pb.RecordUsageRequest.FromString(wire) if kind is Kind.USAGE else pb.RecordAuditRequest.FromString(wire)


def identity(kind: Kind, body: bytes) -> str:
    """What a log may say of a message."""
    if kind is Kind.USAGE:
        return pb.UsageRecord.FromString(body).request_id
    return pb.AuditEvent.FromString(body).event_id


def _attempt(note: AttemptNote, outcome: str) -> pb.UsageAttempt:
    return pb.UsageAttempt(
        attempt=note.number,
        engine_id=note.engine_id,
        epoch=note.epoch,
        output_tokens=min(note.tokens, _MOST_UINT32),
        outcome=note.outcome or outcome,
    )


def _fitting(text: str) -> str:
    """A name in one byte a character, as valid ones are but those for people: six of them must fit a slot."""
    return text[:_MOST_TEXT].encode("ascii", "replace").decode()


def _varint(number: int) -> bytes:
    data = bytearray()
    while number > 127:
        data.append(number & 127 | 128)
        number >>= 7
    data.append(number)
    return bytes(data)
