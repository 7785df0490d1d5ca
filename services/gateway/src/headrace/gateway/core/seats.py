"""Who holds how many of the fleet's seats, and who must leave the last ones to others.

A seat is a sequence that a replica runs. The queue decides who is next when a seat becomes free; but a request of a
tenant that holds few finds none free while another has taken them all, and waits until an answer ends. So while there
are others, a tenant beyond its fair share leaves a reserve of seats free. It lets nothing wait at an engine, either:
what waits there is served as it came, and who is next would not be decided here.
"""

from __future__ import annotations

from headrace.gateway.core.fair_queue import Ticket

REMEMBERED_S = 60.0
"""A tenant is about for so long after it was last heard of. One that asks every few seconds finds its reserve; a fleet
that has only one tenant is all that tenant's."""


class Seats:
    """The seats of one deployment, as one gateway knows them. Seconds on one monotonic clock.

    Routers say how many there are. Those held are this gateway's own, counted as they are taken and given back: exact,
    where heartbeats are up to 0.35 s old. Until a router has said so, nobody is beyond its share.
    """

    def __init__(self) -> None:
        self._seats = 0
        self._reserve = 0
        self._held: dict[str, int] = {}
        self._total = 0
        self._asking = 0
        self._present: dict[str, tuple[int, float]] = {}
        self._weights = 0.0
        # The two last heard of: whoever asks, one of them is somebody else, if anybody was.
        self._last: tuple[Ticket, float] | None = None
        self._other: tuple[Ticket, float] | None = None

    def fleet(self, seats: int, reserve: int) -> None:
        """A router has said how many sequences the replicas run at once, and how many of those seats are kept free."""
        self._seats, self._reserve = seats, reserve

    def came(self, ticket: Ticket, now: float) -> None:
        """A request wants a seat; `left` when it has got it or given up."""
        self._enter(ticket)
        if self._last is None or self._last[0].tenant != ticket.tenant:
            self._other = self._last
        self._last = ticket, now

    def left(self, ticket: Ticket) -> None:
        """It wants one no longer."""
        self._exit(ticket)

    def asks(self, change: int) -> None:
        """So many more are being placed just now: each may take a seat before the next one is counted."""
        self._asking += change

    def took(self, ticket: Ticket) -> None:
        """An attempt of the request is at an engine."""
        self._enter(ticket)
        self._held[ticket.tenant] = self._held.get(ticket.tenant, 0) + ticket.sequences
        self._total += ticket.sequences

    def gave(self, ticket: Ticket) -> None:
        """The engine has ended it."""
        held = self._held[ticket.tenant] - ticket.sequences
        if held:
            self._held[ticket.tenant] = held
        else:
            del self._held[ticket.tenant]
        self._total -= ticket.sequences
        self._exit(ticket)

    def beyond_share(self, ticket: Ticket, now: float) -> bool:
        """Whether one more would be more than the tenant's share of the seats, by weight, while others are about.

        Shares are among those who hold or want seats now, and when that is nobody else, the other last heard of. The
        first seat is always within the share.
        """
        others = self._others(ticket.tenant, now)
        if not self._seats or not others:
            return False
        share = self._seats * ticket.weight / (ticket.weight + others)
        return self._held.get(ticket.tenant, 0) + 1 > max(1.0, share)

    def may_take(self, ticket: Ticket, now: float) -> bool:
        """Whether the request may be placed now, as far as the reserve goes.

        While nothing is held anybody may: then no answer would end, and nobody be told to try.
        """
        taken = self._total + self._asking
        return not taken or taken < self._seats - self._reserve or not self.beyond_share(ticket, now)

    def _others(self, tenant: str, now: float) -> float:
        """The weight of all others who are about; 0 when there are none."""
        count_own, own = self._present.get(tenant, (0, 0.0))
        if len(self._present) > (count_own > 0):
            return self._weights - own
        heard = self._other if self._last is not None and self._last[0].tenant == tenant else self._last
        return heard[0].weight if heard is not None and heard[1] > now - REMEMBERED_S else 0.0

    def _enter(self, ticket: Ticket) -> None:
        count, weight = self._present.get(ticket.tenant, (0, 0.0))
        self._present[ticket.tenant] = count + 1, ticket.weight
        self._weights += ticket.weight - weight

    def _exit(self, ticket: Ticket) -> None:
        count, weight = self._present[ticket.tenant]
        if count > 1:
            self._present[ticket.tenant] = count - 1, weight
            return
        del self._present[ticket.tenant]
        self._weights = self._weights - weight if self._present else 0.0
