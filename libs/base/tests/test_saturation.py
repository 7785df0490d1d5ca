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
    assert allowance(Saturation(), running=30, waiting=5) == 27
    assert allowance(Saturation(), running=32, waiting=31) == 1
    assert allowance(Saturation(), running=32, waiting=32) == 0


def test_a_full_cache_saturates_whatever_waits():
    assert allowance(Saturation(), pressure=0.949) == 64
    assert allowance(Saturation(), pressure=0.95) == 0


def test_a_pressure_that_is_not_known_is_not_taken_for_an_empty_cache():
    assert Saturation().reached(waiting=0, running=0, max_num_seqs=32, pressure=math.nan)


def test_a_bound_of_zero_saturates_with_the_first_that_waits():
    assert allowance(Saturation(waiting=0.0), running=31) == 2
    assert allowance(Saturation(waiting=0.0), running=32, waiting=1) == 0


@pytest.mark.parametrize("bounds", [{"waiting": -0.1}, {"waiting": math.nan}, {"pressure": 0.0}, {"pressure": 1.01}])
def test_bounds_that_mean_nothing_are_refused(bounds: dict[str, float]):
    with pytest.raises(ValueError, match=r"saturation\."):
        Saturation(**bounds)
