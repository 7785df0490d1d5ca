"""What a policy filter is, and what several of them together decide upon one request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from headrace.base.errors import Forbidden
from headrace.gateway.core.audit import Audit, Decision
from headrace.gateway.core.terms import TenantTerms

POLICY_FAILED = "POLICY_FAILED"
"""Reason of a refusal because a filter could not tell: what was not checked does not pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRequest:
    """What filters see of a request: its texts (messages' contents, or the prompt; tokens decoded) and its size.

    `max_tokens` is what each of its `n` answers would get, `asked_max_tokens` what the client said, if anything.
    """

    request_id: str
    terms: TenantTerms
    credential: str
    deployment: str
    texts: tuple[str, ...]
    max_tokens: int
    asked_max_tokens: int | None = None
    n: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What one filter decides. `reason` is UPPER_SNAKE and reaches the client; `facts` are for the audit alone.

    Neither may hold any of the prompt. `max_tokens` lowers what each answer gets; a filter cannot raise it.
    """

    decision: Decision = Decision.ALLOWED
    reason: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)
    max_tokens: int | None = None


class PolicyFilter(Protocol):
    """One rule. Stateless or safe in several threads; `check` runs off the event loop, and may take milliseconds."""

    @property
    def name(self) -> str:
        """Of the audit's subject, the metric and the client's error; filters are asked in order of their names."""

    def concerns(self, request: PolicyRequest) -> bool:
        """Whether there is anything to check, told in microseconds: most requests concern no filter at all."""

    def check(self, request: PolicyRequest) -> Verdict:
        """The decision. Whatever it raises refuses the request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What all filters decided: the tokens each answer may have, what to audit, and the error of a refusal."""

    max_tokens: int
    audits: tuple[Audit, ...] = ()
    refusal: Forbidden | None = None


def judge(filters: Sequence[PolicyFilter], request: PolicyRequest) -> Judgement:
    """Ask the filters in turn; the first refusal ends it. Everything that is not ALLOWED is audited."""
    max_tokens, audits = request.max_tokens, list[Audit]()
    for each in filters:
        decision, reason, facts, lowered = _checked(each, request)
        if lowered is not None:
            max_tokens = min(max_tokens, lowered)
        if decision is not Decision.ALLOWED:
            audits.append(audit_of(each.name, request, decision, reason, facts))
        if decision is Decision.REFUSED:
            return Judgement(max_tokens=max_tokens, audits=tuple(audits), refusal=refusal(each.name, reason))
    return Judgement(max_tokens=max_tokens, audits=tuple(audits))


def refusal(name: str, reason: str) -> Forbidden:
    """What the client hears: which filter and why; not the text and not the rule, which would teach a way around."""
    why = "could not be checked by" if reason == POLICY_FAILED else "is refused by"
    return Forbidden(f"the request {why} the policy {name}", reason=reason, metadata={"filter": name})


def audit_of(name: str, request: PolicyRequest, decision: Decision, reason: str, facts: Mapping[str, str]) -> Audit:
    """The event of one filter's decision."""
    return Audit(
        subject=f"policy.{name}",
        decision=decision,
        reason=reason,
        tenant=request.terms.tenant,
        credential=request.credential,
        request_id=request.request_id,
        facts=facts,
    )


def _checked(each: PolicyFilter, request: PolicyRequest) -> tuple[Decision, str, Mapping[str, str], int | None]:
    # A guard: filters are code of others, and none of their faults may let a request through or name its text.
    try:
        verdict = each.check(request)
        lowered = None if verdict.max_tokens is None else max(1, int(verdict.max_tokens))
        return Decision(verdict.decision), str(verdict.reason), dict(verdict.facts), lowered
    except Exception as error:
        return Decision.REFUSED, POLICY_FAILED, {"error": type(error).__name__}, None
