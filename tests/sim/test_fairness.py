"""A noisy tenant beside a quiet one, in virtual time: the queue's and the seats' own code, an engine that is a formula.

As in ``tests/bench/fairness.py``: 32 seats, steps of 20 ms for one sequence that lengthen by 2 % of that with each
further one, answers of 10 to 30 tokens. Here no process is in another's way: what is left is the order and the steps.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from headrace.base.saturation import Saturation
from headrace.gateway.core.fair_queue import Bounds, FairQueue, Ticket
from headrace.gateway.core.principal import Priority
from headrace.gateway.core.seats import Seats

SEATS, STEP_S, LONGER, PROMPT_S = 32, 0.02, 0.02, 0.0015
QUIET_PER_S, NOISE_FROM_S, UNTIL_S = 6.67, 1.0, 80.0
PLACING_S = 0.004
"""From a turn until the engine has the request."""


@dataclass(eq=False)
class Running:
    """One sequence at the engine."""

    ticket: Ticket
    tokens: int
    arrived_at: float
    emitted: int = 0


@dataclass
class World:
    """One gateway and one engine; `seats` are those it has, of which `reserve` are kept."""

    seats: int
    reserve: int
    now: float = 0.0
    fair: FairQueue = field(default_factory=lambda: FairQueue(Bounds(max_requests=512)))
    first_token_s: dict[str, list[float]] = field(default_factory=dict)
    batches: list[int] = field(default_factory=list)
    served: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._known = Seats()
        self._known.fleet(self.seats, self.reserve)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._asked: dict[Ticket, Running] = {}
        self._waiting: deque[Running] = deque()
        self._running: list[Running] = []
        self._under_way = 0
        self._stepping = False

    def at(self, when: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), act))

    def load(self, tenant: str, per_s: float, chance: random.Random, from_s: float = 0.0) -> None:
        when = from_s
        while (when := when + chance.expovariate(per_s)) < UNTIL_S:
            tokens = chance.randint(10, 30)
            self.at(when, lambda tokens=tokens: self._arrive(tenant, tokens))  # type: ignore[misc]

    def run(self) -> None:
        while self._events:
            self.now, _, act = heapq.heappop(self._events)
            act()

    def _may(self, ticket: Ticket) -> bool:
        """As the queue asks; and no more at the engine than it may have running and waiting."""
        return self._under_way < 2 * self.seats and self._known.may_take(ticket, self.now)

    def _arrive(self, tenant: str, tokens: int) -> None:
        ticket = Ticket(tenant=tenant, priority=Priority.STANDARD, deadline_at=math.inf, prompt_tokens=6)
        self._asked[ticket] = Running(ticket=ticket, tokens=tokens, arrived_at=self.now)
        self._known.came(ticket, self.now)
        if self._may(ticket) and self.fair.may_pass(ticket.priority, self.now, self._may):
            return self._place(ticket)
        for ended in self.fair.push(ticket, self.now):
            self._known.left(ended.ticket)
            del self._asked[ended.ticket]

    def _place(self, ticket: Ticket) -> None:
        self.fair.placed(ticket, self.now)
        self._known.took(ticket)
        self._known.left(ticket)
        self._under_way += 1
        self.at(self.now + PLACING_S, lambda: self._submit(self._asked.pop(ticket)))

    def _submit(self, sequence: Running) -> None:
        self._waiting.append(sequence)
        if not self._stepping:
            self._step()

    def _step(self) -> None:
        decodes, prompts = len(self._running), 0
        while self._waiting and len(self._running) < self.seats:
            self._running.append(self._waiting.popleft())
            prompts += 1
        self._stepping = bool(self._running)
        if self._stepping:
            self.batches.append(len(self._running))
            decode_s = STEP_S * (1 + LONGER * (decodes - 1)) if decodes else 0.0
            self.at(self.now + decode_s + PROMPT_S * prompts, self._stepped)

    def _stepped(self) -> None:
        for sequence in list(self._running):
            tenant = sequence.ticket.tenant
            sequence.emitted += 1
            self.fair.charge(sequence.ticket, output_tokens=1)
            if sequence.emitted == 1:
                self.first_token_s.setdefault(tenant, []).append(self.now - sequence.arrived_at)
            if sequence.emitted == sequence.tokens:
                self._running.remove(sequence)
                self._known.gave(sequence.ticket)
                self._under_way -= 1
                self.served[tenant] = self.served.get(tenant, 0) + 1
        self._step()
        while (head := self.fair.head(self.now, self._may)) is not None:
            self._place(head)


def world(noise_per_s: float, *, seed: int, reserve: int | None = None) -> World:
    """What came of it; the quiet tenant was there first."""
    found = World(seats=SEATS, reserve=Saturation().reserved(SEATS) if reserve is None else reserve)
    found.load("quiet", QUIET_PER_S, random.Random(seed))
    if noise_per_s:
        found.load("noisy", noise_per_s, random.Random(-seed), NOISE_FROM_S)
    found.run()
    return found


def p99(times: list[float]) -> float:
    return sorted(times)[int(0.99 * len(times))]


CAPACITY = SEATS / (20 * STEP_S * (1 + LONGER * (SEATS - 1)))
"""Requests per second that the engine can serve."""

NOISES = {"ten times the quiet one's rate": 10 * QUIET_PER_S, "ten times the capacity": 10 * CAPACITY}


@pytest.mark.parametrize("noise_per_s", NOISES.values(), ids=NOISES)
def test_a_noisy_tenant_leaves_the_quiet_one_s_first_token_within_half_as_long_again(noise_per_s: float) -> None:
    assert noise_per_s + QUIET_PER_S > 1.4 * CAPACITY, "otherwise it is no crowd"
    alone, beside = (
        [time for seed in (1, 2, 3) for time in world(noise, seed=seed).first_token_s["quiet"]]
        for noise in (0, noise_per_s)
    )
    assert len(beside) == len(alone) > 1000
    assert p99(beside) <= 1.5 * p99(alone)


def test_order_alone_does_not_do_it_there_is_nobody_to_go_before_while_all_seats_are_taken() -> None:
    alone, beside = world(0, seed=1), world(10 * QUIET_PER_S, seed=1, reserve=0)
    assert p99(beside.first_token_s["quiet"]) > 2 * p99(alone.first_token_s["quiet"])


def test_the_reserve_costs_the_noisy_tenant_no_more_than_its_seats() -> None:
    kept, none = world(10 * QUIET_PER_S, seed=1), world(10 * QUIET_PER_S, seed=1, reserve=0)
    assert kept.served["noisy"] >= 0.9 * none.served["noisy"]


def test_a_tenant_that_is_alone_has_all_seats() -> None:
    found = World(seats=SEATS, reserve=Saturation().reserved(SEATS))
    found.load("noisy", 10 * QUIET_PER_S, random.Random(1))
    found.run()
    assert sorted(found.batches)[len(found.batches) // 2] == SEATS
