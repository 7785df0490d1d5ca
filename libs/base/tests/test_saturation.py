"""Saturation: one threshold, read in the same way by everybody."""

from __future__ import annotations

import math

import pytest

from headrace.base.saturation import Saturation


def allowance(bounds: Saturation, **load: float) -> int:
    usual = {"waiting": 0, "running": 0, "max_num_seqs": 32, "pressure": 0.0}
    return bounds.allowance(**{**usual, **load})  # type: ignore[arg-type]


def test_an_idle_replica_takes_a_full_batch_and_as_many_again_before_it_is_saturated():
    assert allowance(Saturation()) == 64


def test_those_that_run_or_wait_already_use_up_the_allowance():
    assert allowance(Saturation(), running=30, waiting=5) == 64 - 35
    assert allowance(Saturation(), running=32, waiting=31) == 1
    assert allowance(Saturation(), running=32, waiting=32) == 0


def test_a_few_that_wait_beside_free_slots_begin_with_the_next_step_and_close_nothing():
    assert allowance(Saturation(waiting=0.0), running=4, waiting=1) == 28
    assert allowance(Saturation(waiting=0.0), running=4, waiting=4) == 25
    assert allowance(Saturation(waiting=0.0), running=4, waiting=5) == 0, "more than a few: something holds them"
    assert (
        allowance(
            Saturation(
                waiting=0.0,
            ),
            running=0,
            waiting=1,
            max_num_seqs=1,
        )
        == 1
    )


def test_a_full_cache_saturates_whatever_waits():
    assert allowance(Saturation(), pressure=0.949) == 64
    assert allowance(Saturation(), pressure=0.95) == 0


def test_a_pressure_that_is_not_known_is_not_taken_for_an_empty_cache():
    assert Saturation().reached(waiting=0, running=0, max_num_seqs=32, pressure=math.nan)


def test_a_bound_of_zero_saturates_with_the_first_that_waits():
    assert allowance(Saturation(waiting=0.0), running=31) == 2
    assert allowance(Saturation(waiting=0.0), running=32, waiting=1) == 0


@pytest.mark.parametrize(
    "bounds",
    [
        {"waiting": -0.1},
        {"waiting": math.nan},
        {"pressure": 0.0},
        {"pressure": 1.01},
        {"reserve": -0.1},
        {"reserve": 0.51},
        {"reserve": math.nan},
    ],
)
def test_bounds_that_mean_nothing_are_refused(bounds: dict[str, float]):
    with pytest.raises(ValueError, match=r"saturation\."):
        Saturation(**bounds)


@pytest.mark.parametrize(("seats", "kept"), [(1, 0), (3, 0), (4, 1), (8, 1), (32, 4), (33, 5)])
def test_an_eighth_of_the_seats_is_the_reserve_but_none_of_fewer_than_four(seats: int, kept: int):
    assert Saturation().reserved(seats) == kept
    assert Saturation(reserve=0.0).reserved(seats) == 0


def beyond_share(bounds: Saturation, **load: float) -> int:
    usual = {"waiting": 0, "running": 0, "max_num_seqs": 32, "pressure": 0.0}
    return bounds.allowance_beyond_share(**{**usual, **load})  # type: ignore[arg-type]


def test_of_a_tenant_beyond_its_share_a_quarter_of_the_seats_may_wait_at_most():
    assert beyond_share(Saturation()) == 32 + 8
    assert beyond_share(Saturation(), running=32, waiting=8) == 0
    assert beyond_share(Saturation(waiting=0.0), running=32) == 1
    assert beyond_share(Saturation(), pressure=0.95) == 0
