"""The pure decisions: steps, recovery, budget, quarantine, progress."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.errors import DeadlinePassed, Exhausted, HeadraceError, InvalidRequest, StreamBroken, Unavailable
from headrace.gateway.core.budget import RetryBudget
from headrace.gateway.core.life import Life
from headrace.gateway.core.outbox import Outbox
from headrace.gateway.core.progress import Progress, Trail
from headrace.gateway.core.quarantine import Quarantine
from headrace.gateway.core.recovery import Action, EngineFault, Fault, Situation, client_error, recover
from headrace.gateway.core.slots import Slots
from headrace.gateway.core.step import Finish, FinishReason, OpenSlot, SlotLogprobs, Step, violation

RETRYABLE = [f for f in Fault if f not in (Fault.REQUEST, Fault.DEADLINE)]


def situation(**changes: Any) -> Situation:
    usual: dict[str, Any] = {
        "attempts": 1,
        "max_attempts": 3,
        "tokens_emitted": 0,
        "time_left_s": 10.0,
        "least_time_s": 0.02,
        "budget_allows": True,
    }
    return Situation(**(usual | changes))


@pytest.mark.parametrize("fault", RETRYABLE)
def test_an_engines_fault_is_retried_before_the_first_token_and_migrated_after_it(fault: Fault) -> None:
    assert recover(fault, situation()).action is Action.RETRY
    assert recover(fault, situation(tokens_emitted=1)).action is Action.MIGRATE


@pytest.mark.parametrize(
    ("fault", "changes", "reason"),
    [
        (Fault.REQUEST, {}, "REQUEST"),
        (Fault.DEADLINE, {}, "DEADLINE"),
        (Fault.BROKEN, {"attempts": 3}, "ATTEMPTS_SPENT"),
        (Fault.BROKEN, {"time_left_s": 0.01}, "NO_TIME_LEFT"),
        (Fault.BROKEN, {"budget_allows": False}, "RETRY_BUDGET_SPENT"),
    ],
)
def test_giving_up_has_a_reason(fault: Fault, changes: Any, reason: str) -> None:
    decision = recover(fault, situation(**changes))

    assert (decision.action, decision.reason) == (Action.GIVE_UP, reason)


@pytest.mark.parametrize(
    ("fault", "emitted", "kind"),
    [
        (Fault.BROKEN, 0, Unavailable),
        (Fault.BROKEN, 3, StreamBroken),
        (Fault.QUEUE_FULL, 0, Exhausted),
        (Fault.QUEUE_FULL, 3, StreamBroken),
        (Fault.REQUEST, 0, InvalidRequest),
        (Fault.REQUEST, 3, StreamBroken),
        (Fault.DEADLINE, 0, DeadlinePassed),
        (Fault.DEADLINE, 3, DeadlinePassed),
    ],
)
def test_what_a_client_hears_depends_on_the_fault_and_on_what_it_has(
    fault: Fault, emitted: int, kind: type[HeadraceError]
) -> None:
    assert type(client_error(EngineFault(fault, "why"), tokens_emitted=emitted, retry_after_s=1.0)) is kind


def test_the_retry_budget_is_a_floor_then_a_share_of_the_window() -> None:
    budget = RetryBudget(ratio=0.1, floor=2, window_s=10.0)

    assert spent(budget, now=0.0) == 2
    for n in range(50):
        budget.note_request(1.0 + n / 100)
    assert spent(budget, now=2.0) == 3  # 10 % of 50, less the 2 spent already
    assert budget.allows(10.5)  # the first two have left the window
    assert spent(budget, now=30.0) == 2


def spent(budget: RetryBudget, now: float) -> int:
    count = 0
    while budget.allows(now):
        budget.spend(now)
        count += 1
    return count


def test_a_quarantine_ends_by_itself() -> None:
    quarantine = Quarantine(duration_s=10.0)
    first, second = Life("e-1", 7), Life("e-2", 7)
    quarantine.add(first, now=0.0)
    quarantine.add(second, now=5.0)

    assert quarantine.lives(9.9) == {first, second}
    assert quarantine.lives(10.0) == {second}
    assert quarantine.lives(15.0) == frozenset()


@given(st.lists(st.one_of(st.integers(0, 1000), st.none()), max_size=200))
def test_whatever_the_rhythm_of_taking_every_token_leaves_the_outbox_once_and_in_order(events: Any) -> None:
    outbox, put, taken = Outbox(), [], []
    for now, event in enumerate([*events, None]):
        if event is None:
            taken += outbox.take().token_ids
            assert not outbox
        else:
            outbox.put([event], float(now))
            put.append(event)

    assert taken == put


def test_an_outbox_gives_the_finish_with_the_last_tokens_and_only_once() -> None:
    outbox = Outbox()
    finish = Finish(slot=1, reason=FinishReason.STOP)
    outbox.put([5], 1.0)
    outbox.end(finish)

    batch = outbox.take()

    assert (batch.token_ids, batch.arrived_at, batch.finish) == ([5], [1.0], finish)
    assert outbox.take().finish is None


def step(number: int = 4, slots: Any = (1, 2), token_ids: Any = (5, 6), finishes: Any = (), logprobs: Any = ()) -> Step:
    return Step(number=number, slots=slots, token_ids=token_ids, finishes=finishes, logprobs=logprobs)


def of(slot: int, token_id: int, finite: bool = True) -> SlotLogprobs:
    return SlotLogprobs(slot=slot, token_id=token_id, finite=finite, content="said")


def open_slots() -> dict[int, OpenSlot]:
    return {1: OpenSlot(room=10), 2: OpenSlot(room=1), 3: OpenSlot(room=0), 4: OpenSlot(room=9, logprobs=True)}


def ended(slot: int, reason: FinishReason = FinishReason.STOP) -> Finish:
    return Finish(slot=slot, reason=reason)


@pytest.mark.parametrize(
    ("seen", "why"),
    [
        (step(number=5), "step 5 came where step 4"),
        (step(number=3), "step 3 came where step 4"),
        (step(token_ids=(5,)), "2 slots came with 1 tokens"),
        (step(slots=(1, 2, 1), token_ids=(5, 6, 7)), "the tokens of slot 1 came apart"),
        (step(slots=(1, 2, 2), token_ids=(5, 6, 7)), "slot 2 went beyond its max_tokens"),
        (step(slots=(4, 4), logprobs=(of(4, 5),)), "not those of the tokens"),
        (step(slots=(4, 4), logprobs=(of(4, 6), of(4, 5))), "not those of the tokens"),
        (step(slots=(1, 9)), "slot 9"),
        (step(token_ids=(5, 10)), "token 10"),
        (step(slots=(3,), token_ids=(5,)), "max_tokens"),
        (step(finishes=(ended(9),)), "slot 9 finished"),
        (step(finishes=(ended(1), ended(1))), "finished twice"),
        (step(finishes=(ended(1, FinishReason.UNSPECIFIED),)), "without a reason"),
        (step(logprobs=(of(1, 5),)), "not those of the tokens"),
        (step(slots=(1, 4)), "not those of the tokens"),
        (step(slots=(1, 4), logprobs=(of(4, 5),)), "not those of the tokens"),
        (step(slots=(1, 4), logprobs=(of(4, 6), of(4, 6))), "not those of the tokens"),
        (step(slots=(1, 4), logprobs=(of(4, 6, finite=False),)), "not a number"),
    ],
)
def test_a_step_that_cannot_be_true_is_named(seen: Step, why: str) -> None:
    found = violation(seen, expected=4, open_slots=open_slots(), vocab_size=10)

    assert found is not None
    assert why in found


def test_a_true_step_is_believed() -> None:
    seen = step(slots=(1, 4), logprobs=(of(4, 6),))
    assert violation(seen, expected=4, open_slots=open_slots(), vocab_size=10) is None
    seen = step(finishes=(ended(2), ended(3)))
    assert violation(seen, expected=4, open_slots=open_slots(), vocab_size=10) is None
    seen = step(slots=(1, 1, 4, 4), token_ids=(5, 6, 7, 8), logprobs=(of(4, 7), of(4, 8)), finishes=(ended(1),))

    assert violation(seen, expected=4, open_slots=open_slots(), vocab_size=10) is None


def test_an_attempt_starts_from_the_prompt_and_everything_emitted() -> None:
    progress = Progress(prompt_ids=(1, 2), max_tokens=5, admitted_at=0.0)
    progress.begin_attempt()
    progress.note_tokens([7], [1.0])
    progress.note_tokens([8], [1.5])

    assert (progress.token_ids, progress.tokens_left) == ([1, 2, 7, 8], 3)


def test_the_timings_of_the_design_page_add_up() -> None:
    """Queue 120 ms, prefill 280 ms, 80 tokens 22 ms apart: TTFT 400 ms, total 2,138 ms (worked case 4.1)."""
    progress = Progress(prompt_ids=(1,), max_tokens=80, admitted_at=100.0)
    progress.begin_attempt()
    progress.note_submitted(100.0)
    for n in range(80):
        progress.note_tokens([5], [100.4 + 0.022 * n])
    progress.note_finish(Finish(slot=1, reason=FinishReason.LENGTH, queue_ms=120.0, prefill_ms=280.0))

    timings = progress.timings(100.4 + 0.022 * 79)

    assert timings.queue_ms + timings.prefill_ms == pytest.approx(400.0)
    assert timings.first_token_ms == pytest.approx(400.0)
    assert sum(timings.inter_token_ms) == pytest.approx(1738.0)
    assert timings.total_ms == pytest.approx(2138.0)


def test_the_account_of_a_lost_first_attempt_still_adds_up_to_the_first_token() -> None:
    progress = Progress(prompt_ids=(1,), max_tokens=80, admitted_at=10.0)
    progress.begin_attempt()
    progress.note_submitted(10.1)
    progress.note_tokens([5], [10.5])
    progress.begin_attempt()
    progress.note_submitted(11.0)
    progress.note_tokens([6], [11.2])
    progress.note_finish(Finish(slot=1, reason=FinishReason.LENGTH, queue_ms=1.0, prefill_ms=2.0))

    timings = progress.timings(11.3)

    assert (timings.queue_ms, timings.prefill_ms) == (pytest.approx(100.0), pytest.approx(400.0))
    assert timings.inter_token_ms == (pytest.approx(700.0),)


def test_an_answer_without_a_token_spent_its_time_waiting() -> None:
    timings = Progress(prompt_ids=(1,), max_tokens=8, admitted_at=1.0).timings(3.0)

    assert (timings.queue_ms, timings.first_token_ms, timings.total_ms) == (2000.0, 0.0, 2000.0)


@given(st.lists(st.one_of(st.integers(1, 16), st.integers(0, 200).map(lambda n: -n)), max_size=120))
def test_slots_of_one_request_are_a_range_that_nobody_else_has(moves: list[int]) -> None:
    """A positive move takes that many, any other gives one back."""
    slots, held = Slots(), []
    most = 0
    for move in moves:
        if move > 0:
            taken = slots.take(move)
            assert len(taken) == move
            assert not set(taken) & set(held)
            held += taken
            most = max(most, len(held))
        elif held:
            slots.give(held.pop(move % len(held)))
    assert not held or max(held) <= 16 * (most + 1)


def test_slots_are_used_again_alone_and_in_ranges() -> None:
    slots = Slots()
    assert [slots.take(1), slots.take(3), slots.take(1)] == [range(1, 2), range(2, 5), range(5, 6)]
    for slot in (3, 2, 4, 1):
        slots.give(slot)
    assert slots.take(4) == range(1, 5)
    slots.give(5)
    assert slots.take(3) == range(5, 8)  # the last free one, and two new ones
    assert slots.take(1) == range(8, 9)


def test_an_outbox_keeps_a_token_and_its_log_probabilities_together() -> None:
    outbox = Outbox()
    for token in (7, 8):
        outbox.put([token], 1.0, [f"of {token}"])
    assert outbox.take().logprobs == ["of 7", "of 8"]
    assert outbox.take().logprobs == []


def test_attempts_of_a_request_s_answers_are_numbered_together_and_its_engines_excluded_for_all() -> None:
    trail = Trail()
    first, second = (Progress(prompt_ids=(1,), max_tokens=5, admitted_at=0.0, index=i, trail=trail) for i in range(2))
    assert [first.trail.next_attempt(), second.trail.next_attempt()] == [1, 2]
    first.trail.excluded.add(Life("e-1", 7))
    assert second.trail.excluded == {Life("e-1", 7)}


def test_cached_tokens_are_those_of_the_attempt_with_the_first_token_and_never_more_than_the_prompt() -> None:
    progress = Progress(prompt_ids=(1, 2, 3), max_tokens=8, admitted_at=0.0)
    progress.begin_attempt()
    progress.note_tokens([5], [1.0])
    progress.note_finish(Finish(slot=1, reason=FinishReason.ERROR, cached_tokens=2, prompt_logprobs=("a", "b")))
    progress.begin_attempt()
    progress.note_finish(Finish(slot=1, reason=FinishReason.LENGTH, cached_tokens=3))
    assert (progress.cached_tokens, progress.prompt_logprobs) == (2, ("a", "b"))
