"""What the router knows of one replica, and what it is asked to place."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NewType

EngineId = NewType("EngineId", str)


class Phase(Enum):
    """Where a replica is in its life."""

    WARMING = "warming"
    READY = "ready"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """A replica's own measured speeds; both finite and above zero."""

    prefill_tokens_per_s: float
    itl_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """One heartbeat. A ready replica has an address and sizes above zero; other phases may still lack them."""

    engine_id: EngineId
    epoch: int
    sequence: int
    address: str
    deployment: str
    bundle_digest: str
    adapters: frozenset[str]
    phase: Phase
    waiting: int
    waiting_prefill_tokens: int
    running: int
    free_blocks: int
    total_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    rates: Rates | None
    """None until both are measured: unknown, which is neither fast nor slow."""

    @property
    def context_limit(self) -> int | None:
        """Most tokens one sequence can have here: the model's limit or the whole KV pool; None when not yet known."""
        limits = [n for n in (self.max_model_len, self.total_blocks * self.block_size) if n > 0]
        return min(limits, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreadable:
    """A record that is there but cannot be understood: never taken for an idle replica."""

    engine_id: EngineId
    epoch: int
    sequence: int
    why: str


@dataclass(frozen=True, slots=True, order=True)
class AttemptKey:
    """What a booking is filed under."""

    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One attempt to place one request; sizes are at least 1."""

    key: AttemptKey
    deployment: str
    bundle_digest: str
    adapter: str | None
    prompt_tokens: int
    max_tokens: int
    excluded: frozenset[str]
