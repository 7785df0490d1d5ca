"""What the router knows of one replica, and what it is asked to place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, NewType

EngineId = NewType("EngineId", str)


class Phase(Enum):
    """Where a replica is in its life."""

    WARMING = "warming"
    READY = "ready"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """A replica's own measured speeds; all finite and above zero.

    The two scalars are means over everything. The classes, where a replica reports them, say more: (upper end in
    uncached prompt tokens, tokens/s) and (upper end in sequences, seconds), ascending.
    """

    prefill_tokens_per_s: float
    itl_s: float
    prefill_by_length: tuple[tuple[int, float], ...] = ()
    itl_by_batch: tuple[tuple[int, float], ...] = ()


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
    pressure: float
    """How full the KV cache is for admission, 0 to 1."""
    rates: Rates | None
    """None until both are measured: unknown, which is neither fast nor slow."""
    context_limit: int | None = field(init=False)
    """Most tokens one sequence can have here: the model's limit or the whole KV pool; None when not yet known."""

    def __post_init__(self) -> None:
        limits = [n for n in (self.max_model_len, self.total_blocks * self.block_size) if n > 0]
        object.__setattr__(self, "context_limit", min(limits, default=None))


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreadable:
    """A record that is there but cannot be understood: never taken for an idle replica."""

    engine_id: EngineId
    epoch: int
    sequence: int
    why: str


class AttemptKey(NamedTuple):
    """What a booking is filed under. A tuple, which is hashed in a tenth of the time: a placement looks it up often."""

    request_id: str
    attempt: int


ANY_EPOCH = 0
"""In an exclusion: every life of the replica."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One attempt to place one request; sizes are at least 1.

    `excluded` are lives of replicas, (engine id, epoch or ANY_EPOCH). `hashes` name the prompt's full blocks of
    `block_size` tokens, in order; none: no reuse is counted. `max_tokens` are those of each of its `sequences`. One
    `beyond_share` is of a tenant of which next to nothing may wait at a replica.
    """

    key: AttemptKey
    deployment: str
    bundle_digest: str
    adapter: str | None
    prompt_tokens: int
    max_tokens: int
    sequences: int = 1
    excluded: frozenset[tuple[str, int]] = frozenset()
    hashes: Sequence[bytes] = ()
    block_size: int = 0
    tenant: str = ""
    beyond_share: bool = False

    def excludes(self, replica: Replica) -> bool:
        """Whether this life of `replica` is excluded."""
        named = self.excluded
        return bool(named) and ((replica.engine_id, replica.epoch) in named or (replica.engine_id, ANY_EPOCH) in named)
