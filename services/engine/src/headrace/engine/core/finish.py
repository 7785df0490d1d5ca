"""How sequences end, and why some never begin."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from headrace.engine.core.likelihood import Logprobs


class FinishReason(Enum):
    """Why a sequence ended, by the protocol's names."""

    STOP = "STOP"
    LENGTH = "LENGTH"
    CANCELLED = "CANCELLED"
    ERROR = "ERROR"


class ErrorReason(Enum):
    """What went wrong, for a finish that is CANCELLED or ERROR."""

    CANCELLED = "CANCELLED"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    QUEUE_FULL = "QUEUE_FULL"
    EMPTY_PROMPT = "EMPTY_PROMPT"
    TOKEN_OUT_OF_RANGE = "TOKEN_OUT_OF_RANGE"
    CONTEXT_EXCEEDED = "CONTEXT_EXCEEDED"
    CACHE_EXCEEDED = "CACHE_EXCEEDED"
    INVALID_FIELD = "INVALID_FIELD"
    NUMERICAL = "NUMERICAL"  # the model's logits are not numbers
    NO_TOKEN_ALLOWED = "NO_TOKEN_ALLOWED"  # masks, bans and min_tokens together leave nothing to sample
    DRAINING = "DRAINING"  # this replica is about to end
    WORKER_STALLED = "WORKER_STALLED"  # what computes on this replica does not answer
    GRAMMAR_BROKEN = "GRAMMAR_BROKEN"  # a fault of ours: no tokenizer to compile for, or a token the grammar forbids


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """An error as data: the reason for programs, the message for people, the field a client has to change."""

    reason: ErrorReason
    message: str
    field: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """The end of one sequence; `problem` is set when `reason` is CANCELLED or ERROR.

    `queue_ms` runs from arrival to the start of prefill, `prefill_ms` from there to the first token; each ends with
    the sequence if it got no further; `later_ms` are the times from each token to the next, pauses by preemption
    included. `cached_tokens` is what the prefix cache held of the prompt when it was first
    admitted. `prompt_logprobs` has one entry per prompt token after the first, when asked for, as far as it got.
    """

    sequence_id: int
    reason: FinishReason
    problem: Problem | None = None
    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    later_ms: tuple[float, ...] = ()
    prefill_chunks: int = 0
    preemptions: int = 0
    cached_tokens: int = 0
    prompt_logprobs: tuple[Logprobs, ...] = ()
