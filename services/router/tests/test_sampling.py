"""Which placements are told of in full."""

from __future__ import annotations

from headrace.router.core.sampling import Sampling


def test_the_first_of_each_second_are_told_of_and_no_more() -> None:
    sampling = Sampling(most_per_s=2)
    assert [sampling.allows(now) for now in (7.1, 7.2, 7.9, 7.95)] == [True, True, False, False]
    assert [sampling.allows(now) for now in (8.0, 8.0, 8.0, 11.5)] == [True, True, False, True]
