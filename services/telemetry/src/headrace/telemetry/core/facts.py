"""What is kept for good: what each request used, and decisions to account for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageAttempt:
    """One attempt of a request."""

    attempt: int
    engine_id: str
    epoch: int
    output_tokens: int
    outcome: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What one request used; see `UsageRecord` of the protocol."""

    request_id: str
    gateway_id: str
    admitted_ns: int
    ended_ns: int
    tenant: str
    credential: str
    model: str
    bundle_digest: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    outcome: str
    recovered: bool
    attempts: tuple[UsageAttempt, ...] = ()

    @property
    def key(self) -> UsageKey:
        """Its identity.

        The request's id alone would not do: clients may choose it, and one who sends the same id twice would pay
        once; one who guesses another's would keep that record out.
        """
        return self.request_id, self.gateway_id, self.admitted_ns


UsageKey = tuple[str, str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sum:
    """Usage of one tenant, model and bundle."""

    tenant: str
    model: str
    bundle_digest: str
    requests: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditFact:
    """A decision; see `AuditEvent` of the protocol."""

    event_id: str
    at_ns: int
    service: str
    tenant: str
    credential: str
    request_id: str
    subject: str
    decision: str
    reason: str
    facts: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Standing:
    """What decides between two records of one request."""

    recovered: bool
    output_tokens: int


def supersedes(new: Standing, old: Standing) -> bool:
    """Whether `new` takes the place of `old`.

    A gateway's own account of the end is final: the first one stays. One recovered from its journal is only the best
    known: the gateway's own account replaces it, and so does a later recovery that knows of more tokens. That happens
    after a power cut alone, which may take the newest notes of a journal away and leave older ones.
    """
    return old.recovered and (not new.recovered or new.output_tokens > old.output_tokens)


def standing(record: Usage) -> Standing:
    """A record's standing."""
    return Standing(record.recovered, record.output_tokens)


def once_each(records: Iterable[Usage]) -> dict[UsageKey, Usage]:
    """The record that stays, for each request among `records`."""
    kept: dict[UsageKey, Usage] = {}
    for record in records:
        known = kept.get(record.key)
        if known is None or supersedes(standing(record), standing(known)):
            kept[record.key] = record
    return kept
