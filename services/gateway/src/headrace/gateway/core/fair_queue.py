"""Whose turn it is when the fleet is full: virtual token counters per tenant, inside classes of urgency.

After "Fairness in Serving Large Language Models" (Sheng et al., OSDI 2024), with arrivals lifted as in start-time fair
queueing. Each tenant of a class has a counter of the service it got there, divided by its weight; the tenant with the
least is next. A tenant that comes back is lifted to the class's virtual time: having asked for nothing earns nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum

from headrace.gateway.core.principal import Priority

INPUT_COST, OUTPUT_COST = 1.0, 2.0
"""Per token: a decoded token costs about twice a prefilled one, which shares its pass with many others."""

_MOST_IDLE = 4096  # counters of tenants that wait for nothing, per class; 100 bytes each


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ticket:
    """One request that wants a place. Seconds on one monotonic clock.

    `prompt_tokens` are those expected to be computed (known cached ones left out), `prompt_bytes` what it holds in
    memory. After `deadline_at` less `least_s`, which it takes at least once placed, a place is of no use. It takes
    `sequences` seats.
    """

    tenant: str
    priority: Priority
    deadline_at: float
    prompt_tokens: int = 0
    prompt_bytes: int = 0
    weight: float = 1.0
    least_s: float = 0.0
    sequences: int = 1


May = Callable[[Ticket], bool]
"""Whether a ticket may be placed now, whoever's turn it is."""


def _anyone(ticket: Ticket) -> bool:
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """How many may wait, with how much memory, and how long; after `starvation_s` a lower class gets one turn."""

    max_requests: int = 1024
    max_bytes: int = 64 << 20
    max_wait_s: float = 30.0
    starvation_s: float = 5.0


class Why(Enum):
    """Why a ticket ended without a place."""

    QUEUE_FULL = "QUEUE_FULL"  # no room for it, or its room went to a tenant that held less
    QUEUE_TIMEOUT = "QUEUE_TIMEOUT"  # it waited for max_wait_s
    DEADLINE = "DEADLINE"  # a place would come too late


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A ticket that left the queue without a place."""

    ticket: Ticket
    why: Why


@dataclass(slots=True, kw_only=True)
class _Flow:
    """One tenant's waiting tickets in a class, oldest first, and the service it got."""

    served: float = 0.0
    weight: float = 1.0
    waiting: deque[Ticket] = field(default_factory=deque)
    bytes: int = 0


