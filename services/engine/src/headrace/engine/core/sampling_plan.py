"""How one sequence's tokens are chosen and when it ends, with every default already filled in."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingPlan:
    """Resolved sampling parameters of one sequence.

    `temperature` 0 is greedy; `top_k` 0 keeps every token; `top_p` 1 keeps every token. Noise is a pure function of
    (`seed`, position, token), so the answer does not depend on the batch, the chunks, a preemption or a migration.
    """

    max_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
