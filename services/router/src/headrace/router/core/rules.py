"""What a deployment asks of its routing. Set by its owner in etcd; nothing in a request can change it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from headrace.base.saturation import Saturation


class Policy(Enum):
    """How eligible replicas are preferred."""

    __hash__ = object.__hash__  # Enum's own is written in Python

    LEAST_COMPLETION_TIME = "least_completion_time"
    LEAST_LOADED = "least_loaded"
    ROUND_ROBIN = "round_robin"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """One deployment's rules. `tenants` empty: open to all."""

    freshness_s: float
    policy: Policy = Policy.LEAST_COMPLETION_TIME
    slow_start_s: float = 0.0
    saturation: Saturation = field(default_factory=Saturation)
    tenants: frozenset[str] = frozenset()

    def admits(self, tenant: str) -> bool:
        """Whether the deployment is open to `tenant`."""
        return not self.tenants or tenant in self.tenants


RulesOf = Callable[[str], Rules]
"""A deployment's rules by its name; one that is not known has the defaults."""
