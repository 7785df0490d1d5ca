"""Where records go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from headrace.api.telemetry.v1.telemetry_service_pb2_grpc import TelemetryServiceStub
from headrace.base.deadline import Deadline
from headrace.gateway.core.account import Kind
from headrace.gateway.ledger.records import request_of
from headrace.rpc.client import Peer

# A batch of a thousand takes telemetry 20 ms; while it deletes old spans it may be busy for a second.
_DEADLINE_S = 10.0


class Sink(Protocol):
    """Takes records and answers when they are on its disk; takes the same record any number of times."""

    async def send(self, kind: Kind, bodies: Sequence[bytes]) -> None:
        """Deliver serialized messages, at most 1,000. Raises HeadraceError; InvalidRequest when one is malformed."""

    async def close(self) -> None:
        """Let go of the connection."""


class TelemetrySink:
    """The telemetry service behind `peer`, which is this sink's own from now on."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._stub: Any = TelemetryServiceStub(peer.channel)

    async def send(self, kind: Kind, bodies: Sequence[bytes]) -> None:
        """Returns when telemetry has them on its disk."""
        method = self._stub.RecordUsage if kind is Kind.USAGE else self._stub.RecordAudit
        await self._peer.unary(method, request_of(kind, bodies), deadline=Deadline.after(_DEADLINE_S))

    async def close(self) -> None:
        """Close the channel."""
        await self._peer.close()
