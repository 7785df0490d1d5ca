"""The fair queue as a state machine, and as a fleet would feel it: everything in virtual time."""

import heapq
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.gateway.core.fair_queue import Bounds, FairQueue, Ticket, Why
from headrace.gateway.core.principal import Priority

BATCH, STANDARD, INTERACTIVE = Priority.BATCH, Priority.STANDARD, Priority.INTERACTIVE
WIDE = Bounds(max_requests=100_000, max_bytes=1 << 40, max_wait_s=1e6, starvation_s=1e6)


def ticket(
    tenant: str = "a",
    priority: Priority = STANDARD,
    *,
    deadline_at: float = math.inf,
    prompt_tokens: int = 100,
    prompt_bytes: int = 0,
    weight: float = 1.0,
    least_s: float = 0.0,
) -> Ticket:
    return Ticket(
        tenant=tenant,
        priority=priority,
        deadline_at=deadline_at,
        prompt_tokens=prompt_tokens,
        prompt_bytes=prompt_bytes,
        weight=weight,
        least_s=least_s,
    )


def drained(queue: FairQueue, now: float = 0.0) -> list[Ticket]:
    order = []
    while head := queue.head(now):
        queue.placed(head, now)
        order.append(head)
    return order


def test_a_tenant_s_own_requests_keep_their_order() -> None:
    queue = FairQueue(WIDE)
    tickets = [ticket() for _ in range(5)]
    for each in tickets:
        queue.push(each, 0)
    assert drained(queue) == tickets


def test_tenants_take_turns_however_many_requests_one_has() -> None:
    queue = FairQueue(WIDE)
    for each in [*[ticket("noisy") for _ in range(6)], ticket("quiet"), ticket("quiet")]:
        queue.push(each, 0)
    assert [each.tenant for each in drained(queue)][:4] == ["noisy", "quiet", "noisy", "quiet"]


def test_turns_are_paid_in_tokens_and_shared_by_weight() -> None:
    queue = FairQueue(WIDE)
    for _ in range(40):
        queue.push(ticket("long", prompt_tokens=300), 0)
        queue.push(ticket("short", prompt_tokens=100), 0)
        queue.push(ticket("heavy", prompt_tokens=100, weight=2.0), 0)
    first = [each.tenant for each in drained(queue)[:30]]
    assert first.count("long") == pytest.approx(30 / 10, abs=1)
    assert first.count("short") == pytest.approx(30 * 3 / 10, abs=1)
    assert first.count("heavy") == pytest.approx(30 * 6 / 10, abs=1)


def test_tokens_of_running_answers_count_twice_and_cached_ones_not() -> None:
    queue = FairQueue(WIDE)
    greedy, modest = ticket("greedy", prompt_tokens=100), ticket("modest", prompt_tokens=250)
    queue.placed(greedy, 0)
    queue.placed(modest, 0)
    for tenant in ("greedy", "modest"):
        queue.push(ticket(tenant), 0)
    assert queue.head(0).tenant == "greedy"  # type: ignore[union-attr]
    queue.charge(greedy, output_tokens=100)
    assert queue.head(0).tenant == "modest"  # type: ignore[union-attr]
    queue.charge(modest, output_tokens=100)
    assert queue.head(0).tenant == "greedy"  # type: ignore[union-attr]
    queue.charge(modest, cached_tokens=200)
    assert queue.head(0).tenant == "modest"  # type: ignore[union-attr]


def test_silence_earns_nothing() -> None:
    queue = FairQueue(WIDE)
    for _ in range(50):
        queue.push(ticket("busy"), 0)
    for _ in range(30):
        queue.placed(queue.head(0), 0)  # type: ignore[arg-type]
    for _ in range(20):
        queue.push(ticket("back again"), 0)
    tenants = [each.tenant for each in drained(queue)]
    assert abs(tenants[:20].count("busy") - tenants[:20].count("back again")) <= 2


