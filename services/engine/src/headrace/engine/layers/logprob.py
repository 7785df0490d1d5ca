"""Log-probabilities and ranks from raw logits, before temperature, penalties and masks."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from headrace.engine.core.likelihood import Likelihood, Logprobs
from headrace.engine.layers.noise import Floats

# Reported for a token whose logit is -inf, or further down than this: the protocol has finite numbers only.
LEAST_LOGPROB = -9999.0


def logprobs_of(row: Floats, token_id: int, top: int) -> Logprobs:
    """Those of `token_id` and of the `top` likeliest tokens, from one row of logits whose largest is finite.

    Ranks are 1 + the tokens that are strictly likelier; among equals in `top` the lower token id comes first.
    """
    largest = row.max()
    # Summed in float64: float32 would lose the tail of a large vocabulary, and then log_softmax's third digit.
    normaliser = float(largest) + math.log(np.exp(row - largest).sum(dtype=np.float64))
    rank = 1 + int(np.count_nonzero(row > row[token_id]))
    return Logprobs(
        token=Likelihood(token_id=token_id, logprob=_finite(float(row[token_id]) - normaliser), rank=rank),
        top=tuple(_top(row, min(top, len(row)), normaliser)),
    )


def _top(row: Floats, count: int, normaliser: float) -> Iterator[Likelihood]:
    rank, last = 0, math.inf
    for place, token_id in enumerate(_likeliest(row, count), start=1):
        logit = float(row[token_id])
        rank, last = rank if logit == last else place, logit
        yield Likelihood(token_id=token_id, logprob=_finite(logit - normaliser), rank=rank)


def _finite(logprob: float) -> float:
    # Rounding may lift a certain token's above 0 by an ulp.
    return min(0.0, max(LEAST_LOGPROB, logprob))


def _likeliest(row: Floats, count: int) -> list[int]:
    """Ids of the `count` largest, largest first, equal ones by id."""
    if count == 0:
        return []
    least = np.partition(row, -count)[-count]
    above = (row > least).nonzero()[0]
    above = above[np.argsort(-row[above], kind="stable")]
    equal = (row == least).nonzero()[0][: count - len(above)]
    return [*above.tolist(), *equal.tolist()]