@dataclass(slots=True, kw_only=True)
class _Class:
    """One class of urgency: its tenants, its virtual time, and when it last got a turn or was empty."""

    flows: dict[str, _Flow] = field(default_factory=dict)
    active: dict[str, _Flow] = field(default_factory=dict)
    virtual: float = 0.0
    turn_at: float = 0.0

    def flow(self, ticket: Ticket) -> _Flow:
        """The tenant's flow; a new one starts at the virtual time."""
        flow = self.flows.get(ticket.tenant)
        if flow is None:
            if len(self.flows) >= _MOST_IDLE:
                self._forget()
            flow = self.flows[ticket.tenant] = _Flow(served=self.virtual)
        flow.weight = ticket.weight
        return flow

    def lift(self, flow: _Flow) -> None:
        """A flow that waited for nothing starts level with those that do."""
        if not flow.waiting:
            level = min((other.served for other in self.active.values()), default=self.virtual)
            flow.served = max(flow.served, self.virtual, level)

    def next(self, may: May) -> Ticket | None:
        """The oldest ticket of the flow that was served least, of those that may; of equals who waits longest."""
        flows = [flow for flow in self.active.values() if may(flow.waiting[0])]
        flow = min(flows, key=lambda flow: flow.served, default=None)
        return flow.waiting[0] if flow else None

    def charge(self, ticket: Ticket, cost: float) -> None:
        """Count service."""
        flow = self.flow(ticket)
        flow.served += cost / flow.weight

    def place(self, ticket: Ticket) -> None:
        """It got its place: the virtual time moves to its flow's, and the flow pays for the prompt."""
        self.virtual = max(self.virtual, self.flow(ticket).served)
        self.charge(ticket, INPUT_COST * ticket.prompt_tokens)

    def _forget(self) -> None:
        """Flows at or below the virtual time would be lifted to it anyway; of the others the least served go."""
        idle = sorted((name for name in self.flows if name not in self.active), key=lambda n: self.flows[n].served)
        for name in idle[: max(len(idle) // 2, sum(self.flows[name].served <= self.virtual for name in idle))]:
            del self.flows[name]


class FairQueue:
    """All tickets that wait for one fleet. Every ticket pushed leaves once: taken, removed, expired or displaced."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self._classes = {priority: _Class() for priority in sorted(Priority, reverse=True)}
        self._entered: dict[Ticket, float] = {}
        self._bytes = 0

    def __len__(self) -> int:
        """Tickets waiting."""
        return len(self._entered)

    @property
    def bytes(self) -> int:
        """Memory of the waiting prompts."""
        return self._bytes

    def waiting(self, priority: Priority) -> int:
        """Tickets of one class waiting."""
        return sum(len(flow.waiting) for flow in self._classes[priority].active.values())

    def entered_at(self, ticket: Ticket) -> float:
        """When a waiting ticket was pushed; KeyError for one that does not wait."""
        return self._entered[ticket]

    def __contains__(self, ticket: Ticket) -> bool:
        """Whether it waits."""
        return ticket in self._entered

    def may_pass(self, priority: Priority, now: float, may: May = _anyone) -> bool:
        """Whether a newcomer of this class may try without waiting: it overtakes nobody of its class who may, nobody
        of a class above, and no class that is starving."""
        if not self._entered:
            return True
        waiting = self._waiting()
        if waiting[0] > priority or self._starving([each for each in waiting if each != priority], now) is not None:
            return False
        return waiting[0] < priority or self._classes[priority].next(may) is None

    def push(self, ticket: Ticket, now: float) -> tuple[Ended, ...]:
        """Let a ticket wait; returns those that ended by it: itself when refused, or others that made room.

        When the queue is full, room is made by the tenant that holds most of the lowest class, newest first, as long
        as that class is lower or the tenant would still hold more than the newcomer's: a tenant that fills the queue
        shuts out itself, nobody else.
        """
        if ticket.deadline_at - ticket.least_s <= now:
            return (Ended(ticket=ticket, why=Why.DEADLINE),)
        victims = self._victims(ticket)
        if victims is None:
            return (Ended(ticket=ticket, why=Why.QUEUE_FULL),)
        for victim in victims:
            self.remove(victim)
        of = self._classes[ticket.priority]
        if not of.active:
            of.turn_at = now
        flow = of.flow(ticket)
        of.lift(flow)
        flow.waiting.append(ticket)
        flow.bytes += ticket.prompt_bytes
        of.active[ticket.tenant] = flow
        self._entered[ticket] = now
        self._bytes += ticket.prompt_bytes
        return tuple(Ended(ticket=victim, why=Why.QUEUE_FULL) for victim in victims)

    def head(self, now: float, may: May = _anyone) -> Ticket | None:
        """Whose turn it is; it keeps waiting until `placed` or `remove`. None when nobody waits who may."""
        waiting = self._waiting()
        if not waiting:
            return None
        starving = self._starving(waiting[1:], now)
        head = None if starving is None else self._classes[starving].next(may)
        return head or self._classes[waiting[0]].next(may)

    def placed(self, ticket: Ticket, now: float) -> None:
        """A ticket, waiting or not, got a place; its tenant pays for the prompt."""
        of = self._classes[ticket.priority]
        of.lift(of.flow(ticket))
        of.place(ticket)
        of.turn_at = now
        self.remove(ticket)

    def remove(self, ticket: Ticket) -> bool:
        """Take a ticket out, wherever it stands, without a trace; whether it waited."""
        if self._entered.pop(ticket, None) is None:
            return False
        of = self._classes[ticket.priority]
        flow = of.active[ticket.tenant]
        flow.waiting.remove(ticket)
        flow.bytes -= ticket.prompt_bytes
        self._bytes -= ticket.prompt_bytes
        if not flow.waiting:
            del of.active[ticket.tenant]
        return True

    def expire(self, now: float) -> tuple[Ended, ...]:
        """Take out every ticket whose time has passed."""
        over = [(ticket, why) for ticket, at in self._entered.items() if (why := self._over(ticket, at, now))]
        for ticket, _ in over:
            self.remove(ticket)
        return tuple(Ended(ticket=ticket, why=why) for ticket, why in over)

    def next_expiry(self) -> float | None:
        """When `expire` will next find something; None when nobody waits."""
        return min((self._ends_at(ticket, at) for ticket, at in self._entered.items()), default=None)

    def charge(self, ticket: Ticket, *, output_tokens: int = 0, cached_tokens: int = 0) -> None:
        """A placed ticket's tenant was served: tokens of the answer, and prompt tokens that turned out to be cached."""
        cost = OUTPUT_COST * output_tokens - INPUT_COST * min(cached_tokens, ticket.prompt_tokens)
        self._classes[ticket.priority].charge(ticket, cost)

    def _over(self, ticket: Ticket, entered_at: float, now: float) -> Why | None:
        if ticket.deadline_at - ticket.least_s <= now:
            return Why.DEADLINE
        return Why.QUEUE_TIMEOUT if entered_at + self.bounds.max_wait_s <= now else None

    def _ends_at(self, ticket: Ticket, entered_at: float) -> float:
        return min(ticket.deadline_at - ticket.least_s, entered_at + self.bounds.max_wait_s)

    def _waiting(self) -> list[Priority]:
        """Classes in which somebody waits, the most urgent first."""
        return [priority for priority, each in self._classes.items() if each.active]

    def _starving(self, among: list[Priority], now: float) -> Priority | None:
        """Of these classes the one that went longest without a turn, if that is too long."""
        starving = [each for each in among if now - self._classes[each].turn_at > self.bounds.starvation_s]
        return min(starving, key=lambda priority: self._classes[priority].turn_at, default=None)

    def _victims(self, ticket: Ticket) -> list[Ticket] | None:
        """Whom to send away so that `ticket` finds room; None when it is to go itself."""
        over_requests = len(self._entered) + 1 - self.bounds.max_requests
        over_bytes = self._bytes + ticket.prompt_bytes - self.bounds.max_bytes
        victims: list[Ticket] = []
        if over_requests <= 0 and over_bytes <= 0:
            return victims
        for victim in self._displaceable(ticket, by_bytes=over_requests <= 0):
            victims.append(victim)
            over_requests -= 1
            over_bytes -= victim.prompt_bytes
            if over_requests <= 0 and over_bytes <= 0:
                return victims
        return None

    def _displaceable(self, ticket: Ticket, *, by_bytes: bool) -> Iterator[Ticket]:
        """Tickets that may be sent away for this one: of the lowest class, of the tenant that holds most, newest."""

        def size(each: Ticket) -> float:
            return (each.prompt_bytes if by_bytes else 1) / each.weight

        own = self._classes[ticket.priority].active.get(ticket.tenant)
        mine = size(ticket) + sum(size(each) for each in (own.waiting if own else ()))
        for priority, each in reversed(self._classes.items()):
            if priority > ticket.priority:
                return
            left = {tenant: deque(flow.waiting) for tenant, flow in each.active.items()}
            held = {tenant: sum(map(size, tickets)) for tenant, tickets in left.items()}
            while held:
                tenant = max(held, key=lambda name: held[name])
                victim = left[tenant].pop()
                if priority == ticket.priority and (tenant == ticket.tenant or held[tenant] - size(victim) < mine):
                    return
                yield victim
                held[tenant] -= size(victim)
                if not left[tenant]:
                    del held[tenant], left[tenant]