def test_work_done_while_there_was_room_for_all_is_not_held_against_a_tenant() -> None:
    queue = FairQueue(WIDE)
    for _ in range(10_000):
        queue.placed(ticket("worked all night"), 0)
    for _ in range(10):
        queue.push(ticket("new"), 0)
        queue.push(ticket("worked all night"), 0)
    assert [each.tenant for each in drained(queue)][:4].count("worked all night") >= 1


def test_urgent_classes_go_first_and_a_starving_one_gets_one_turn() -> None:
    queue = FairQueue(Bounds(starvation_s=5))
    queue.push(ticket("a", BATCH), 0)
    queue.push(ticket("a", BATCH), 0)
    for _ in range(9):
        queue.push(ticket("a", INTERACTIVE), 0)
    queue.push(ticket("a", STANDARD), 0)
    order = []
    for now in (1, 2, 5.5, 5.6, 5.7, 10.7, 10.8):
        head = queue.head(now)
        assert head
        queue.placed(head, now)
        order.append(head.priority)
    assert order == [INTERACTIVE, INTERACTIVE, STANDARD, BATCH, INTERACTIVE, BATCH, INTERACTIVE]


def test_nobody_passes_its_own_class_a_higher_one_or_a_starving_one() -> None:
    queue = FairQueue(Bounds(starvation_s=5))
    assert queue.may_pass(BATCH, 0)
    queue.push(ticket("a", STANDARD), 0)
    assert [queue.may_pass(each, 1) for each in (BATCH, STANDARD, INTERACTIVE)] == [False, False, True]
    assert not queue.may_pass(INTERACTIVE, 6)


def test_a_place_that_would_come_too_late_is_not_waited_for() -> None:
    queue = FairQueue(Bounds(max_wait_s=30))
    late = ticket(deadline_at=10.0, least_s=0.5)
    assert [ended.why for ended in queue.push(late, 9.6)] == [Why.DEADLINE]
    queue.push(late, 9.0)
    patient = ticket()
    queue.push(patient, 9.0)
    assert queue.next_expiry() == 9.5
    assert queue.expire(9.4) == ()
    assert [(ended.ticket, ended.why) for ended in queue.expire(9.5)] == [(late, Why.DEADLINE)]
    assert queue.next_expiry() == 39.0
    assert [(ended.ticket, ended.why) for ended in queue.expire(39.0)] == [(patient, Why.QUEUE_TIMEOUT)]
    assert queue.next_expiry() is None


def test_a_tenant_that_fills_the_queue_shuts_out_itself_and_nobody_else() -> None:
    queue = FairQueue(Bounds(max_requests=4))
    noisy = [ticket("noisy") for _ in range(4)]
    for each in noisy:
        queue.push(each, 0)
    assert [ended.why for ended in queue.push(ticket("noisy"), 0)] == [Why.QUEUE_FULL]

    for turn in (1, 2):
        quiet = ticket("quiet")
        assert [ended.ticket for ended in queue.push(quiet, 0)] == [noisy[-turn]], "the newest of whoever holds most"
    third = ticket("quiet")
    assert [ended.ticket for ended in queue.push(third, 0)] == [third]
    assert len(queue) == 4


def test_a_lower_class_makes_room_for_a_higher_one() -> None:
    queue = FairQueue(Bounds(max_requests=2))
    batch = [ticket("a", BATCH), ticket("b", BATCH)]
    for each in batch:
        queue.push(each, 0)
    assert [ended.ticket.priority for ended in queue.push(ticket("a", INTERACTIVE), 0)] == [BATCH]
    assert [ended.ticket.priority for ended in queue.push(ticket("a", INTERACTIVE), 0)] == [BATCH]
    refused = ticket("c", BATCH)
    assert [ended.ticket for ended in queue.push(refused, 0)] == [refused]


def test_the_bound_in_bytes_is_kept_and_a_prompt_beyond_it_never_waits() -> None:
    queue = FairQueue(Bounds(max_bytes=1000))
    assert queue.push(ticket("a", prompt_bytes=600), 0) == ()
    assert queue.push(ticket("a", prompt_bytes=300), 0) == ()
    assert [ended.why for ended in queue.push(ticket("b", prompt_bytes=1001), 0)] == [Why.QUEUE_FULL]
    assert queue.push(ticket("b", prompt_bytes=100), 0) == ()
    assert queue.bytes == 1000
    displaced = queue.push(ticket("b", prompt_bytes=200), 0)
    assert [ended.ticket.prompt_bytes for ended in displaced] == [300]


