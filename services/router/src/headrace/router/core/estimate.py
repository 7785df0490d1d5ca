"""How long an attempt would take on a replica: seconds, from the replica's own measured rates.

A `Cost` is the estimate as a function of what is booked on the replica. It is plain numbers, so that the booking board
can evaluate it where all routers' bookings are; `headrace.coord.redis.booking_board.Terms` is the same, field by field.
"""

from __future__ import annotations

from typing import NamedTuple

from headrace.router.core.rates import itl_s, prefill_s
from headrace.router.core.replica import Attempt, Rates, Replica

TYPICAL_ANSWER_TOKENS = 128
"""Heartbeats do not say how long the running answers are. They are taken to be as long as this one may become,
and at least this long, or a one-token request would believe that a full batch empties in one step."""

SIBLING_TOKENS = 256
"""A prefix that is being computed right now and is at least so long draws its siblings (see `Overlapped`). Shorter ones
are computed again within the noise, and spreading wins."""


_new = tuple.__new__  # of a named tuple, without its own constructor, which takes as long again


class Booked(NamedTuple):
    """What routers have sent to a replica that its heartbeat does not show yet."""

    sequences: int = 0
    prompt_tokens: int = 0


NOTHING_BOOKED = Booked()


class Overlapped(NamedTuple):
    """How many of the prompt's tokens the replica has cached, and how many of those are only on their way.

    The latter were placed a moment ago and are being computed. A sibling that goes there waits for work it needs
    anyhow; one that goes elsewhere finishes no sooner, and the work is done twice. So that work is not counted as
    waiting: a burst of siblings stays together until its own parts take as long as the prefix.
    """

    cached_tokens: int = 0
    on_their_way: int = 0


NO_OVERLAP = Overlapped()


class Estimate(NamedTuple):
    """Completion = queue + prefill + decode, in seconds. A tuple: a decision makes one per replica."""

    queue_s: float
    prefill_s: float
    decode_s: float

    @property
    def total_s(self) -> float:
        """Their sum."""
        return self.queue_s + self.prefill_s + self.decode_s

    @property
    def first_token_s(self) -> float:
        """Until the first token, which comes out of prefill."""
        return self.queue_s + self.prefill_s


class Cost(NamedTuple):
    """The estimate before anything is booked; `at` shows what each number does. Packed as it stands, hence a tuple."""

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

    def at(self, booked: Booked) -> Estimate:
        """The estimate behind `booked`."""
        n, tokens = booked
        (
            ready_s,
            token_s,
            prefill_s,
            itl_s,
            growth_s,
            room,
            full,
            later_tokens,
            neighbour_tokens,
            spare,
            size,
            total,
            _,
        ) = self
        itl = itl_s + growth_s * (n if n < room else room if room > 0 else 0)
        missing_slots = (n - room) / full
        missing_blocks = (tokens / size - spare) / total
        missing = missing_slots if missing_slots > missing_blocks else missing_blocks
        queue_s = ready_s + tokens * token_s
        if missing > 0:
            queue_s += neighbour_tokens * itl * missing
        return _new(Estimate, (queue_s, prefill_s, later_tokens * itl))

    def crowding(self, booked: Booked) -> float:
        """Sequences that could not start, as a share of the batch; below 0 while there is room."""
        return (booked.sequences - self.room) / self.full

    def preference(self, estimate: Estimate) -> tuple[float, float]:
        """What is compared: completion and first token, without the wait for a prefix it shares."""
        queue_s, prefill_s, decode_s = estimate
        credit_s = self.credit_s
        first_s = queue_s + prefill_s - (credit_s if credit_s < queue_s else queue_s)
        return first_s + decode_s, first_s


class Standing(NamedTuple):
    """What a replica's heartbeat says for every attempt of so many sequences: worked out once per heartbeat."""

    context_limit: int
    token_s: float
    ready_s: float
    itl_s: float
    growth_s: float
    room: int
    full: int


def standing_of(replica: Replica, rates: Rates, sequences: int = 1, ramp: float = 1.0) -> Standing:
    """The standing of a ready `replica`, which is given `ramp` of its capacity."""
    full = capacity(replica, ramp)
    present = replica.running + replica.waiting
    joined = min(present + sequences, full)
    itl = itl_s(rates, joined, running=replica.running, full=full)
    at_full = itl_s(rates, full, running=replica.running, full=full)
    token_s = 1 / rates.prefill_tokens_per_s
    return Standing(
        context_limit=replica.context_limit or replica.max_model_len,
        token_s=token_s,
        ready_s=replica.waiting_prefill_tokens * token_s,
        itl_s=itl,
        # A larger batch that was measured to be faster was measured on another day: bookings never make it better.
        growth_s=max(0.0, at_full - itl) / (full - joined) if full > joined else 0.0,
        room=full - present - sequences,
        full=full,
    )


def cost_of(
    replica: Replica, rates: Rates, attempt: Attempt, standing: Standing, overlap: Overlapped = NO_OVERLAP
) -> Cost:
    """What `attempt` costs on a ready `replica` whose context it fits.

    Worked example: 60 tokens waiting at 500 tok/s (0.12 s), a prompt of 140 (0.28 s), 80 tokens at 22 ms on an
    idle batch: the first comes out of prefill, 79 × 22 ms = 1.738 s, together 2.138 s.
    """
    context_limit, token_s, ready_s, step_s, growth_s, room, full = standing
    cached_tokens, on_their_way = overlap
    # At least one token is always computed: its logits are what the answer begins with.
    prompt_tokens = attempt.prompt_tokens
    uncached = prompt_tokens - cached_tokens
    if uncached < 1:
        uncached = 1
    answer_tokens = attempt.max_tokens
    if answer_tokens > context_limit - prompt_tokens:
        answer_tokens = context_limit - prompt_tokens
    tokens = replica.waiting_prefill_tokens + uncached + attempt.sequences
    return _new(
        Cost,
        (
            ready_s,
            token_s,
            prefill_s(rates, uncached),
            step_s,
            growth_s,
            room,
            full,
            answer_tokens - 1,
            answer_tokens if answer_tokens > TYPICAL_ANSWER_TOKENS else TYPICAL_ANSWER_TOKENS,
            replica.free_blocks - -(-tokens // replica.block_size),
            replica.block_size,
            replica.total_blocks,
            on_their_way * token_s if on_their_way >= SIBLING_TOKENS else 0.0,
        ),
    )


def capacity(replica: Replica, ramp: float) -> int:
    """Sequences that count as its batch limit while it is given `ramp` of its capacity."""
    return max(1, int(replica.max_num_seqs * ramp))
