"""Who may be chosen at all. Preference comes later and revives nobody."""

from __future__ import annotations

from enum import Enum

from headrace.router.core.replica import Attempt, Phase, Replica, Unreadable


class Verdict(Enum):
    """What became of one replica in one decision."""

    CHOSEN = "chosen"
    SLOWER = "slower"
    OTHER_BUNDLE = "other_bundle"
    NO_ADAPTER = "no_adapter"
    CONTEXT_TOO_SMALL = "context_too_small"
    EXCLUDED = "excluded"
    STALE = "stale"
    NOT_READY = "not_ready"
    UNMEASURED = "unmeasured"
    UNREADABLE = "unreadable"


def obstacle(seen: Replica | Unreadable, age_s: float, attempt: Attempt, freshness_s: float) -> Verdict | None:
    """The first reason why `seen` must not run `attempt`; None when there is none.

    Lasting reasons come before passing ones: a prompt that fits nowhere is the client's to shorten, even
    while the replicas happen to be stale. `age_s` equal to the bound is still fresh.
    """
    if isinstance(seen, Unreadable):
        return Verdict.UNREADABLE
    return _lasting(seen, attempt) or _passing(seen, age_s, attempt, freshness_s)


def _lasting(replica: Replica, attempt: Attempt) -> Verdict | None:
    if (replica.deployment, replica.bundle_digest) != (attempt.deployment, attempt.bundle_digest):
        return Verdict.OTHER_BUNDLE
    if attempt.adapter is not None and attempt.adapter not in replica.adapters:
        return Verdict.NO_ADAPTER
    limit = replica.context_limit
    # One token of answer must fit; the engine ends longer answers at its limit with finish reason LENGTH.
    if limit is not None and attempt.prompt_tokens + 1 > limit:
        return Verdict.CONTEXT_TOO_SMALL
    return None


def _passing(replica: Replica, age_s: float, attempt: Attempt, freshness_s: float) -> Verdict | None:
    if replica.engine_id in attempt.excluded:
        return Verdict.EXCLUDED
    # Before the phase: what an old record says of its phase is old news too.
    if age_s > freshness_s:
        return Verdict.STALE
    if replica.phase is not Phase.READY:
        return Verdict.NOT_READY
    if replica.rates is None:
        return Verdict.UNMEASURED
    return None
