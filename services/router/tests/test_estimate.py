"""Estimates: seconds, by arithmetic one can follow."""

from __future__ import annotations

import pytest

from headrace.router.core.estimate import NOTHING_BOOKED, Booked, Estimate, cost_of, standing_of
from headrace.router.core.replica import Rates


def of(replica, attempt, booked: Booked = NOTHING_BOOKED) -> Estimate:
    return cost_of(replica, replica.rates, attempt, standing_of(replica, replica.rates)).at(booked)


def test_queue_prefill_and_decode_add_up_as_in_the_worked_latency_case(a_replica, an_attempt):
    # 120 ms queue, 280 ms prefill with the first token in it, 80 tokens at 22 ms: TTFT 400 ms, total 2,138 ms.
    got = of(a_replica(waiting_prefill_tokens=60), an_attempt(prompt_tokens=140, max_tokens=80))
    assert got.queue_s == pytest.approx(0.120)
    assert got.queue_s + got.prefill_s == pytest.approx(0.400)
    assert got.decode_s == pytest.approx(1.738)
    assert got.total_s == pytest.approx(2.138)


def test_a_long_prompt_is_dominated_by_prefill_and_a_long_answer_by_decode(a_replica, an_attempt):
    prompt = of(
        a_replica(rates=Rates(prefill_tokens_per_s=12000 / 1.450, itl_s=0.018), max_model_len=16384),
        an_attempt(prompt_tokens=12000, max_tokens=20),
    )
    assert (prompt.prefill_s, prompt.decode_s) == (pytest.approx(1.450), pytest.approx(0.342))
    answer = of(
        a_replica(rates=Rates(prefill_tokens_per_s=600 / 0.110, itl_s=0.024)),
        an_attempt(prompt_tokens=600, max_tokens=180),
    )
    assert (answer.prefill_s, answer.decode_s) == (pytest.approx(0.110), pytest.approx(4.296))


def test_an_answer_is_counted_only_as_far_as_the_context_reaches(a_replica, an_attempt):
    assert of(a_replica(max_model_len=150), an_attempt(prompt_tokens=140, max_tokens=80)).decode_s == pytest.approx(
        9 * 0.022
    )


def test_bookings_wait_in_front_like_the_replicas_own_queue(a_replica, an_attempt):
    booked = of(a_replica(), an_attempt(), Booked(sequences=2, prompt_tokens=250))
    assert booked.queue_s == pytest.approx(0.5)
    assert booked.decode_s > of(a_replica(), an_attempt()).decode_s


def test_a_batch_that_doubles_to_its_limit_slows_decode_in_proportion(a_replica, an_attempt):
    # ITL measured at 8 of 32: a step costs 1 + 8/32; with 16 in it, 1 + 16/32.
    quiet = of(a_replica(running=8, waiting=7), an_attempt())
    assert quiet.decode_s == pytest.approx(79 * 0.022 * (48 / 40))


def test_a_full_batch_makes_the_next_wait_for_its_share_of_a_turnover(a_replica, an_attempt):
    assert of(a_replica(running=31), an_attempt()).queue_s == 0.0
    # One slot of 32 is missing, and 32 neighbours of 128 tokens at 22 ms free one every 88 ms.
    assert of(a_replica(running=32), an_attempt()).queue_s == pytest.approx(128 * 0.022 / 32)
    nine_too_many = of(a_replica(running=32, waiting=8), an_attempt())
    assert nine_too_many.queue_s == pytest.approx(9 * 128 * 0.022 / 32)


def test_missing_kv_blocks_make_the_next_wait_though_slots_are_free(a_replica, an_attempt):
    # 141 tokens need 9 blocks; 5 of 100 are free.
    got = of(a_replica(running=1, total_blocks=100, free_blocks=5), an_attempt(prompt_tokens=140))
    assert got.queue_s == pytest.approx(128 * 0.022 * (33 + 1) / (32 + 1) * 4 / 100)


def test_an_almost_full_cache_never_looks_better_than_an_empty_one(a_replica, an_attempt):
    crowded = of(a_replica(running=3, free_blocks=0), an_attempt(max_tokens=1))
    assert crowded.total_s > of(a_replica(running=3), an_attempt(max_tokens=1)).total_s
