"""The edge for usage and audit: messages become facts, or are refused by the field at fault."""

from __future__ import annotations

from collections.abc import Iterable

from headrace.api.telemetry.v1 import telemetry_service_pb2 as pb
from headrace.base.errors import InvalidRequest
from headrace.rpc.ids import is_request_id
from headrace.telemetry.core.facts import AuditFact, Sum, Usage, UsageAttempt

MOST_AT_ONCE = 1000
_MOST_CHARS = 256
_LAST_NS = 2**63 - 1
_DECISIONS = ("ALLOWED", "CHANGED", "REFUSED")


def read_usage(request: pb.RecordUsageRequest) -> list[Usage]:
    """The records; InvalidRequest names the first that cannot be kept."""
    _check_number("records", len(request.records))
    return [_read_usage(f"records[{place}]", record) for place, record in enumerate(request.records)]


def read_audit(request: pb.RecordAuditRequest) -> list[AuditFact]:
    """The events; InvalidRequest names the first that cannot be kept."""
    _check_number("events", len(request.events))
    return [_read_audit(f"events[{place}]", event) for place, event in enumerate(request.events)]


def usage_message(record: Usage) -> pb.UsageRecord:
    """A record as a message."""
    return pb.UsageRecord(
        request_id=record.request_id,
        tenant=record.tenant,
        credential=record.credential,
        model=record.model,
        bundle_digest=record.bundle_digest,
        prompt_tokens=record.prompt_tokens,
        cached_tokens=record.cached_tokens,
        output_tokens=record.output_tokens,
        outcome=record.outcome,
        admitted_unix_ns=record.admitted_ns,
        ended_unix_ns=record.ended_ns,
        attempts=[
            pb.UsageAttempt(
                attempt=attempt.attempt,
                engine_id=attempt.engine_id,
                epoch=attempt.epoch,
                output_tokens=attempt.output_tokens,
                outcome=attempt.outcome,
            )
            for attempt in record.attempts
        ],
        gateway_id=record.gateway_id,
        recovered=record.recovered,
    )


def sum_message(line: Sum) -> pb.UsageSum:
    """A line of the sums as a message."""
    return pb.UsageSum(
        tenant=line.tenant,
        model=line.model,
        bundle_digest=line.bundle_digest,
        requests=line.requests,
        prompt_tokens=line.prompt_tokens,
        cached_tokens=line.cached_tokens,
        output_tokens=line.output_tokens,
    )


def audit_message(event: AuditFact) -> pb.AuditEvent:
    """An event as a message."""
    return pb.AuditEvent(
        event_id=event.event_id,
        at_unix_ns=event.at_ns,
        service=event.service,
        tenant=event.tenant,
        credential=event.credential,
        request_id=event.request_id,
        subject=event.subject,
        decision=event.decision,
        reason=event.reason,
        facts=event.facts,
    )


def _read_usage(field: str, record: pb.UsageRecord) -> Usage:
    _check_id(f"{field}.request_id", record.request_id)
    _check_text(f"{field}.tenant", record.tenant, needed=True)
    for name in ("credential", "model", "bundle_digest", "outcome", "gateway_id"):
        _check_text(f"{field}.{name}", getattr(record, name))
    _check_time(f"{field}.admitted_unix_ns", record.admitted_unix_ns)
    _check_time(f"{field}.ended_unix_ns", record.ended_unix_ns)
    if len(record.attempts) > MOST_AT_ONCE:
        raise InvalidRequest(f"{field}.attempts", f"{len(record.attempts)} are more than {MOST_AT_ONCE}")
    return Usage(
        request_id=record.request_id,
        gateway_id=record.gateway_id,
        admitted_ns=record.admitted_unix_ns,
        ended_ns=record.ended_unix_ns,
        tenant=record.tenant,
        credential=record.credential,
        model=record.model,
        bundle_digest=record.bundle_digest,
        prompt_tokens=record.prompt_tokens,
        cached_tokens=record.cached_tokens,
        output_tokens=record.output_tokens,
        outcome=record.outcome,
        recovered=record.recovered,
        attempts=tuple(_attempts(field, record.attempts)),
    )


def _attempts(field: str, attempts: Iterable[pb.UsageAttempt]) -> Iterable[UsageAttempt]:
    for place, attempt in enumerate(attempts):
        _check_text(f"{field}.attempts[{place}].engine_id", attempt.engine_id)
        _check_text(f"{field}.attempts[{place}].outcome", attempt.outcome)
        yield UsageAttempt(
            attempt=attempt.attempt,
            engine_id=attempt.engine_id,
            epoch=attempt.epoch,
            output_tokens=attempt.output_tokens,
            outcome=attempt.outcome,
        )


def _read_audit(field: str, event: pb.AuditEvent) -> AuditFact:
    _check_id(f"{field}.event_id", event.event_id)
    _check_time(f"{field}.at_unix_ns", event.at_unix_ns)
    for name in ("service", "tenant", "credential", "request_id", "reason"):
        _check_text(f"{field}.{name}", getattr(event, name))
    _check_text(f"{field}.subject", event.subject, needed=True)
    if event.decision not in _DECISIONS:
        raise InvalidRequest(f"{field}.decision", f"must be one of {', '.join(_DECISIONS)}")
    if event.ByteSize() > 65_536:
        raise InvalidRequest(f"{field}.facts", "are longer than 65536 bytes")
    return AuditFact(
        event_id=event.event_id,
        at_ns=event.at_unix_ns,
        service=event.service,
        tenant=event.tenant,
        credential=event.credential,
        request_id=event.request_id,
        subject=event.subject,
        decision=event.decision,
        reason=event.reason,
        facts=dict(event.facts),
    )


def _check_number(field: str, number: int) -> None:
    if number > MOST_AT_ONCE:
        raise InvalidRequest(field, f"{number} are more than {MOST_AT_ONCE}")


def _check_id(field: str, text: str) -> None:
    if not is_request_id(text):
        raise InvalidRequest(field, "must be 1 to 64 letters, digits or any of _ . : -")


def _check_text(field: str, text: str, *, needed: bool = False) -> None:
    if len(text) > _MOST_CHARS or (needed and not text):
        raise InvalidRequest(field, f"must be {1 if needed else 0} to {_MOST_CHARS} characters")


def _check_time(field: str, unix_ns: int) -> None:
    if not 0 < unix_ns <= _LAST_NS:
        raise InvalidRequest(field, "must be unix nanoseconds above 0")
