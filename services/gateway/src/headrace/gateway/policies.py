"""Policy filters at work: found, asked off the event loop, their decisions counted and audited.

Other packages add theirs with an entry point of the group `headrace.policies`: a callable that returns a
`PolicyFilter`, e.g. its class. The gateway's own two need no entry point, so that no packaging mistake loses them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import entry_points

import structlog

from headrace.base.deadline import Deadline
from headrace.base.errors import StartError
from headrace.gateway.core.audit import Audit, Decision
from headrace.gateway.core.policy import (
    POLICY_FAILED,
    Judgement,
    PolicyFilter,
    PolicyRequest,
    audit_of,
    judge,
    refusal,
)
from headrace.gateway.filters import DeniedPatterns, MaxOutput
from headrace.observe.metrics import counter

log = structlog.get_logger(__name__)

GROUP = "headrace.policies"

_THREADS = 4  # of their own: a slow filter must not keep the tokenizer's threads
_LONGEST_S = 5.0

DECISIONS = counter(
    "headrace_gateway_policy_decisions_total", "Decisions of policy filters other than ALLOWED.", ("policy", "decision")
)


class Policies:
    """All filters of a gateway, in order of their names. `audit` takes each decision other than ALLOWED, at once."""

    def __init__(self, filters: Iterable[PolicyFilter], audit: Callable[[Audit], None]) -> None:
        """StartError when two filters have one name."""
        self._filters = sorted(filters, key=lambda each: each.name)
        names = [each.name for each in self._filters]
        for name in names:
            if names.count(name) > 1:
                raise StartError(f"two policy filters are named {name}; uninstall one of the packages that bring them")
        self._audit = audit
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="policy")

    @property
    def names(self) -> list[str]:
        """Names of the filters in force."""
        return [each.name for each in self._filters]

    async def judged(self, request: PolicyRequest, deadline: Deadline) -> int:
        """The tokens each answer may have; Forbidden when a filter refuses, fails or takes too long."""
        concerned, failed = [], None
        for each in self._filters:
            # A guard, as around `check`: what cannot say whether it is concerned has not checked.
            try:
                if each.concerns(request):
                    concerned.append(each)
            except Exception as error:
                failed = _unchecked(each, request, type(error).__name__)
                break
        if not concerned and failed is None:
            return request.max_tokens
        return self._carried_out(failed or await self._asked(concerned, request, deadline))

    def close(self) -> None:
        """Start no more checks."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _asked(self, concerned: list[PolicyFilter], request: PolicyRequest, deadline: Deadline) -> Judgement:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(max(0.0, min(_LONGEST_S, deadline.remaining_s()))):
                return await loop.run_in_executor(self._threads, judge, concerned, request)
        except TimeoutError:
            return _unchecked(concerned[0], request, TimeoutError.__name__)

    def _carried_out(self, judgement: Judgement) -> int:
        for audit in judgement.audits:
            name = audit.subject.removeprefix("policy.")
            DECISIONS.labels(name, audit.decision.value).inc()
            if audit.reason == POLICY_FAILED:
                log.warning("policy_failed", policy=name, request=audit.request_id, error=audit.facts.get("error"))
            self._audit(audit)
        if judgement.refusal is not None:
            raise judgement.refusal
        return judgement.max_tokens


def installed_filters() -> list[PolicyFilter]:
    """The gateway's own filters and those of installed packages; StartError when one cannot be loaded."""
    filters: list[PolicyFilter] = [DeniedPatterns(), MaxOutput()]
    for point in entry_points(group=GROUP):
        # A guard: whatever a package raises when it is imported, a gateway must not serve without its policy.
        try:
            made: PolicyFilter = point.load()()
            if not made.name or not callable(made.check) or not callable(made.concerns):
                raise TypeError("it has no name, concerns and check")
        except Exception as error:
            raise StartError(f"policy filter {point.name} ({point.value}) cannot be loaded: {error}") from error
        filters.append(made)
    return filters


def _unchecked(each: PolicyFilter, request: PolicyRequest, error: str) -> Judgement:
    audit = audit_of(each.name, request, Decision.REFUSED, POLICY_FAILED, {"error": error})
    return Judgement(max_tokens=request.max_tokens, audits=(audit,), refusal=refusal(each.name, POLICY_FAILED))
