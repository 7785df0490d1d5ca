"""Ejection: on what gateways report, never more than half, back by a probe."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.router.core.ejection import FAILURES, FIRST_BACKOFF_S, LONGEST_BACKOFF_S, Ejection, Outcome
from headrace.router.core.eligibility import Verdict
from headrace.router.core.placement import Placed
from headrace.router.core.replica import AttemptKey, EngineId
from headrace.router.core.view import Reading, Record

A = EngineId("a")


def fail(ejection: Ejection, engine_id: str = "a", *, times: int = FAILURES, now: float = 0.0, **changes: Any) -> bool:
    usual = {"outcome": Outcome.TRANSPORT, "placed_at": now, "now": now}
    return any([ejection.report(EngineId(engine_id), 1, **{**usual, **changes}) for _ in range(times)])


def test_consecutive_failures_eject_and_one_answer_between_them_starts_the_count_anew():
    ejection = Ejection()
    assert not fail(ejection, times=FAILURES - 1)
    ejection.report(A, 1, Outcome.OK, placed_at=0.0, now=0.0)
    assert not fail(ejection, times=FAILURES - 1)
    assert fail(ejection, times=1)
    assert ejection.barred({A, EngineId("b")}) == {A}


@pytest.mark.parametrize("outcome", [Outcome.BUSY, Outcome.INVALID, Outcome.CANCELLED, Outcome.UNSAID])
def test_what_says_nothing_of_the_replica_never_counts(outcome: Outcome):
    ejection = Ejection()
    assert not fail(ejection, times=100, outcome=outcome)
    fail(ejection, times=FAILURES - 1)
    fail(ejection, times=1, outcome=outcome)
    assert fail(ejection, times=1), "nor does it clear what was held against it"


def test_never_more_than_half_of_those_that_could_serve_are_out_and_never_the_only_one():
    ejection = Ejection()
    for now, engine_id in enumerate("abcde"):
        fail(ejection, engine_id, now=float(now))
    fleet = [EngineId(e) for e in "abcde"]
    assert ejection.barred(fleet) == {"a", "b"}
    assert ejection.barred(fleet[:3]) == {"a"}
    assert ejection.barred([A]) == frozenset()


def test_a_failed_probe_doubles_the_back_off_up_to_a_limit_and_one_that_answers_lets_it_back():
    ejection = Ejection()
    fail(ejection, now=100.0)
    now = 100.0
    for backoff_s in (FIRST_BACKOFF_S, 2.0, 4.0, 8.0, 16.0, LONGEST_BACKOFF_S, LONGEST_BACKOFF_S):
        assert ejection.due(now + backoff_s - 0.01) == []
        assert ejection.due(now + backoff_s) == [(A, 1)]
        now += backoff_s
        ejection.probed(A, 1, answered=False, now=now)
    ejection.probed(A, 1, answered=True, now=now + LONGEST_BACKOFF_S)
    assert not ejection.barred({A, EngineId("b")})
    assert ejection.due(now + 1000) == []


def test_back_in_service_and_failing_again_stays_out_longer_than_the_first_time():
    ejection = Ejection()
    fail(ejection, now=0.0)
    ejection.probed(A, 1, answered=True, now=1.0)
    fail(ejection, now=2.0)
    assert ejection.ejected_s(A, 2.0) == pytest.approx(2 * FIRST_BACKOFF_S)


def test_failures_of_what_was_placed_before_the_probe_are_old_news():
    ejection = Ejection()
    fail(ejection, now=0.0)
    ejection.probed(A, 1, answered=True, now=5.0)
    assert not fail(ejection, times=10, placed_at=4.9, now=6.0)
    assert fail(ejection, placed_at=5.1, now=6.0)


def test_a_new_life_is_another_replica():
    ejection = Ejection()
    fail(ejection)
    ejection.settle([(A, 2)])
    assert len(ejection) == 0
    assert not ejection.barred({A, EngineId("b")})


def test_an_ejected_replica_gets_nothing_until_it_is_back(a_router, a_replica, an_attempt):
    router = a_router()
    records = tuple(Record(seen=a_replica(e), age_s=0.1, payload=b"") for e in "ab")
    router.observed(Reading(asked_at=0.0, records=records), 0.0)
    for n in range(FAILURES):
        router.ended(AttemptKey("r", n + 1), A, 1, Outcome.ENGINE_FAULT, placed_at=0.0, now=0.0)
    decision = router.place(an_attempt(), 0.1)
    assert isinstance(decision, Placed)
    assert [c.verdict for c in decision.considered] == [Verdict.EJECTED, Verdict.CHOSEN]
    router.ejection.probed(A, 1, answered=True, now=1.0)
    assert router.place(an_attempt("r2"), 1.0).considered[0].verdict is not Verdict.EJECTED
