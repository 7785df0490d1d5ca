"""Where routers book what they place, so that all of them see it before any heartbeat does.

One Lua function looks at the heartbeats' own stamps by the server's clock, adds the live bookings of all routers to
each candidate's cost, takes the least and books it. Nothing can come between the look and the booking, so however many
routers place at once, none of them takes a place twice. A whole batch of placements is one call.

A replica's bookings are one string, its *ledger*: its epoch, and per 25 ms of time how many sequences and prompt tokens
were booked in it. Sums cost a dozen additions, however many requests a second. A slice of time ends when a heartbeat
stamped ARRIVAL_US (0.1 s) after it shows what was booked in it, or when it is older than a booking may become; the
ledger itself has the same time to live. An attempt that ends after a heartbeat has shown it is entered as one sequence
fewer until the next heartbeat: on a full fleet its place would else stay empty for a quarter of a second.
Beside the ledgers each attempt has an entry that says where it is booked, by which it is released or moved. Server and
board are one Redis: the function touches keys that only it knows.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import NamedTuple

from redis.asyncio import Redis

from headrace.coord.redis.booking_script import BOOK
from headrace.coord.redis.replica_board import KEY
from headrace.coord.redis.script_line import ScriptLine
from headrace.coord.redis.store import TIMEOUT_S, redis_errors


class Preference(Enum):
    """How the function chooses among candidates that are neither obstructed nor saturated."""

    LEAST_COST = 0
    LEAST_LOADED = 1
    IN_ORDER = 2


class State(Enum):
    """What the function found of a candidate."""

    FREE = 0
    GONE = 1  # no heartbeat on the board
    RESTARTED = 2  # the heartbeat is of another life
    STALE = 3
    SATURATED = 4  # its bookings, all routers' together, have used up its allowance


class Terms(NamedTuple):
    """A candidate's cost as a function of n sequences and t prompt tokens booked there, in seconds:

        joined = min(n, max(0, room))
        itl    = itl_s + growth_s · joined
        wait   = max(0, (n − room) / full, (t / block_size − spare_blocks) / total_blocks)
        queue  = ready_s + t · token_s + neighbour_tokens · itl · wait
        first  = queue + prefill_s − min(credit_s, queue)
        total  = first + later_tokens · itl

    The least `total` is chosen; within NEAR_TIE (5 %) of it the least `first`; within NEAR_TIE of that the emptiest,
    (n − room) / full; among those chance. A tuple, because it is packed as it stands.
    """

    ready_s: float
    token_s: float
    prefill_s: float
    itl_s: float
    growth_s: float
    room: float
    full: float
    later_tokens: float
    neighbour_tokens: float
    spare_blocks: float
    block_size: float
    total_blocks: float
    credit_s: float


class Candidate(NamedTuple):
    """One life of a replica that may run the attempt; it is saturated once `allowance` sequences are booked on it.

    A tuple: every placement makes eight. `terms` are those of `Terms`, or a tuple of the same numbers.
    """

    engine_id: str
    epoch: int
    tokens: int
    terms: tuple[float, ...]
    allowance: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """One attempt to be placed on one of `candidates`; `chance`, in [0, 1), settles ties."""

    request_id: str
    attempt: int
    sequences: int
    candidates: Sequence[Candidate]
    preference: Preference
    freshness_s: float
    chance: float


class Seen(NamedTuple):
    """A candidate at the moment of the decision: live bookings of all routers, this attempt's own not among them."""

    state: State
    age_s: float
    sequences: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """`chosen` is an index of the wish's candidates, booked; None when none was free. `seen` has one per candidate."""

    chosen: int | None
    seen: tuple[Seen, ...]


_STATES = tuple(State(n) for n in range(len(State)))
_KEY = KEY.encode()


class BookingBoard:
    """The bookings in `redis`; each ends by itself after `longest_s`. Unavailable when Redis does not answer.

    Keeps one connection of the client, which closes it.
    """

    def __init__(self, redis: Redis, *, longest_s: float) -> None:
        self._longest_us = int(longest_s * 1e6)
        self._line = ScriptLine(redis, BOOK, timeout_s=TIMEOUT_S)

    async def book(self, wishes: Sequence[Wish], releases: Sequence[tuple[str, int]] = ()) -> list[Answer]:
        """Choose and book for each wish in turn, after ending the bookings of `releases`; all in one call.

        An attempt that is booked already is moved. Releasing one that is not booked is no error.
        """
        replicas: dict[tuple[str, int], int] = {}
        packed: list[bytes] = []
        for wish in wishes:
            packed += (_entry(wish.request_id, wish.attempt), _packed(wish, replicas))
        arguments = [b"%d" % n for n in (self._longest_us, len(wishes), len(releases), len(replicas))]
        arguments += [engine_id.encode() for engine_id, _ in replicas]
        arguments += [b"%020d" % epoch for _, epoch in replicas]
        arguments += packed
        arguments += [_entry(*release) for release in releases]
        with redis_errors():
            answers = await self._line.call(_KEY, arguments)
        return [_answer(answer) for answer in answers]

    async def look(self, replicas: Sequence[tuple[str, int]]) -> dict[str, Seen]:
        """The bookings on lives of replicas, (engine id, epoch); books nothing."""
        candidates = [_nowhere(engine_id, epoch) for engine_id, epoch in replicas]
        wish = Wish(
            request_id="",
            attempt=0,
            sequences=0,
            candidates=candidates,
            preference=Preference.IN_ORDER,
            freshness_s=self._longest_us / 1e6,
            chance=0.0,
        )
        (answer,) = await self.book([wish])
        return {c.engine_id: seen for c, seen in zip(candidates, answer.seen, strict=True)}


def _nowhere(engine_id: str, epoch: int) -> Candidate:
    """A candidate that cannot be chosen: it is looked at, and found saturated."""
    return Candidate(engine_id=engine_id, epoch=epoch, tokens=0, terms=Terms(*[1.0] * len(Terms._fields)), allowance=0)


def _entry(request_id: str, attempt: int) -> bytes:
    return f"{request_id}:{attempt}".encode()


def _packed(wish: Wish, replicas: dict[tuple[str, int], int]) -> bytes:
    """As doubles: preference, freshness, chance, sequences, count; then 16 per candidate. Replicas count from 1."""
    flat: list[float] = [
        wish.preference.value,
        wish.freshness_s * 1e6,
        wish.chance,
        wish.sequences,
        len(wish.candidates),
    ]
    for engine_id, epoch, tokens, terms, allowance in wish.candidates:
        flat += (replicas.setdefault((engine_id, epoch), len(replicas) + 1), tokens, *terms, allowance)
    return _doubles(len(flat)).pack(*flat)


def _answer(packed: bytes) -> Answer:
    """As doubles: position of the chosen, from 1, or 0; then state, age in µs, sequences and tokens per candidate."""
    position, *flat = _doubles(len(packed) // 8).unpack(packed)
    seen = tuple(
        Seen(_STATES[int(state)], age / 1e6 if age > 0 else 0.0, int(sequences), int(tokens))
        for state, age, sequences, tokens in zip(flat[::4], flat[1::4], flat[2::4], flat[3::4], strict=True)
    )
    return Answer(chosen=int(position) - 1 if position else None, seen=seen)


@cache
def _doubles(count: int) -> struct.Struct:
    return struct.Struct(f"<{count}d")