Actions = st.lists(
    st.one_of(
        st.tuples(
            st.just("push"),
            st.sampled_from("abc"),
            st.sampled_from(list(Priority)),
            st.integers(0, 50),
            st.sampled_from([0.5, 1.0, 4.0]),
        ),
        st.tuples(st.sampled_from(["place", "cancel", "expire", "charge"]), st.integers(0, 20)),
    ),
    max_size=120,
)


@given(actions=Actions)
@settings(deadline=None, max_examples=150)
def test_no_ticket_is_lost_and_no_bound_is_passed_whatever_happens(actions: list[tuple[object, ...]]) -> None:
    bounds = Bounds(max_requests=6, max_bytes=150, max_wait_s=20, starvation_s=3)
    queue, now = FairQueue(bounds), 0.0
    waiting: list[Ticket] = []
    placed: list[Ticket] = []
    for action in actions:
        now += 0.5
        match action:
            case ("push", str(tenant), Priority() as priority, int(size), float(weight)):
                new = ticket(
                    tenant, priority, prompt_tokens=size, prompt_bytes=size, weight=weight, deadline_at=now + size / 2
                )
                waiting.append(new)
                for ended in queue.push(new, now):
                    waiting.remove(ended.ticket)
            case ("place", _):
                head = queue.head(now)
                assert (head is None) == (not waiting)
                if head:
                    assert not queue.may_pass(head.priority, now)
                    queue.placed(head, now)
                    waiting.remove(head)
                    placed.append(head)
            case ("cancel", int(index)) if waiting:
                gone = waiting.pop(index % len(waiting))
                assert queue.remove(gone)
                assert not queue.remove(gone)
            case ("charge", int(tokens)) if placed:
                queue.charge(placed[-1], output_tokens=tokens)
            case ("expire", _):
                for ended in queue.expire(now):
                    assert ended.ticket.deadline_at <= now or ended.why is Why.QUEUE_TIMEOUT
                    waiting.remove(ended.ticket)
        assert len(queue) == len(waiting) == sum(queue.waiting(each) for each in Priority) <= bounds.max_requests
        assert queue.bytes == sum(each.prompt_bytes for each in waiting) <= bounds.max_bytes
        assert all(each in queue for each in waiting)
    assert {id(each) for each in drained(queue, now)} == {id(each) for each in waiting}
    assert queue.bytes == len(queue) == 0


@given(
    loads=st.lists(st.tuples(st.integers(1, 400), st.integers(0, 400)), min_size=2, max_size=5),
    priority=st.sampled_from(list(Priority)),
)
@settings(deadline=None, max_examples=40)
def test_tenants_that_always_wait_are_served_alike_to_within_one_request(
    loads: list[tuple[int, int]], priority: Priority
) -> None:
    queue = FairQueue(WIDE)
    names = [f"tenant-{index}" for index in range(len(loads))]
    served = dict.fromkeys(names, 0.0)
    for name, (prompt, _) in zip(names, loads, strict=True):
        for _ in range(3):
            queue.push(ticket(name, priority, prompt_tokens=prompt), 0)
    most = max(prompt + 2 * output for prompt, output in loads)
    for _ in range(300):
        head = queue.head(0)
        assert head
        prompt, output = loads[names.index(head.tenant)]
        queue.push(ticket(head.tenant, priority, prompt_tokens=prompt), 0)
        queue.placed(head, 0)
        queue.charge(head, output_tokens=output)
        served[head.tenant] += prompt + 2 * output
        assert max(served.values()) - min(served.values()) <= most


def test_memory_of_tenants_that_came_once_is_bounded() -> None:
    queue = FairQueue(WIDE)
    for number in range(20_000):
        queue.placed(ticket(f"tenant-{number}"), 0)
    assert len(queue._classes[STANDARD].flows) <= 4096


