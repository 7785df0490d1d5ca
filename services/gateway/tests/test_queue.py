"""Requests that wait for a fleet of a few places: tasks, turns, cancellation and refusals."""

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import uvloop

from headrace.base.errors import DeadlinePassed, Exhausted, HeadraceError, Unavailable
from headrace.gateway.core.fair_queue import Bounds, Ticket
from headrace.gateway.core.principal import Priority
from headrace.gateway.queue import WAITING, RequestQueue, RequestQueues
from headrace.testkit.eventually import eventually


@dataclass
class Fleet:
    """What `place` asks: so many places, and a hint for those who come when all are taken."""

    free: int
    hint_s: float | None = 60.0
    asked: int = 0
    given: list[str] = field(default_factory=list)

    def asked_by(self, name: str) -> Callable[[], "asyncio.Future[str]"]:
        async def place() -> str:
            self.asked += 1
            await asyncio.sleep(0)
            if not self.free:
                raise Exhausted("all busy", reason="SATURATED", retry_after_s=self.hint_s)
            self.free -= 1
            self.given.append(name)
            return f"place of {name}"

        return place  # type: ignore[return-value]


def ticket(tenant: str = "a", priority: Priority = Priority.STANDARD, *, within_s: float = math.inf) -> Ticket:
    return Ticket(tenant=tenant, priority=priority, deadline_at=time.monotonic() + within_s, prompt_tokens=10)


@pytest.fixture
def queue() -> RequestQueue:
    return RequestQueue(Bounds(max_requests=4, max_wait_s=30))


async def waiting(queue: RequestQueue, fleet: Fleet, *tickets: Ticket) -> list[asyncio.Task[str]]:
    """Requests that have taken their place in the line, in this order."""
    tasks = []
    for each in tickets:
        before = len(queue)
        tasks.append(asyncio.create_task(queue.placed(each, fleet.asked_by(each.tenant))))
        await eventually(lambda before=before: len(queue) == before + 1, every_s=0.001)
    return tasks


async def ended(tasks: list[asyncio.Task[str]]) -> list[str | BaseException]:
    async with asyncio.timeout(5):
        return await asyncio.gather(*tasks, return_exceptions=True)


async def cancelled(tasks: list[asyncio.Task[str]]) -> None:
    for task in tasks:
        task.cancel()
    await ended(tasks)


def waiting_in_metrics() -> float:
    return sum(WAITING.labels(each.name.lower())._value.get() for each in Priority)


async def test_while_nobody_waits_a_request_is_placed_at_once_and_nothing_is_added(queue: RequestQueue) -> None:
    async def place() -> int:
        return 7

    tickets = [ticket(f"tenant-{n % 50}") for n in range(2000)]
    started = time.perf_counter()
    for each in tickets:
        assert await queue.placed(each, place) == 7
    assert (time.perf_counter() - started) / len(tickets) < 100e-6, "3 µs on a quiet machine"
    assert len(queue) == 0


async def test_a_full_fleet_makes_wait_and_room_is_given_in_turn(queue: RequestQueue) -> None:
    fleet = Fleet(free=0)
    tasks = await waiting(queue, fleet, ticket("a"), ticket("a"), ticket("b"))
    asked = fleet.asked
    fleet.free = 1
    queue.note_room()
    await eventually(lambda: fleet.given == ["a"], every_s=0.001)
    assert fleet.asked <= asked + 2, "one place was free: the next was asked for once, no more"
    fleet.free = 5
    queue.note_room()
    assert await ended(tasks) == ["place of a", "place of a", "place of b"]
    assert fleet.given == ["a", "b", "a"]
    assert waiting_in_metrics() == 0


async def test_a_newcomer_of_the_same_class_overtakes_nobody_and_one_of_a_higher_class_may(queue: RequestQueue) -> None:
    fleet = Fleet(free=0)
    tasks = await waiting(queue, fleet, ticket("first"))
    fleet.free = 1
    tasks += await waiting(queue, fleet, ticket("second"))
    assert fleet.given == []
    assert await queue.placed(ticket("urgent", Priority.INTERACTIVE), fleet.asked_by("urgent")) == "place of urgent"
    await cancelled(tasks)


