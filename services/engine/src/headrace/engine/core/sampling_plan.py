"""How one sequence's tokens are chosen and when it ends, with every default already filled in."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum


class ConstraintKind(Enum):
    """What a constraint's text is."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstraintSpec:
    """The shape an answer must have: one text, or for CHOICE the allowed texts."""

    kind: ConstraintKind
    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingPlan:
    """Resolved sampling parameters of one sequence.

    `temperature` 0 is greedy; `top_k` 0 keeps every token; `top_p` 1 and `min_p` 0 keep every token. Noise is a pure
    function of (`seed`, position, token), so the answer does not depend on the batch, the chunks, a preemption or a
    migration. `allowed_token_ids` None allows all. `logprobs` and `prompt_logprobs` None ask for none, 0 for the
    token's own. Lists of tokens keep the client's order, by which a refusal names the one at fault.
    """

    max_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop_token_ids: Collection[int] = ()
    ignore_eos: bool = False
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Collection[int] | None = None
    banned_token_ids: Collection[int] = ()
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    constraint: ConstraintSpec | None = None
    # Whether anything but a grammar's mask may change the logits: asked of every sequence in every step.
    has_rules: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Look once at what each step would have to look at."""
        rules = self.min_tokens > 0 or self.logit_bias or self.allowed_token_ids is not None or self.banned_token_ids
        object.__setattr__(self, "has_rules", bool(rules) or self.penalises)

    @property
    def penalises(self) -> bool:
        """Whether tokens that were said before count."""
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0
