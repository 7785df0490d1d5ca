"""The view: ages by Redis time, then by our own clock; what an outage may and may not take away."""

from __future__ import annotations

import pytest

from headrace.router.core.replica import EngineId, Phase, Unreadable
from headrace.router.core.view import REBUILD_S, Reading, Record, State, View, after_failure, after_reading

BOUND_S = 10.0
A, B = EngineId("a"), EngineId("b")


def reading(asked_at: float, *records: tuple[object, float]) -> Reading:
    return Reading(
        asked_at=asked_at,
        records=tuple(Record(seen=seen, age_s=age_s, payload=b"") for seen, age_s in records),  # type: ignore[arg-type]
    )


def test_an_age_starts_from_redis_time_and_grows_by_the_local_clock(a_replica):
    view = after_reading(View(), reading(100.0, (a_replica(), 0.2)))
    assert view.sightings[A].age_s(100.0) == pytest.approx(0.2)
    assert view.sightings[A].age_s(103.0) == pytest.approx(3.2)


def test_without_redis_replicas_turn_stale_by_themselves_at_the_bound(a_replica):
    view = after_failure(after_reading(View(), reading(100.0, (a_replica(), 0.2))))
    assert view.degraded
    assert view.states(109.7, lambda deployment: BOUND_S) == {A: State.READY}
    assert view.states(109.9, lambda deployment: BOUND_S) == {A: State.STALE}


def test_a_redis_clock_set_back_does_not_make_a_known_heartbeat_younger(a_replica):
    view = after_reading(View(), reading(100.0, (a_replica(), 4.0)))
    view = after_reading(view, reading(101.0, (a_replica(), -30.0)))
    assert view.sightings[A].age_s(101.0) == pytest.approx(5.0)


def test_a_reading_that_brings_nothing_new_leaves_the_sightings_as_they_are(a_replica):
    a, b = a_replica(), a_replica(engine_id="b")
    view = after_reading(View(), reading(100.0, (a, 0.25), (b, 0.125)))
    again = after_reading(view, reading(100.5, (a, 0.75), (b, 0.5)))
    assert again.sightings is view.sightings
    assert (again.read_at, again.sightings[A].age_s(100.5)) == (100.5, 0.75)
    assert after_reading(again, reading(101.0, (a, 1.25))).sightings.keys() == {A}
    older = after_reading(again, reading(101.0, (a, 1.5), (b, 1.0)))
    assert older.sightings[A].age_s(101.0) == 1.5, "no age is understated"


def test_a_new_heartbeat_makes_a_replica_young_again(a_replica):
    view = after_reading(View(), reading(100.0, (a_replica(), 4.0)))
    view = after_reading(view, reading(101.0, (a_replica(sequence=2), 0.1)))
    assert view.sightings[A].age_s(101.0) == pytest.approx(0.1)


def test_a_heartbeat_from_the_future_counts_as_just_written(a_replica):
    assert after_reading(View(), reading(100.0, (a_replica(), -5.0))).sightings[A].age_s(100.0) == 0.0


def test_a_replica_taken_off_the_board_is_gone_at_once(a_replica):
    view = after_reading(View(), reading(100.0, (a_replica("a"), 0.1), (a_replica("b"), 0.1)))
    assert after_reading(view, reading(100.1, (a_replica("b"), 0.2))).sightings.keys() == {B}


def test_a_redis_that_comes_back_empty_does_not_take_the_fleet_away_before_it_can_write_again(a_replica):
    draining = a_replica("b", phase=Phase.DRAINING)
    view = after_reading(View(), reading(100.0, (a_replica("a"), 0.1), (draining, 0.1)))
    back = after_reading(after_failure(view), reading(103.0))
    assert back.sightings.keys() == {A}, "the draining one has left for good"
    assert back.sightings[A].age_s(103.0) == pytest.approx(3.1), "and the kept one has grown older"
    assert after_reading(back, reading(103.0 + REBUILD_S / 2)).sightings.keys() == {A}
    assert not after_reading(back, reading(103.0 + REBUILD_S)).sightings


def test_an_unreadable_heartbeat_replaces_the_readable_one_before_it(a_replica):
    view = after_reading(View(), reading(100.0, (a_replica(), 0.1)))
    broken = Unreadable(engine_id=A, epoch=1, sequence=2, why="not a heartbeat message")
    assert after_reading(view, reading(100.1, (broken, 0.0))).states(100.1, lambda deployment: BOUND_S) == {
        A: State.UNREADABLE
    }
