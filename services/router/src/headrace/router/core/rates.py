"""Reading a replica's measured rates: the class that fits, or what the means say."""

from __future__ import annotations

from headrace.router.core.replica import Rates


def prefill_s(rates: Rates, uncached_tokens: int) -> float:
    """Seconds to prefill that many tokens, at the speed measured for such lengths.

    A short prompt pays a step's fixed cost, a long one attention over itself, so one mean fits neither. The class is
    the first that reaches so far, else the longest measured.
    """
    for upper, rate in rates.prefill_by_length:
        if uncached_tokens <= upper:
            return uncached_tokens / rate
    last = rates.prefill_by_length[-1][1] if rates.prefill_by_length else rates.prefill_tokens_per_s
    return uncached_tokens / last


def itl_s(rates: Rates, batch: int, *, running: int, full: int) -> float:
    """Seconds per token in a batch of so many, between the classes measured; `running` is the batch of the mean.

    Above the largest batch measured a step costs about a + b·n: a reads the weights, b·n is per sequence. The batch
    limit `full` is set near where both are equal, so a full batch steps half as fast as an empty one: ∝ 1 + n / full.
    """
    points = rates.itl_by_batch or ((min(max(running, 1), full), rates.itl_s),)
    below, at_below = points[0]
    if batch <= below:
        return at_below
    for upper, at_upper in points[1:]:
        if batch <= upper:
            return at_below + (at_upper - at_below) * (batch - below) / (upper - below)
        below, at_below = upper, at_upper
    return at_below * max(1.0, (full + batch) / (full + below))
