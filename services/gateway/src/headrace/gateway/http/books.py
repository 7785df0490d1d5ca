"""`GET /v1/usage` and `GET /v1/audit`: what tenants used and what was decided about them, from telemetry's disk."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qsl

from google.protobuf.message import Message

from headrace.api.telemetry.v1 import telemetry_service_pb2 as pb
from headrace.api.telemetry.v1.telemetry_service_pb2_grpc import TelemetryServiceStub
from headrace.base.deadline import Deadline
from headrace.base.errors import InvalidRequest, Unavailable
from headrace.gateway.core.principal import Principal
from headrace.gateway.http.spelling import Json
from headrace.rpc.client import Peer

_DEADLINE_S = 30.0
_DAY_S = 86_400
_MOST = 1000
_USUAL_EVENTS = 100


class Books:
    """The telemetry service at `address`; without one every question is refused."""

    def __init__(self, address: str) -> None:
        self._peer = Peer(address) if address else None

    async def usage(self, principal: Principal, query: str) -> Json:
        """Sums by tenant, model and bundle of what ended in a span of time, and the newest `records` of it.

        `query` as in a URL; Forbidden for another tenant's, InvalidRequest names the parameter.
        """
        given = _given(query, ("tenant", "since", "until", "request_id", "records"))
        now = time.time()
        since, until = _instant(given, "since", now - _DAY_S), _instant(given, "until", now)
        tenant, request_id = principal.books_of(given.get("tenant", "")), given.get("request_id", "")
        question = pb.QueryUsageRequest(
            tenant=tenant,
            since_unix_ns=int(since * 1e9),
            until_unix_ns=int(until * 1e9),
            request_id=request_id,
            records=_number(given, "records", usual=0),
        )
        peer, stub = self._telemetry()
        answer = await peer.unary(stub.QueryUsage, question, deadline=Deadline.after(_DEADLINE_S))
        return {
            "object": "usage",
            "since": _iso(since),
            "until": _iso(until),
            "data": [_plain(found) for found in answer.sums],
            "records": [_plain(found) for found in _own(answer.records, tenant)],
        }

    async def audit(self, principal: Principal, query: str) -> Json:
        """The newest decisions other than plain admissions. Errors as of `usage`."""
        given = _given(query, ("tenant", "request_id", "limit"))
        tenant = principal.books_of(given.get("tenant", ""))
        question = pb.ListAuditRequest(
            tenant=tenant,
            request_id=given.get("request_id", ""),
            limit=_number(given, "limit", usual=_USUAL_EVENTS, least=1),
        )
        peer, stub = self._telemetry()
        answer = await peer.unary(stub.ListAudit, question, deadline=Deadline.after(_DEADLINE_S))
        return {"object": "list", "data": [_plain(found) for found in _own(answer.events, tenant)]}

    async def close(self) -> None:
        """Close the connection."""
        if self._peer is not None:
            await self._peer.close()

    def _telemetry(self) -> tuple[Peer, Any]:
        if self._peer is None:
            raise Unavailable("this gateway has no telemetry service to ask (telemetry_address)", reason="NO_TELEMETRY")
        return self._peer, TelemetryServiceStub(self._peer.channel)


def _given(query: str, known: Sequence[str]) -> dict[str, str]:
    given = dict(parse_qsl(query, keep_blank_values=True))
    for name in given:
        if name not in known:
            raise InvalidRequest(name, f"is unknown; use {', '.join(known)}", reason="UNKNOWN_FIELD")
    return given


def _instant(given: Mapping[str, str], name: str, usual: float) -> float:
    """Unix seconds of a parameter: a number of them, or a date such as 2026-05-01 or 2026-05-01T12:00:00Z (UTC)."""
    text = given.get(name, "")
    if not text:
        return usual
    try:
        found = datetime.fromisoformat(text)
        at = (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
    except ValueError:
        try:
            at = float(text)
        except ValueError:
            at = -1.0
    if not 0 <= at < 2**33:
        raise InvalidRequest(name, f"{text!r} is neither a date, such as 2026-05-01T12:00:00Z, nor unix seconds")
    return at


def _number(given: Mapping[str, str], name: str, *, usual: int, least: int = 0) -> int:
    text = given.get(name, str(usual))
    if not (text.isascii() and text.isdecimal() and least <= int(text[:9]) <= _MOST and len(text) < 9):
        raise InvalidRequest(name, f"{text!r} is not a number from {least} to {_MOST}")
    return int(text)


def _own(found: Sequence[Any], tenant: str) -> list[Any]:
    """Of `tenant` only, whatever was asked besides; all for ""."""
    return [one for one in found if not tenant or one.tenant == tenant]


def _iso(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _plain(message: Message) -> Json:
    """All fields by their names; unlike protobuf's own JSON with numbers as numbers."""
    return {field.name: _value(field, getattr(message, field.name)) for field in message.DESCRIPTOR.fields}


def _value(field: Any, value: Any) -> Any:
    if field.message_type is None:
        return value
    if field.message_type.GetOptions().map_entry:
        return dict(value)
    return [_plain(one) for one in value]
