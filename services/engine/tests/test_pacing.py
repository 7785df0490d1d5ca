"""Prompts beside running streams keep to the time that those can spare; durations are given, no clock is looked at."""

from __future__ import annotations

from itertools import pairwise

import pytest

from headrace.engine.core.pacing import Pace, Pacer, PaceReason
from headrace.engine.core.placement import Placement, Priority
from headrace.engine.core.step import Hold, StepPlan
from headrace.testkit.engine_bench import Bench, alone, shape


def pacer(stretch: float = 2.2, *, decodes: int = 4, alone_s: float = 0.010, token_s: float = 0.00025) -> Pacer:
    """One that has seen steps of `decodes` alone, and prompts of which a token costs `token_s`."""
    made = Pacer(stretch)
    made.note(duration_s=400 * token_s, decodes=0, prefill_tokens=400)
    made.note(duration_s=alone_s, decodes=decodes, prefill_tokens=0)
    return made


def pace(made: Pacer, *, decodes: int = 4, prompts: int = 1, most: int = 508) -> Pace:
    return made.pace(decodes=decodes, prompts=prompts, most=most)


def mixed(made: Pacer, *durations_s: float, tokens: int = 48, decodes: int = 4) -> None:
    for duration_s in durations_s:
        made.note(duration_s=duration_s, decodes=decodes, prefill_tokens=tokens)


def test_prompts_have_what_fits_into_the_time_by_which_a_step_may_be_longer() -> None:
    found = pace(pacer())
    assert (found.tokens, found.reason, found.allowed_s) == (48, PaceReason.STRETCH, pytest.approx(0.012))
    assert pace(pacer(3.2)).tokens == 88
    assert pace(pacer(), most=30).tokens == 30


def test_before_anything_is_measured_prompts_have_what_there_is_room_for() -> None:
    fresh = Pacer(2.2)
    assert pace(fresh) == Pace(tokens=508, reason=PaceReason.UNMEASURED)
    fresh.note(duration_s=0.010, decodes=4, prefill_tokens=0)
    assert pace(fresh).reason is PaceReason.UNMEASURED
    fresh.note(duration_s=0.1, decodes=0, prefill_tokens=400)
    assert pace(fresh).reason is PaceReason.STRETCH


def test_three_steps_that_took_longer_than_reckoned_make_the_next_one_smaller_and_a_spike_does_not() -> None:
    made = pacer()
    mixed(made, 0.022, 0.022, 0.022, 0.300, 0.300)
    assert pace(made).tokens in (47, 48)
    mixed(made, 0.034)
    assert pace(made).tokens == 24


def test_steps_that_took_less_time_than_allowed_let_the_next_ones_grow() -> None:
    made = pacer()
    mixed(made, 0.016, 0.016, 0.016)
    assert pace(made).tokens in (95, 96)


@pytest.mark.parametrize("cost_s", [0.0001, 0.0005, 0.002])
def test_whatever_a_token_costs_steps_settle_at_the_stretch(cost_s: float) -> None:
    made = pacer()
    for _ in range(100):
        tokens = pace(made).tokens
        mixed(made, 0.010 + tokens * cost_s, tokens=tokens) if tokens else made.note(
            duration_s=0.010, decodes=4, prefill_tokens=0
        )
    tokens = pace(made).tokens
    assert 0.020 < 0.010 + tokens * cost_s <= 0.0221


def test_when_the_machine_becomes_slower_the_yardstick_follows_and_prompts_get_on_as_before() -> None:
    made, reckoned = pacer(), []
    for _ in range(120):  # everything takes three times as long now
        tokens = pace(made).tokens
        made.note(duration_s=3 * (0.010 + tokens * 0.00025), decodes=4, prefill_tokens=tokens)
        reckoned.append(tokens)
    assert min(filter(None, reckoned)) < 16
    assert reckoned[-1] in (47, 48)


def test_a_step_of_decodes_alone_is_never_followed_by_another_while_prompts_wait() -> None:
    made, held = pacer(), []
    for step in range(200):
        decodes = 1 + step // 7 % 9  # sizes never seen before among them
        tokens = pace(made, decodes=decodes).tokens
        made.note(duration_s=0.010 + tokens * 0.00025, decodes=decodes, prefill_tokens=tokens)
        held.append(not tokens)
    assert not any(a and b for a, b in pairwise(held))
    assert sum(held) <= 8 + 200 // 16  # once for each new number of decodes, and every seventeenth step


def test_a_number_of_streams_not_seen_before_is_measured_before_it_is_judged() -> None:
    made = pacer()
    mixed(made, 0.022)
    assert pace(made, decodes=9).reason is PaceReason.YARDSTICK
    made.note(duration_s=0.020, decodes=9, prefill_tokens=0)
    assert pace(made, decodes=9).allowed_s == pytest.approx(0.024)
    assert pace(made, decodes=12).allowed_s == pytest.approx(0.024)  # the next fewer
    assert pace(made, decodes=2).allowed_s == pytest.approx(0.012)  # the next more


