"""The newest decisions, to be explained: how a request was placed, with which numbers, and how it went."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from headrace.api.routing.v1 import routing_service_pb2 as pb
from headrace.router.adapters import wire
from headrace.router.core.candidates import Considered

MOST_ATTEMPTS = 16
"""Of one request; a gateway makes 10 at most."""


@dataclass(slots=True, kw_only=True)
class Remembered:
    """One decision. What it holds belongs to it; the message is made when somebody asks."""

    attempt: int
    decided_unix_ns: int = 0
    asked: pb.PlaceRequest | None = None
    placed: pb.PlaceResponse | None = None
    refusal: str = ""
    considered: tuple[Considered, ...] = ()
    outcome: pb.ReleaseRequest | None = None

    def message(self) -> pb.Decision:
        """As it is explained."""
        told = pb.Decision(
            attempt=self.attempt,
            decided_unix_ns=self.decided_unix_ns,
            asked=self.asked,
            placed=self.placed,
            refusal=self.refusal,
            outcome=self.outcome,
        )
        if self.placed is None:
            told.considered.extend(map(wire.considered_message, self.considered))
        elif not self.placed.considered:
            wire.fill_considered(told.placed, self.considered)
        return told


class Memory:
    """Decisions of the newest `most` requests."""

    def __init__(self, *, most: int) -> None:
        self._most = most
        self._requests: OrderedDict[str, dict[int, Remembered]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._requests)

    def decided(self, request_id: str, decision: Remembered) -> None:
        """A decision was made."""
        attempts = self._of(request_id)
        if decision.attempt in attempts or len(attempts) < MOST_ATTEMPTS:
            attempts[decision.attempt] = decision

    def ended(self, outcome: pb.ReleaseRequest) -> Remembered:
        """An attempt was reported; another router may have placed it, and then its outcome is all there is here."""
        attempts = self._of(outcome.request_id)
        decision = attempts.get(outcome.attempt)
        if decision is None:
            decision = Remembered(attempt=outcome.attempt)
            if len(attempts) < MOST_ATTEMPTS:
                attempts[outcome.attempt] = decision
        decision.outcome = outcome
        return decision

    def of(self, request_id: str) -> list[pb.Decision]:
        """The decisions about one request, by attempt; empty when none is remembered."""
        return [decision.message() for _, decision in sorted(self._requests.get(request_id, {}).items())]

    def _of(self, request_id: str) -> dict[int, Remembered]:
        known = self._requests.get(request_id)
        if known is None:
            known = self._requests[request_id] = {}
            if len(self._requests) > self._most:
                self._requests.popitem(last=False)
        return known
