"""How long a simulated step takes."""

from __future__ import annotations

from dataclasses import dataclass

# A batch of 32 decodes takes 1.6 times as long as one decode: what a memory-bound model on two cores does.
_PER_FURTHER_DECODE = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """A fixed part, prompt tokens at a rate, and decodes that share one pass over the weights."""

    step_s: float
    prefill_tokens_per_s: float
    itl_s: float
    slow: float = 1.0

    def duration_s(self, *, prefill_tokens: int, decodes: int) -> float:
        """Seconds for one step; linear in `slow`."""
        decode_s = self.itl_s * (1 + _PER_FURTHER_DECODE * (decodes - 1)) if decodes else 0.0
        return self.slow * (self.step_s + prefill_tokens / self.prefill_tokens_per_s + decode_s)
