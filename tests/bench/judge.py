"""Whether an answer is one that the model gives: each token against the float32 reference at its own position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

WORST, MEAN = {"bfloat16": 1.5, "int8": 4.0}, {"bfloat16": 0.05, "int8": 0.25}
"""Most that the reference may prefer its own token by, in logits (nats): at worst, and on average over an answer.

Rounding to bfloat16 changes who wins a near tie; a wrong kernel is off by ten everywhere.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """How far the reference disagrees with an answer."""

    worst: float
    mean: float
    equal: float

    def stands(self, precision: str) -> bool:
        """Whether rounding explains it."""
        return self.worst <= WORST[precision] and self.mean <= MEAN[precision]


def judge(reference: Any, prompt: Sequence[int], answer: Sequence[int]) -> Judgement:
    """One pass over prompt and answer: how much less likely each token is than the one the reference would choose."""
    import torch

    with torch.inference_mode():
        logits = reference(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1].float()
    chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
    gaps = logits.max(dim=1).values - chosen
    return Judgement(worst=float(gaps.max()), mean=float(gaps.mean()), equal=float((gaps == 0).float().mean()))