def test_a_tenant_that_waits_is_not_forgotten_with_those_that_came_once_nor_is_its_burst_after_a_long_silence() -> None:
    queue = FairQueue(WIDE)
    waits = [ticket("waits") for _ in range(3)]
    for each in waits:
        queue.push(each, 0)
    for number in range(20_000):
        queue.placed(ticket(f"tenant-{number}"), 0)
    assert drained(queue, 1.0) == waits
    burst = [ticket(tenant) for _ in range(200) for tenant in ("waits", "tenant-0", "tenant-19999")]
    for each in burst:
        queue.push(each, 1e5)
    served = drained(queue, 1e5)
    assert set(served) == set(burst)
    assert len(served) == len(burst)
    assert len(queue) == 0


@dataclass
class Fleet:
    """64 sequences at once; a request takes 0.5 ms per prompt token and 20 ms per token of its answer."""

    queue: FairQueue
    fifo: bool = False
    slots: int = 64
    now: float = 0.0
    refused: int = 0
    first_token_s: dict[str, list[float]] = field(default_factory=dict)
    _events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count)
    _line: list[Ticket] = field(default_factory=list)
    _arrived: dict[Ticket, tuple[float, int]] = field(default_factory=dict)

    def at(self, when: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), act))

    def load(self, tenant: str, per_s: float, until: float, chance: random.Random) -> None:
        when = 0.0
        while (when := when + chance.expovariate(per_s)) < until:
            prompt, output = chance.randint(100, 1000), chance.randint(16, 112)
            self.at(when, lambda prompt=prompt, output=output: self._arrive(tenant, prompt, output))  # type: ignore[misc]

    def run(self) -> None:
        while self._events:
            self.now, _, act = heapq.heappop(self._events)
            act()

    def _arrive(self, tenant: str, prompt: int, output: int) -> None:
        new = ticket(tenant, prompt_tokens=prompt)
        self._arrived[new] = (self.now, output)
        if self.slots and (not self._line if self.fifo else self.queue.may_pass(new.priority, self.now)):
            return self._start(new)
        if self.fifo:
            return self._line.append(new)
        self.refused += len(self.queue.push(new, self.now))

    def _start(self, placed: Ticket) -> None:
        self.slots -= 1
        self.queue.placed(placed, self.now)
        arrived_at, output = self._arrived.pop(placed)
        first = self.now + 0.0005 * placed.prompt_tokens
        self.first_token_s.setdefault(placed.tenant, []).append(first - arrived_at)
        for quarter in range(1, 5):
            self.at(first + 0.02 * output * quarter / 4, lambda: self.queue.charge(placed, output_tokens=output // 4))
        self.at(first + 0.02 * output, self._end)

    def _end(self) -> None:
        self.slots += 1
        head = (self._line.pop(0) if self._line else None) if self.fifo else self.queue.head(self.now)
        if head:
            self._start(head)


def p99(times: list[float]) -> float:
    return sorted(times)[int(0.99 * len(times))]


def felt_by_quiet(*, noise: float, fifo: bool = False) -> float:
    """p99 of the quiet tenant's time to first token; it asks for 6 requests/s of the fleet's 41."""
    fleet = Fleet(FairQueue(Bounds(max_requests=512)), fifo=fifo)
    fleet.load("quiet", 6, 120, random.Random(7))
    if noise:
        fleet.load("noisy", 6 * noise, 120, random.Random(8))
    fleet.run()
    assert len(fleet.first_token_s["quiet"]) > 600
    return p99(fleet.first_token_s["quiet"])


def test_a_noisy_tenant_at_ten_times_the_load_leaves_the_quiet_one_s_first_token_alone() -> None:
    alone = felt_by_quiet(noise=0)
    assert felt_by_quiet(noise=10) <= 1.5 * alone
    assert felt_by_quiet(noise=10, fifo=True) > 10 * alone, "the fleet was not saturated, or the line was not long"
