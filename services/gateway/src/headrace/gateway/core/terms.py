"""What a tenant may use, ready to act upon."""

from __future__ import annotations

import re
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Over all gateways together. None is no limit; 0 lets nothing through."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    tokens_per_day: int | None = None
    max_concurrent_requests: int | None = None

    @property
    def any(self) -> bool:
        """Whether one of them is set."""
        return any(
            limit is not None
            for limit in (
                self.requests_per_minute,
                self.tokens_per_minute,
                self.tokens_per_day,
                self.max_concurrent_requests,
            )
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantTerms:
    """One tenant's terms. A tenant without a record has the defaults: no limits of its own and the weight 1.

    `weight` is above 0. `max_output_tokens` is None for no limit of its own.
    """

    tenant: str
    limits: Limits = field(default_factory=Limits)
    weight: float = 1.0
    max_output_tokens: int | None = None
    denied_patterns: tuple[re.Pattern[str], ...] = ()
