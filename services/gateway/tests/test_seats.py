"""Who is beyond its fair share of the fleet's seats, and must leave the reserve to others."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.gateway.core.fair_queue import Bounds, FairQueue, Ticket
from headrace.gateway.core.principal import Priority
from headrace.gateway.core.seats import REMEMBERED_S, Seats


def ticket(tenant: str, *, weight: float = 1.0, sequences: int = 1, priority: Priority = Priority.STANDARD) -> Ticket:
    return Ticket(tenant=tenant, priority=priority, deadline_at=math.inf, weight=weight, sequences=sequences)


def seats(of: int = 16, reserve: int = 2) -> Seats:
    found = Seats()
    found.fleet(of, reserve)
    return found


def taken(found: Seats, tenant: str, count: int, *, now: float = 0.0, weight: float = 1.0) -> list[Ticket]:
    tickets = [ticket(tenant, weight=weight) for _ in range(count)]
    for each in tickets:
        found.came(each, now)
        found.took(each)
        found.left(each)
    return tickets


def test_a_tenant_that_is_alone_has_every_seat() -> None:
    found = seats()
    taken(found, "noisy", 40)
    assert not found.beyond_share(ticket("noisy"), 0)
    assert found.may_take(ticket("noisy"), 0)


def test_beside_others_a_tenant_beyond_its_share_leaves_the_reserve_free_and_others_take_it() -> None:
    found = seats()
    taken(found, "quiet", 1)
    taken(found, "noisy", 12)
    assert found.may_take(ticket("noisy"), 0), "13 of 14"
    taken(found, "noisy", 1)
    assert not found.may_take(ticket("noisy"), 0)
    assert found.may_take(ticket("quiet"), 0)
    assert found.may_take(ticket("third"), 0), "its first seat is within anybody's share"


def test_within_the_share_nobody_leaves_anything() -> None:
    found = seats()
    taken(found, "a", 7)
    taken(found, "b", 8)
    assert found.may_take(ticket("a"), 0)
    assert not found.may_take(ticket("b"), 0)


def test_shares_are_by_weight() -> None:
    found = seats()
    taken(found, "heavy", 11, weight=3.0)
    taken(found, "light", 3)
    assert not found.beyond_share(ticket("heavy", weight=3.0), 0), "12 of 16"
    taken(found, "heavy", 1, weight=3.0)
    assert found.beyond_share(ticket("heavy", weight=3.0), 0)
    assert not found.beyond_share(ticket("light"), 0)


def test_a_tenant_is_about_for_a_minute_after_it_was_heard_of() -> None:
    found = seats()
    for each in taken(found, "quiet", 1, now=0.0):
        found.gave(each)
    taken(found, "noisy", 15, now=1.0)
    assert not found.may_take(ticket("noisy"), REMEMBERED_S - 1)
    assert found.may_take(ticket("noisy"), REMEMBERED_S + 1)


def test_who_waits_is_about_and_who_has_given_up_is_forgotten_in_time() -> None:
    found, waits = seats(), ticket("quiet")
    taken(found, "noisy", 15)
    found.came(waits, 0)
    assert not found.may_take(ticket("noisy"), 10 * REMEMBERED_S)
    found.left(waits)
    assert found.may_take(ticket("noisy"), 10 * REMEMBERED_S)


def test_while_nothing_is_held_anybody_may_try_because_no_answer_would_end_and_tell_it_to() -> None:
    found = seats(of=4, reserve=4)
    found.came(ticket("quiet"), 0)
    noisy = [ticket("noisy", sequences=9)]
    assert found.may_take(noisy[0], 0)
    found.asks(1)
    taken(found, "noisy", 4)
    assert not found.may_take(noisy[0], 0)


def test_until_a_router_has_said_how_many_there_are_nobody_is_held_back() -> None:
    found = Seats()
    taken(found, "quiet", 1)
    taken(found, "noisy", 500)
    assert found.may_take(ticket("noisy"), 0)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from([0.5, 1.0, 3.0]), st.integers(1, 4), st.booleans())))
@settings(deadline=None, max_examples=100)
def test_what_was_taken_and_given_back_leaves_nothing(actions: list[tuple[str, float, int, bool]]) -> None:
    found, held = seats(), []
    for tenant, weight, sequences, ends in actions:
        each = ticket(tenant, weight=weight, sequences=sequences)
        found.came(each, 0)
        found.took(each)
        found.left(each)
        held.append(each)
        if ends:
            found.gave(held.pop(0))
    for each in held:
        found.gave(each)
    assert not found._present
    assert not found._held
    assert (found._total, found._weights) == (0, pytest.approx(0))


def test_a_ticket_that_may_not_be_placed_stands_in_nobody_s_way_within_its_class() -> None:
    queue = FairQueue(Bounds())
    blocked, other, urgent = ticket("noisy"), ticket("quiet"), ticket("noisy", priority=Priority.INTERACTIVE)
    queue.push(blocked, 0)

    def may(each: Ticket) -> bool:
        return each.tenant != "noisy"

    assert queue.head(0, may) is None
    assert queue.may_pass(Priority.STANDARD, 0, may)
    assert not queue.may_pass(Priority.BATCH, 0, may), "classes stay strict"
    queue.push(other, 0)
    assert queue.head(0, may) is other
    assert not queue.may_pass(Priority.STANDARD, 0, may)
    queue.push(urgent, 0)
    assert queue.head(0, may) is None, "classes stay strict"


def test_a_starving_class_of_which_nobody_may_be_placed_holds_up_nobody() -> None:
    queue = FairQueue(Bounds(starvation_s=5))
    queue.push(ticket("noisy", priority=Priority.BATCH), 0)
    quiet = ticket("quiet")
    queue.push(quiet, 8)
    assert queue.head(9, lambda each: each.tenant != "noisy") is quiet
