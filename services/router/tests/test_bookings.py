"""Bookings: they bridge the gap to the heartbeat that shows them, and end by themselves."""

from __future__ import annotations

from headrace.router.core.bookings import ARRIVAL_S, Booking, Bookings
from headrace.router.core.estimate import NOTHING_BOOKED, Booked
from headrace.router.core.replica import AttemptKey, EngineId
from headrace.router.core.view import Sighting

A, B = EngineId("a"), EngineId("b")
LONGEST_S = 10.0


def seen(replica, written_at: float) -> dict[EngineId, Sighting]:
    return {replica.engine_id: Sighting(seen=replica, written_at=written_at, payload=b"")}


def booking(engine_id: EngineId, prompt_tokens: int) -> Booking:
    return Booking(engine_id=engine_id, epoch=1, sequences=1, prompt_tokens=prompt_tokens, made_at=100.0)


def booked() -> Bookings:
    bookings = Bookings(longest_s=LONGEST_S)
    bookings.book(AttemptKey("r1", 1), booking(A, 140))
    bookings.book(AttemptKey("r2", 1), booking(A, 60))
    return bookings


def test_bookings_of_a_replica_add_up(a_replica):
    bookings = booked()
    assert bookings.on(A) == Booked(sequences=2, prompt_tokens=200)
    assert bookings.on(B) == NOTHING_BOOKED


def test_a_heartbeat_from_before_the_request_could_arrive_does_not_end_a_booking(a_replica):
    bookings = booked()
    bookings.settle(seen(a_replica("a"), 100.0 + ARRIVAL_S / 2), 100.2)
    assert len(bookings) == 2


def test_the_heartbeat_that_shows_the_request_ends_its_booking(a_replica):
    bookings = booked()
    bookings.settle(seen(a_replica("a"), 100.0 + ARRIVAL_S), 100.2)
    assert bookings.on(A) == NOTHING_BOOKED


def test_bookings_stay_while_heartbeats_are_missing_and_end_at_the_freshness_bound(a_replica):
    bookings = booked()
    bookings.settle(seen(a_replica("a"), 99.0), 109.9)
    assert len(bookings) == 2
    bookings.settle(seen(a_replica("a"), 99.0), 110.0)
    assert len(bookings) == 0


def test_a_restarted_or_vanished_replica_owes_nothing(a_replica):
    restarted, vanished = booked(), booked()
    restarted.settle(seen(a_replica("a", epoch=2), 100.0), 100.1)
    vanished.settle({}, 100.1)
    assert (len(restarted), len(vanished)) == (0, 0)


def test_release_ends_one_attempt_early_and_knows_nothing_of_strangers(a_replica):
    bookings = booked()
    assert bookings.release(AttemptKey("r1", 1))
    assert not bookings.release(AttemptKey("r1", 1))
    assert not bookings.release(AttemptKey("r2", 2))
    assert bookings.on(A) == Booked(sequences=1, prompt_tokens=60)


def test_booking_an_attempt_again_moves_it(a_replica):
    bookings = booked()
    bookings.book(AttemptKey("r1", 1), booking(B, 140))
    assert (bookings.on(A).sequences, bookings.on(B).sequences) == (1, 1)