async def test_without_any_news_the_router_is_asked_again_when_it_said(queue: RequestQueue) -> None:
    fleet = Fleet(free=0, hint_s=0.05)
    tasks = await waiting(queue, fleet, ticket())
    asked = fleet.asked
    await eventually(lambda: fleet.asked > asked + 1)
    fleet.free = 1
    assert await ended(tasks) == ["place of a"]


async def test_room_that_appears_while_a_place_is_being_asked_for_is_not_missed(queue: RequestQueue) -> None:
    asking, go_on = asyncio.Event(), asyncio.Event()
    tries = 0

    async def place() -> str:
        nonlocal tries
        tries += 1
        if tries == 1:
            asking.set()
            await go_on.wait()
            raise Exhausted("busy when it was asked", reason="SATURATED", retry_after_s=60)
        return "placed"

    task = asyncio.create_task(queue.placed(ticket(), place))
    await asking.wait()
    queue.note_room()
    go_on.set()
    async with asyncio.timeout(0.5):
        assert await task == "placed"


async def test_cancelling_in_any_state_leaves_nothing_and_passes_the_turn_on(queue: RequestQueue) -> None:
    fleet = Fleet(free=0)
    asking = asyncio.Event()

    async def never() -> str:
        asking.set()
        await asyncio.sleep(60)
        raise AssertionError

    async def first_saturated() -> str:
        if not asking.is_set():
            asking.set()
            raise Exhausted("busy", reason="SATURATED", retry_after_s=60)
        return await never()

    stuck = asyncio.create_task(queue.placed(ticket("stuck"), first_saturated))
    await eventually(lambda: len(queue) == 1, every_s=0.001)
    others = await waiting(queue, fleet, ticket("b"), ticket("c"))
    await cancelled([others[0]])
    assert len(queue) == 2

    asking.clear()
    asking.set()
    fleet.free = 1
    queue.note_room()  # the turn is granted to `stuck`, and it is cancelled before or while it uses it
    await cancelled([stuck])
    assert await ended([others[1]]) == ["place of c"]
    assert len(queue) == 0
    assert waiting_in_metrics() == 0
    assert not queue._turns
    assert queue._retry.at == math.inf
    assert queue._expiry.at == math.inf


async def test_an_error_of_its_own_ends_one_request_and_the_next_has_its_turn(queue: RequestQueue) -> None:
    fleet = Fleet(free=0)

    async def broken() -> str:
        if fleet.free:
            raise Unavailable("no router", reason="NO_ROUTER")
        raise Exhausted("busy", reason="SATURATED", retry_after_s=60)

    first = asyncio.create_task(queue.placed(ticket("a"), broken))
    await eventually(lambda: len(queue) == 1, every_s=0.001)
    others = await waiting(queue, fleet, ticket("b"))
    fleet.free = 1
    queue.note_room()
    error, place = await ended([first, *others])
    assert isinstance(error, Unavailable)
    assert place == "place of b"
    fleet.free = 1
    with pytest.raises(Unavailable):
        await queue.placed(ticket("a"), broken)
    assert len(queue) == 0


async def test_a_deadline_ends_the_wait_at_once_and_so_does_the_longest_wait(queue: RequestQueue) -> None:
    fleet = Fleet(free=0)
    impatient = RequestQueue(Bounds(max_wait_s=0.1))
    started = time.monotonic()
    late, timed_out = await asyncio.gather(
        queue.placed(ticket(within_s=0.05), fleet.asked_by("a")),
        impatient.placed(ticket(), fleet.asked_by("a")),
        return_exceptions=True,
    )
    assert 0.1 <= time.monotonic() - started < 1
    assert isinstance(late, DeadlinePassed)
    assert isinstance(timed_out, Exhausted)
    assert timed_out.reason == "QUEUE_TIMEOUT"
    assert timed_out.retry_after_s
    assert len(queue) == len(impatient) == 0


async def test_a_full_queue_refuses_with_an_estimate_and_makes_room_for_who_holds_least(queue: RequestQueue) -> None:
    fleet = Fleet(free=0)
    tasks = await waiting(queue, fleet, *[ticket("noisy") for _ in range(4)])
    with pytest.raises(Exhausted) as refusal:
        await queue.placed(ticket("noisy"), fleet.asked_by("noisy"))
    assert refusal.value.reason == "QUEUE_FULL"
    assert refusal.value.retry_after_s is not None
    assert 0.1 <= refusal.value.retry_after_s <= 30

    quiet = asyncio.create_task(queue.placed(ticket("quiet"), fleet.asked_by("quiet")))
    (displaced,) = await ended([tasks.pop()])
    assert isinstance(displaced, Exhausted)
    assert displaced.reason == "QUEUE_FULL"
    fleet.free = 10
    queue.note_room()
    assert len(await ended([*tasks, quiet])) == 4
    assert fleet.given[1] == "quiet"


