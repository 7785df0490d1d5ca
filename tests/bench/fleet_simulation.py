"""A fleet behind one router, in virtual time: the engine's core and the router's core, and what lies between them.

What lies between is modelled: a request reaches its replica 2 ms after it was placed, a cache event reaches the
router's index after 10 ms, heartbeats are written every 250 ms (each replica at its own moment) and read every 100 ms,
as the services do it. The pure core books placements; there is one router, so nothing would be added by Redis.
A placement refused as saturated is tried again every 50 ms, as a gateway's queue would.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count

from fleet_replica import BUNDLE, ReplicaModel, Request, SimulatedReplica

from headrace.engine.core.cache_event import CacheEvent, Cleared, Removed, Stored
from headrace.engine.core.finish import Finish
from headrace.engine.core.request import Sequence as EngineSequence
from headrace.router.core.ejection import Outcome
from headrace.router.core.placement import Decision, Placed
from headrace.router.core.prefix_index import Heard, PrefixIndex
from headrace.router.core.replica import Attempt, AttemptKey, EngineId, Phase, Rates, Replica
from headrace.router.core.router import Router
from headrace.router.core.rules import Policy, Rules
from headrace.router.core.view import Reading, Record

DEPLOYMENT = "chat"
FRESHNESS_S = 10.0
HEARTBEAT_S = 0.25
POLL_S = 0.1
EVENT_DELAY_S = 0.010
DELIVERY_S = 0.002
RETRY_S = 0.05
INDEX_BLOCKS = 1_000_000


class Timeline:
    """What is to happen, in the order of its instants; of those at one instant, in the order of asking."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbers = count()

    def at(self, instant: float, act: Callable[[float], None]) -> None:
        """Call `act` with the instant, once it has come."""
        heapq.heappush(self._events, (instant, next(self._numbers), act))

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Let it all happen, or as much as there is `until` true."""
        while self._events and not until():
            self.now, _, act = heapq.heappop(self._events)
            act(self.now)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A request and when it comes."""

    at: float
    request: Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """One request as its client saw it."""

    request_id: int
    arrived_at: float
    engine: int
    first_token_s: float
    total_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    refusals: int


Watch = Callable[[Request, float, Decision], None]


class Fleet:
    """`replicas` of one model under one policy. Use one per run."""

    def __init__(
        self, replicas: int, model: ReplicaModel, policy: Policy, *, seed: int, watch: Watch | None = None
    ) -> None:
        self.timeline = Timeline()
        self.answered: list[Answered] = []
        self._model = model
        self._seed = seed
        self._watch = watch
        chance = random.Random(seed)
        rules = Rules(freshness_s=FRESHNESS_S, policy=policy)
        self.index = PrefixIndex(INDEX_BLOCKS)
        self.router = Router(rules_of=lambda _: rules, index=self.index, chance=chance.random, longest_s=FRESHNESS_S)
        self._events = [0] * replicas
        self._beats = [0] * replicas
        self._board: dict[int, tuple[Replica, float]] = {}
        self._arrived: dict[int, tuple[float, int, int]] = {}
        self._open = 0
        self.replicas = [self._replica(n) for n in range(replicas)]
        for n in range(replicas):
            self._beat(n, 0.0)
            self.timeline.at(HEARTBEAT_S * chance.random(), lambda now, n=n: self._heartbeat(n, now))  # type: ignore[misc]
        self._poll(0.0)

    def run(self, arrivals: Sequence[Arrival]) -> list[Answered]:
        """Serve them all, to the end."""
        self._open = len(arrivals)
        for arrival in arrivals:
            self.timeline.at(arrival.at, lambda now, request=arrival.request: self._place(request, now, now, 0))  # type: ignore[misc]
        self.timeline.run(until=lambda: not self._open)
        return self.answered

    def _replica(self, n: int) -> SimulatedReplica:
        self.index.begin(_name(n), 1)
        self.index.snapshot(_name(n), 1, [], 0)
        return SimulatedReplica(
            self._model,
            self.timeline.at,
            seed=1000 * self._seed + n,
            caching=True,
            published=lambda events, now: self.timeline.at(now + EVENT_DELAY_S, lambda _: self._hear(n, events)),
            ended=lambda request, sequence, finish: self._ended(n, request, sequence, finish),
        )

    # What the router is told.

    def _heartbeat(self, n: int, now: float) -> None:
        self._beat(n, now)
        self.timeline.at(now + HEARTBEAT_S, lambda then: self._heartbeat(n, then))

    def _beat(self, n: int, now: float) -> None:
        self._beats[n] += 1
        self._board[n] = _seen(n, self._beats[n], self.replicas[n], now), now

    def _poll(self, now: float) -> None:
        records = tuple(Record(seen=seen, age_s=now - at, payload=b"") for seen, at in self._board.values())
        self.router.observed(Reading(asked_at=now, records=records), now)
        self.timeline.at(now + POLL_S, self._poll)

    def _hear(self, n: int, events: Sequence[CacheEvent]) -> None:
        for event in events:
            self._events[n] += 1
            where = _name(n), 1
            match event:
                case Stored(hashes):
                    heard = self.index.stored(*where, hashes, self._events[n])
                case Removed(hashes):
                    heard = self.index.removed(*where, hashes, self._events[n])
                case Cleared():
                    heard = self.index.cleared(*where, self._events[n])
            assert heard is Heard.APPLIED

    # A request's way.

    def _place(self, request: Request, arrived_at: float, now: float, refusals: int) -> None:
        decision = self.router.place(_attempt(request, self._model.block_size), now)
        if self._watch is not None:
            self._watch(request, now, decision)
        if not isinstance(decision, Placed):
            self.timeline.at(now + RETRY_S, lambda then: self._place(request, arrived_at, then, refusals + 1))
            return
        n = int(decision.replica.engine_id)
        self._arrived[request.id] = arrived_at, refusals, n
        self.timeline.at(now + DELIVERY_S, lambda then: self.replicas[n].submit(request, then))

    def _ended(self, n: int, request: Request, sequence: EngineSequence, finish: Finish) -> None:
        now = self.timeline.now
        arrived_at, refusals, placed_on = self._arrived.pop(request.id)
        assert placed_on == n
        assert sequence.first_token_at is not None
        self.answered.append(
            Answered(
                request_id=request.id,
                arrived_at=arrived_at,
                engine=n,
                first_token_s=sequence.first_token_at - arrived_at,
                total_s=now - arrived_at,
                prompt_tokens=len(request.prompt),
                cached_tokens=finish.cached_tokens,
                output_tokens=len(request.answer),
                refusals=refusals,
            )
        )
        self.router.ended(_key(request), _name(n), 1, Outcome.OK, placed_at=arrived_at, now=now)
        following = request.follow_up
        if following is None:
            self._open -= 1
            return
        self.timeline.at(now + request.think_s, lambda then: self._place(following, then, then, 0))