def test_the_more_prompts_wait_for_each_stream_the_longer_a_step_may_be() -> None:
    made = pacer()
    assert [pace(made, prompts=prompts).tokens for prompts in (1, 4, 8, 16)] == [48, 48, 136, 312]


def test_at_the_least_prompts_get_on_by_four_tokens() -> None:
    assert pace(pacer(1.01)).tokens == 4
    assert pace(pacer(1.01), most=3).tokens == 3


def test_a_clock_that_stands_still_measures_nothing() -> None:
    made = Pacer(2.2)
    for decodes, tokens in ((0, 100), (4, 0), (4, 100)) * 3:
        made.note(duration_s=0.0, decodes=decodes, prefill_tokens=tokens)
    assert pace(made).reason is PaceReason.UNMEASURED


@pytest.mark.parametrize("stretch", [1.0, 0.5, -1.0, float("nan")])
def test_a_stretch_that_leaves_prompts_no_time_is_refused(stretch: float) -> None:
    with pytest.raises(ValueError, match="must be above 1, or 0 for no pacing"):
        Pacer(stretch)


class Paced(Bench):
    """A bench whose decodes take 10 s each step and prompt tokens 1 s; a step may stretch to twice its decodes."""

    def __init__(self, **fields: object) -> None:
        super().__init__(blocks=256, budget=64, **fields)  # type: ignore[arg-type]
        self.scheduler.pacer = Pacer(2.0)
        for decodes in range(1, 9):
            self.scheduler.pacer.note(duration_s=10.0, decodes=decodes, prefill_tokens=0)
        self.scheduler.pacer.note(duration_s=64.0, decodes=0, prefill_tokens=64)

    def step(self) -> StepPlan:
        plan = super().step()
        assert self.scheduler.pacer is not None
        tokens = sum(shape(plan).values()) - plan.decodes
        self.scheduler.pacer.note(
            duration_s=(10.0 if plan.decodes else 0.0) + tokens, decodes=plan.decodes, prefill_tokens=tokens
        )
        return plan


def test_a_newcomers_prompt_comes_in_chunks_that_the_running_stream_can_bear() -> None:
    bench = Paced()
    bench.submit(1, 3, max_tokens=100)
    bench.step()
    bench.submit(2, 45)
    bench.submit(3, 5)
    plan = bench.step()
    assert plan.pace is not None
    # Two prompts wait for one stream: its step may stretch to four times its length.
    assert (shape(plan), plan.hold, plan.pace.tokens) == ({1: 1, 2: 30}, Hold.PACE, 30)
    assert shape(bench.step()) == {1: 1, 2: 15, 3: 5}
    assert shape(bench.step()) == {1: 1, 2: 1, 3: 1}
    bench.run()
    assert bench.tokens[2] == alone(45, 4, 2)


def test_prompts_without_streams_beside_them_have_the_whole_step() -> None:
    bench = Paced()
    bench.submit(1, 100)
    plan = bench.step()
    assert (shape(plan), plan.pace) == ({1: 64}, None)


def test_requests_that_came_together_do_not_hold_each_other_back() -> None:
    bench = Paced()
    for id in (1, 2, 3):
        bench.submit(id, 60, max_tokens=50)
    assert shape(bench.step()) == {1: 60, 2: 4}
    assert shape(bench.step()) == {1: 1, 2: 56, 3: 7}  # 1 speaks already, but 2 and 3 were here before it did
    bench.submit(4, 60)
    assert shape(bench.step()) == {1: 1, 2: 1, 3: 53}  # they go on as they were, and 4 has the rest of what they leave


def test_a_higher_class_is_not_held_back_for_streams_of_a_lower_one() -> None:
    bench = Paced()
    bench.submit(1, 3, max_tokens=100, placement=Placement(priority=Priority.BATCH))
    bench.step()
    bench.submit(2, 60, placement=Placement(priority=Priority.BATCH))
    assert shape(bench.step()) == {1: 1, 2: 10}
    bench.submit(3, 25, placement=Placement(priority=Priority.INTERACTIVE))
    assert shape(bench.step()) == {1: 1, 2: 30, 3: 25}


def test_a_step_that_measures_the_decodes_says_that_prompts_wait_for_the_pace() -> None:
    bench = Paced()
    bench.submit(1, 3, max_tokens=200)
    bench.step()
    bench.submit(2, 600)
    plans = [bench.step() for _ in range(20)]
    alone_at = [at for at, plan in enumerate(plans) if plan.pace and plan.pace.reason is PaceReason.YARDSTICK]
    assert alone_at == [16]
    assert shape(plans[16]) == {1: 1}
    assert all(shape(plan)[1] == 1 for plan in plans)


def test_only_the_uncached_part_of_a_prompt_is_paced() -> None:
    bench = Paced()
    prompt = [7000 + i for i in range(48)]
    bench.submit(9, prompt, max_tokens=1)
    bench.run()
    bench.submit(1, 3, max_tokens=100)
    bench.step()
    bench.submit(2, [*prompt, 1, 2, 3])
    bench.step()
    assert len(bench.tokens[2]) == 1
