"""Who may be chosen at all. Preference comes later and revives nobody."""

from __future__ import annotations

from collections.abc import Container
from enum import Enum

from headrace.router.core.replica import Attempt, EngineId, Phase, Replica, Unreadable
from headrace.router.core.rules import Policy, Rules


class Verdict(Enum):
    """What became of one replica in one decision."""

    __hash__ = object.__hash__  # Enum's own is written in Python, and decisions count verdicts

    CHOSEN = "chosen"
    SLOWER = "slower"
    SATURATED = "saturated"
    OTHER_BUNDLE = "other_bundle"
    TENANT_NOT_PERMITTED = "tenant_not_permitted"
    NO_ADAPTER = "no_adapter"
    CONTEXT_TOO_SMALL = "context_too_small"
    EXCLUDED = "excluded"
    STALE = "stale"
    NOT_READY = "not_ready"
    EJECTED = "ejected"
    UNMEASURED = "unmeasured"
    UNREADABLE = "unreadable"


def obstacle(
    seen: Replica | Unreadable, age_s: float, attempt: Attempt, rules: Rules, ejected: Container[EngineId] = ()
) -> Verdict | None:
    """The first reason why `seen` must not run `attempt`; None when there is none.

    Lasting reasons come before passing ones: a prompt that fits nowhere is the client's to shorten, even
    while the replicas happen to be stale. `age_s` equal to the bound is still fresh.
    """
    if isinstance(seen, Unreadable):
        return Verdict.UNREADABLE
    if seen.deployment != attempt.deployment or seen.bundle_digest != attempt.bundle_digest:
        return Verdict.OTHER_BUNDLE
    if rules.tenants and not rules.admits(attempt.tenant):
        return Verdict.TENANT_NOT_PERMITTED
    if attempt.adapter is not None and attempt.adapter not in seen.adapters:
        return Verdict.NO_ADAPTER
    # One token of answer must fit; the engine ends longer answers at its limit with finish reason LENGTH.
    if seen.context_limit is not None and attempt.prompt_tokens >= seen.context_limit:
        return Verdict.CONTEXT_TOO_SMALL
    return _passing(seen, age_s, attempt, rules, ejected)


def _passing(
    seen: Replica, age_s: float, attempt: Attempt, rules: Rules, ejected: Container[EngineId]
) -> Verdict | None:
    if attempt.excluded and attempt.excludes(seen):
        return Verdict.EXCLUDED
    # Before the phase: what an old record says of its phase is old news too.
    if age_s > rules.freshness_s:
        return Verdict.STALE
    if seen.phase is not Phase.READY:
        return Verdict.NOT_READY
    if seen.engine_id in ejected:
        return Verdict.EJECTED
    # Only this policy reads the rates; unknown is never read as fast.
    if seen.rates is None and rules.policy is Policy.LEAST_COMPLETION_TIME:
        return Verdict.UNMEASURED
    return None