async def test_one_deployment_s_full_queue_holds_up_no_other() -> None:
    queues = RequestQueues(Bounds(max_requests=1))
    full, free = Fleet(free=0), Fleet(free=1)
    tasks = await waiting(queues.of("full"), full, ticket())
    assert await queues.of("free").placed(ticket(), free.asked_by("a")) == "place of a"
    await cancelled(tasks)


async def test_every_one_of_many_that_come_and_go_is_placed_or_told_why() -> None:
    queue = RequestQueue(Bounds(max_requests=60, max_wait_s=30))
    fleet = Fleet(free=5, hint_s=0.02)
    outcomes: dict[str, int] = {}

    async def request(number: int) -> None:
        within_s = 0.05 if number % 7 == 0 else math.inf
        priority = list(Priority)[number % 3]
        try:
            await queue.placed(ticket(f"tenant-{number % 5}", priority, within_s=within_s), fleet.asked_by("x"))
            await asyncio.sleep(0.002)
            fleet.free += 1
            queue.note_room()
            outcome = "placed"
        except HeadraceError as error:
            outcome = error.reason
        outcomes[outcome] = outcomes.get(outcome, 0) + 1

    tasks = [asyncio.create_task(request(number)) for number in range(300)]
    await asyncio.sleep(0.01)
    for task in tasks[::11]:
        task.cancel()
    async with asyncio.timeout(10):
        results = await asyncio.gather(*tasks, return_exceptions=True)
    gone = sum(isinstance(result, asyncio.CancelledError) for result in results)
    assert sum(outcomes.values()) + gone == 300
    assert set(outcomes) <= {"placed", "QUEUE_FULL", "DEADLINE_EXCEEDED"}
    assert outcomes["placed"] >= 50
    assert len(queue) == 0
    assert waiting_in_metrics() == 0


async def test_beside_others_a_tenant_beyond_its_share_waits_for_the_reserve_and_is_woken_when_an_answer_ends(
    queue: RequestQueue,
) -> None:
    fleet = Fleet(free=4)
    queue.note_fleet(seats=4, reserve=1)
    held = [ticket("noisy") for _ in range(3)]
    for each in held:
        await queue.placed(each, fleet.asked_by("noisy"))
        queue.note_taken(each)
    await queue.placed(ticket("quiet"), fleet.asked_by("quiet"))
    fleet.free = 1
    asked = fleet.asked
    tasks = await waiting(queue, fleet, ticket("noisy"))
    assert fleet.asked == asked, "it does not even ask"
    assert await queue.placed(ticket("quiet"), fleet.asked_by("quiet")) == "place of quiet"
    fleet.free = 1
    queue.note_room(held[0])
    assert await ended(tasks) == ["place of noisy"]


async def test_a_request_within_its_share_is_not_held_up_by_one_that_the_router_refused(queue: RequestQueue) -> None:
    fleet = Fleet(free=0)
    tasks = await waiting(queue, fleet, ticket("noisy"))
    queue.note_fleet(seats=2, reserve=1)
    taken = [ticket("noisy"), ticket("noisy")]
    for each in taken:
        queue.note_taken(each)
    fleet.free = 1
    assert await queue.placed(ticket("quiet"), fleet.asked_by("quiet")) == "place of quiet"
    await cancelled(tasks)


def test_waits_that_end_within_a_millisecond_of_each_other_end_on_the_gateway_s_own_loop() -> None:
    async def all_of_them() -> list[str | BaseException]:
        queue, fleet = RequestQueue(Bounds(max_requests=100)), Fleet(free=0)
        late = [queue.placed(ticket(within_s=0.0002 * n), fleet.asked_by("a")) for n in range(1, 60)]
        return await asyncio.gather(*late, return_exceptions=True)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        ended = runner.run(all_of_them())
    assert {type(each) for each in ended} == {DeadlinePassed}
