"""Deadlines."""

from __future__ import annotations

import math
import time

from headrace.base.deadline import Deadline


def test_a_deadline_counts_down_and_goes_below_zero() -> None:
    assert 9.0 < Deadline.after(10).remaining_s() <= 10.0
    assert Deadline.after(-1).remaining_s() <= -1.0


def test_a_cap_only_shortens() -> None:
    soon, late = Deadline.after(1), Deadline.after(1000)
    assert soon.capped(500) == soon
    assert late.capped(500).at <= time.monotonic() + 500
    assert Deadline.never().capped(2).remaining_s() <= 2


def test_grpc_gets_no_timeout_for_never_and_a_positive_one_for_a_deadline_that_passed() -> None:
    assert Deadline.never().timeout_s() is None
    assert Deadline.never().remaining_s() == math.inf
    assert Deadline.after(-5).timeout_s() == 0.001
    timeout = Deadline.after(10).timeout_s()
    assert timeout is not None
    assert 9.0 < timeout <= 10.0
