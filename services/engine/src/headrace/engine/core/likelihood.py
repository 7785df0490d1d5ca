"""How likely tokens were."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Likelihood:
    """A token, the natural logarithm of its probability before temperature, penalties and masks, its rank from 1."""

    token_id: int
    logprob: float
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprobs:
    """The likelihoods at one position: of the token that stands there, and of the likeliest, likeliest first."""

    token: Likelihood
    top: tuple[Likelihood, ...] = ()
