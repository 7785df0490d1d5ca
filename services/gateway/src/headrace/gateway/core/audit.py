"""A decision that somebody may have to account for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


class Decision(Enum):
    """What was decided."""

    ALLOWED = "ALLOWED"
    CHANGED = "CHANGED"
    REFUSED = "REFUSED"


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """Who, upon what (`subject`, e.g. "policy.max_output"), how and why (UPPER_SNAKE); never any of the prompt."""

    subject: str
    decision: Decision
    reason: str
    tenant: str = ""
    credential: str = ""
    request_id: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)
