"""Rates are a pure function of step records, and unknown until something measured them."""

from __future__ import annotations

import dataclasses
from functools import partial, reduce

import pytest

from headrace.engine.core.load import RESTED_S, LastLoad, Load, Meter, Rates, StepRecord, measured, smallest_chunk


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


def test_rates_are_told_apart_by_the_uncached_length_of_the_prompt() -> None:
    short = StepRecord(duration_s=0.050, decodes=0, prefill_tokens=20, longest_prefill=20)
    chunks = [StepRecord(duration_s=0.100, decodes=0, prefill_tokens=500, longest_prefill=3000)] * 6
    after = rates(short, *chunks)
    assert [(c.upper, round(c.tokens_per_s)) for c in after.by_length] == [(64, 400), (4096, 5000)]


def test_a_chunk_too_small_for_the_mean_rate_still_tells_what_short_prompts_cost_unless_decodes_blur_it() -> None:
    alone = rates(prefill(10, 0.020))
    assert (alone.prefill_tokens_per_s, [c.upper for c in alone.by_length]) == (None, [64])
    assert not rates(decode(0.010), prefill(10, 0.020, decodes=4)).by_length


def test_prompts_beside_the_decodes_do_not_count_as_the_time_that_a_batch_takes() -> None:
    rates = measured(Rates(), StepRecord(duration_s=0.010, decodes=4, prefill_tokens=0), smallest_chunk=32)
    busy = StepRecord(duration_s=0.110, decodes=4, prefill_tokens=1000)
    for _ in range(20):
        rates = measured(rates, busy, smallest_chunk=32)
    assert [(c.upper, c.itl_s) for c in rates.by_batch] == [(4, 0.010)]
    assert rates.itl_s is not None
    assert rates.itl_s > 0.090  # what a reader sees


def test_an_engine_that_idles_after_a_full_batch_still_knows_what_a_small_one_takes() -> None:
    alone = StepRecord(duration_s=0.010, decodes=1, prefill_tokens=0)
    crowd = StepRecord(duration_s=0.040, decodes=30, prefill_tokens=0)
    after = rates(alone, *[crowd] * 50)
    assert after.itl_s == pytest.approx(0.040, rel=0.05)
    assert [(c.upper, c.itl_s) for c in after.by_batch] == [(1, 0.010), (32, pytest.approx(0.040))]


def test_guesses_that_came_true_shorten_the_time_between_tokens() -> None:
    after = rates(StepRecord(duration_s=0.030, decodes=2, prefill_tokens=0, accepted=4))
    assert after.itl_s == pytest.approx(0.010)


def test_a_meter_says_what_its_steps_say_one_by_one_whenever_it_is_asked() -> None:
    meter, steps = Meter(smallest_chunk=32), []
    for at in range(200):
        steps.append(prefill(100, 0.050, decodes=at % 3) if at % 7 == 0 else decode(0.010 + at / 10_000))
        meter.note(steps[-1])
        if at in (0, 1, 70, 199):
            assert meter.rates == rates(*steps)


def test_a_rested_replica_says_its_start_s_rates_where_those_were_better() -> None:
    fields: dict[str, object] = {
        "waiting": 0, "waiting_prefill_tokens": 0, "free_blocks": 8, "total_blocks": 8,
        "cached_blocks": 0, "pressure": 0.0,
    }  # fmt: skip
    start = Load(
        running=0, prefill_tokens_per_s=1000.0, itl_ms=10.0, prefill_rates=((256, 1000.0),),
        batch_latencies=((1, 10.0),), **fields,  # type: ignore[arg-type]
    )  # fmt: skip
    slow = dataclasses.replace(
        start, prefill_tokens_per_s=1200.0, itl_ms=80.0, prefill_rates=((64, 100.0), (256, 1200.0)),
        batch_latencies=((1, 40.0), (32, 400.0)),
    )  # fmt: skip
    busy = dataclasses.replace(slow, running=1)
    last = LastLoad(start)

    last.note(busy, now=0.0)
    last.note(slow, now=1.0)
    last.note(slow, now=4.0)  # a ping's answer

    assert last.at(1.0 + RESTED_S - 0.1) == slow
    rested = last.at(1.0 + RESTED_S)
    assert (rested.prefill_tokens_per_s, rested.itl_ms) == (1200.0, 10.0)
    assert (rested.prefill_rates, rested.batch_latencies) == (((256, 1200.0),), ((1, 10.0),))
    last.note(busy, now=9.0)
    assert last.at(99.0) == busy
