"""How long an attempt would take on a replica: seconds, from the replica's own measured rates."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.router.core.replica import Attempt, Rates, Replica

TYPICAL_ANSWER_TOKENS = 128
"""Heartbeats do not say how long the running answers are. They are taken to be as long as this one may become,
and at least this long, or a one-token request would believe that a full batch empties in one step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Booked:
    """What this router has sent to a replica that its heartbeat does not show yet."""

    sequences: int = 0
    prompt_tokens: int = 0


NOTHING_BOOKED = Booked()


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Completion = queue + prefill + decode, in seconds."""

    queue_s: float
    prefill_s: float
    decode_s: float

    @property
    def total_s(self) -> float:
        """What is compared."""
        return self.queue_s + self.prefill_s + self.decode_s


def estimate(replica: Replica, rates: Rates, booked: Booked, attempt: Attempt) -> Estimate:
    """Estimate `attempt` on a ready `replica` whose context it fits.

    Worked example: 60 tokens waiting at 500 tok/s (0.12 s), a prompt of 140 (0.28 s), 80 tokens at 22 ms on an
    idle batch: the first comes out of prefill, 79 × 22 ms = 1.738 s, together 2.138 s.
    """
    itl_s = rates.itl_s * _batch_growth(replica, booked)
    room = (replica.context_limit or replica.max_model_len) - attempt.prompt_tokens
    answer_tokens = min(attempt.max_tokens, room)
    neighbour_s = max(answer_tokens, TYPICAL_ANSWER_TOKENS) * itl_s
    ahead_s = (replica.waiting_prefill_tokens + booked.prompt_tokens) / rates.prefill_tokens_per_s
    return Estimate(
        queue_s=ahead_s + neighbour_s * max(_missing_slots(replica, booked), _missing_blocks(replica, booked, attempt)),
        prefill_s=attempt.prompt_tokens / rates.prefill_tokens_per_s,
        decode_s=(answer_tokens - 1) * itl_s,
    )


def crowding(replica: Replica, booked: Booked) -> float:
    """Sequences here and on their way, as a share of the batch; above 1 when some must wait."""
    return _sequences(replica, booked) / replica.max_num_seqs


def _sequences(replica: Replica, booked: Booked) -> int:
    return replica.running + replica.waiting + booked.sequences


def _batch_growth(replica: Replica, booked: Booked) -> float:
    """How much slower a step gets than the measured one, once this and all on their way have joined the batch.

    A step costs about a + b·n for n sequences: a reads the weights, b·n is per sequence. The batch limit is set
    near where both are equal, so a full batch steps half as fast as an empty one: cost ∝ 1 + n / max_num_seqs.
    """
    full = replica.max_num_seqs
    measured = min(max(replica.running, 1), full)
    joined = min(_sequences(replica, booked) + 1, full)
    return max(1.0, (full + joined) / (full + measured))


def _missing_slots(replica: Replica, booked: Booked) -> float:
    """Batch slots that must come free first, as a share of the batch: a full batch turns over once per answer."""
    return max(0.0, (_sequences(replica, booked) + 1 - replica.max_num_seqs) / replica.max_num_seqs)


def _missing_blocks(replica: Replica, booked: Booked, attempt: Attempt) -> float:
    """The same for KV blocks: what the prompts ahead and this one lack, as a share of the pool."""
    tokens = replica.waiting_prefill_tokens + booked.prompt_tokens + attempt.prompt_tokens + 1
    lacking = -(-tokens // replica.block_size) - replica.free_blocks
    return max(0.0, lacking / replica.total_blocks)