def capacity(model: ReplicaModel, requests: Sequence[Request]) -> float:
    """Requests a second that one replica without a prefix cache answers when it always has a queue."""
    timeline = Timeline()
    ends: list[float] = []
    replica = SimulatedReplica(
        replace(model, max_waiting=len(requests) + 1),
        timeline.at,
        seed=0,
        caching=False,
        published=lambda events, now: None,
        ended=lambda request, sequence, finish: ends.append(timeline.now),
    )
    for request in requests:
        replica.submit(request, 0.0)
    timeline.run()
    return len(ends) / max(ends)


def _name(n: int) -> EngineId:
    return EngineId(f"{n:02}")


def _key(request: Request) -> AttemptKey:
    return AttemptKey(f"req-{request.id}", 1)


def _attempt(request: Request, block_size: int) -> Attempt:
    return Attempt(
        key=_key(request),
        deployment=DEPLOYMENT,
        bundle_digest=BUNDLE,
        adapter=None,
        prompt_tokens=len(request.prompt),
        max_tokens=request.max_tokens,
        hashes=request.hashes,
        block_size=block_size,
    )


def _seen(n: int, sequence: int, replica: SimulatedReplica, now: float) -> Replica:
    """The heartbeat as the router reads it."""
    load, model = replica.load(now), replica.model
    rates = None
    if load.prefill_tokens_per_s is not None and load.itl_ms is not None:
        rates = Rates(
            prefill_tokens_per_s=load.prefill_tokens_per_s,
            itl_s=load.itl_ms / 1000,
            prefill_by_length=load.prefill_rates,
            itl_by_batch=tuple((sequences, itl_ms / 1000) for sequences, itl_ms in load.batch_latencies),
        )
    return Replica(
        engine_id=_name(n),
        epoch=1,
        sequence=sequence,
        address=f"127.0.0.1:{9000 + n}",
        deployment=DEPLOYMENT,
        bundle_digest=BUNDLE,
        adapters=frozenset(),
        phase=Phase.READY,
        waiting=load.waiting,
        waiting_prefill_tokens=load.waiting_prefill_tokens,
        running=load.running,
        free_blocks=load.free_blocks,
        total_blocks=load.total_blocks,
        block_size=model.block_size,
        max_model_len=model.max_model_len,
        max_num_seqs=model.max_num_seqs,
        pressure=load.pressure,
        rates=rates,
    )
