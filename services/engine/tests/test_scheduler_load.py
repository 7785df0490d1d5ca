"""Rates are a pure function of step records, and unknown until something measured them."""

from __future__ import annotations

from functools import partial, reduce

import pytest

from headrace.engine.core.load import Rates, StepRecord, measured, smallest_chunk


def rates(*records: StepRecord) -> Rates:
    return reduce(partial(measured, smallest_chunk=32), records, Rates())


def decode(duration_s: float) -> StepRecord:
    return StepRecord(duration_s=duration_s, decodes=4, prefill_tokens=0)


def prefill(tokens: int, duration_s: float, decodes: int = 0) -> StepRecord:
    return StepRecord(duration_s=duration_s, decodes=decodes, prefill_tokens=tokens)


def test_nothing_is_known_before_the_first_step() -> None:
    assert (Rates().itl_s, Rates().prefill_tokens_per_s) == (None, None)


def test_a_decode_says_nothing_about_prefill_and_a_prefill_nothing_about_decode() -> None:
    assert rates(decode(0.01)).prefill_tokens_per_s is None
    assert rates(prefill(100, 0.1)).itl_s is None


def test_the_prefill_rate_is_tokens_over_time() -> None:
    assert rates(prefill(500, 0.5), prefill(500, 0.5)).prefill_tokens_per_s == pytest.approx(1000)


def test_a_mixed_steps_prefill_time_is_what_exceeds_a_step_of_decodes_alone() -> None:
    after = rates(decode(0.010), prefill(100, 0.060, decodes=4))
    assert after.prefill_tokens_per_s == pytest.approx(100 / 0.050)


def test_a_mixed_step_measures_no_prefill_rate_before_a_decode_alone_has_been_seen() -> None:
    assert rates(prefill(100, 0.060, decodes=4)).prefill_tokens_per_s is None


def test_readers_feel_mixed_steps_so_they_count_as_inter_token_latency() -> None:
    assert rates(decode(0.010), prefill(100, 0.060, decodes=4)).itl_s == pytest.approx(0.015)


def test_a_few_tokens_of_prompt_measure_no_rate() -> None:
    known = rates(prefill(500, 0.5))
    after = measured(known, prefill(3, 0.015), smallest_chunk=32)
    assert after.prefill_tokens_per_s == known.prefill_tokens_per_s


def test_an_engine_of_small_steps_measures_its_small_chunks() -> None:
    assert [smallest_chunk(budget) for budget in (512, 64, 8, 1)] == [32, 32, 4, 1]


def test_the_mean_follows_a_change_within_a_few_dozen_steps() -> None:
    after = rates(*[decode(0.010)] * 50, *[decode(0.040)] * 30)
    assert after.itl_s == pytest.approx(0.040, rel=0.05)
