"""Delays between tries."""

from __future__ import annotations

import random

from headrace.base.backoff import Backoff


def test_delays_double_up_to_the_longest_and_keep_half_of_it_at_least() -> None:
    backoff = Backoff(first_s=0.1, longest_s=1.0, random=random.Random(3))
    for full in (0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0):
        assert full / 2 <= backoff.next_s() <= full


def test_a_success_starts_anew() -> None:
    backoff = Backoff(first_s=0.1, longest_s=8.0)
    for _ in range(10):
        backoff.next_s()
    backoff.reset()
    assert backoff.next_s() <= 0.1


def test_two_retriers_do_not_go_in_step() -> None:
    one, other = Backoff(random=random.Random(1)), Backoff(random=random.Random(2))
    assert [one.next_s() for _ in range(5)] != [other.next_s() for _ in range(5)]
