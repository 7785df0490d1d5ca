"""What crosses the socket between the gRPC shell and its worker, and how.

A frame is a length (4 bytes, little-endian) and one message, pickled. Pickle is safe here and only here: both ends are
our own code in the same interpreter, and nobody else can reach a socket pair. Instants are CLOCK_MONOTONIC seconds,
which all processes of a machine share.

The shell sends Configure once, then Submit, Abort and Ping; closing its end stops the worker. The worker sends
WorkerReady or StartFailed once, then one StepEvent per step, LongStep before a step that takes long, and Failed before
it dies of an exception.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from headrace.engine.core.cache_event import CacheEvent
from headrace.engine.core.finish import Finish
from headrace.engine.core.load import Load
from headrace.engine.core.placement import USUAL, Placement
from headrace.engine.core.sampling_plan import SamplingPlan
from headrace.engine.core.step import Hold, Logprobs
from headrace.engine.worker.config import WorkerConfig

_LENGTH = struct.Struct("<I")
HEADER_BYTES = _LENGTH.size


@dataclass(frozen=True, slots=True, kw_only=True)
class Configure:
    """The first message to a worker."""

    config: WorkerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """Start `n` answers to one prompt, with ids `sequence_id` to ``sequence_id + n - 1`` and seeds ``plan.seed + i``.

    `emitted_tokens` at the end of `token_ids` are an earlier attempt's part of the answer.
    """

    sequence_id: int
    token_ids: Sequence[int]
    plan: SamplingPlan
    arrived_at: float
    deadline_at: float
    n: int = 1
    emitted_tokens: int = 0
    placement: Placement = USUAL


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """End a sequence."""

    sequence_id: int


@dataclass(frozen=True, slots=True)
class Ping:
    """Say something: a StepEvent follows, after the step that is being computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LongStep:
    """The worker will not be heard for up to `may_take_s`: the step that begins now is a long one."""

    may_take_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReady:
    """What a started, warmed-up worker says of itself."""

    vocab_size: int
    eos_ids: frozenset[int]
    max_model_len: int
    block_size: int
    load: Load  # total_blocks, and the rates its warm-up measured
    computes_on: str  # for the log: which kernels, and why not faster ones


@dataclass(frozen=True, slots=True, kw_only=True)
class StartFailed:
    """The worker cannot start; the text is for the operator."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The worker is about to die of an exception, which the text names."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEvent:
    """One step's news in columns: ``sequence_ids[i]`` emitted ``token_ids[i]``.

    A sequence that emitted several tokens (guesses came true) comes once for each, in order and in a row.

    A sequence's last token and its finish come in the same event; after the finish its id is never heard of again.
    `load` is None when the last one sent is of the latest 50 ms and nothing has begun or ended since. `logprobs` are
    (sequence id, of its token) for those that asked. `hold` is why the first waiting sequence still waits, None when
    none does; `preemptions` is how many sequences lost their blocks in this step; `cache_events` are what changed in
    the prefix cache, in order.
    """

    sequence_ids: Sequence[int]
    token_ids: Sequence[int]
    finishes: tuple[Finish, ...]
    load: Load | None = None
    logprobs: tuple[tuple[int, Logprobs], ...] = ()
    hold: Hold | None = None
    preemptions: int = 0
    drafted: int = 0
    accepted: int = 0
    cache_events: tuple[CacheEvent, ...] = ()

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        """One per step: as a plain tuple it is pickled at a fifth of the cost, and mostly holds tokens only."""
        rest = (self.logprobs, self.hold, self.preemptions, self.drafted, self.accepted, self.cache_events)
        if rest == _NOTHING_ELSE:
            return _step_event, (self.sequence_ids, self.token_ids, self.finishes, self.load)
        return _step_event, (self.sequence_ids, self.token_ids, self.finishes, self.load, *rest)


_NOTHING_ELSE = ((), None, 0, 0, 0, ())


def _step_event(
    sequence_ids: Sequence[int],
    token_ids: Sequence[int],
    finishes: tuple[Finish, ...],
    load: Load | None,
    logprobs: tuple[tuple[int, Logprobs], ...] = (),
    hold: Hold | None = None,
    preemptions: int = 0,
    drafted: int = 0,
    accepted: int = 0,
    cache_events: tuple[CacheEvent, ...] = (),
) -> StepEvent:
    return StepEvent(
        sequence_ids=sequence_ids,
        token_ids=token_ids,
        finishes=finishes,
        load=load,
        logprobs=logprobs,
        hold=hold,
        preemptions=preemptions,
        drafted=drafted,
        accepted=accepted,
        cache_events=cache_events,
    )


Command = Configure | Submit | Abort | Ping
Report = WorkerReady | StartFailed | Failed | LongStep | StepEvent


def encode(message: Command | Report) -> bytes:
    """The message as one frame."""
    payload = pickle.dumps(message, protocol=5)
    return _LENGTH.pack(len(payload)) + payload


def decode(payload: bytes) -> Command | Report:
    """The message of one frame's payload."""
    message: Command | Report = pickle.loads(payload)
    return message


def payload_bytes(header: bytes) -> int:
    """How long the payload is that follows this header."""
    return int(_LENGTH.unpack(header)[0])


class FrameBuffer:
    """Cuts a stream of bytes into messages."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[Command | Report]:
        """The messages that `data` completes."""
        self._bytes += data
        while len(self._bytes) >= HEADER_BYTES:
            end = HEADER_BYTES + payload_bytes(bytes(self._bytes[:HEADER_BYTES]))
            if len(self._bytes) < end:
                return
            payload = bytes(self._bytes[HEADER_BYTES:end])
            del self._bytes[:end]
            yield decode(payload)
