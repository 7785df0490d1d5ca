"""What crosses the socket between the gRPC shell and its worker, and how.

A frame is a length (4 bytes, little-endian) and one message, pickled; a StepEvent that holds little but tokens goes as
plain numbers, at a fifth of the cost, since there is one per step. Pickle is safe here and only here: both ends are our
own code in the same interpreter, and nobody else can reach a socket pair. Instants are CLOCK_MONOTONIC seconds, which
all processes of a machine share.

The shell sends Configure once, then Submit, Abort and Ping; closing its end stops the worker. The worker sends
WorkerReady or StartFailed once, then one StepEvent per step, LongStep before a step that takes long, and Failed before
it dies of an exception.
"""

from __future__ import annotations

import pickle
import struct
from array import array
from collections.abc import Sequence
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
# Of a plain event: the first byte of its payload, where a pickle has its own mark, then its hold and its guesses. Ids
# and tokens follow, 8 bytes each.
_PLAIN = 0
_PLAIN_HEADER = struct.Struct("<BBII")
_HOLDS = (None, *Hold)
_HOLD_AT = {hold: at for at, hold in enumerate(_HOLDS)}


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


@dataclass(slots=True, kw_only=True)
class StepEvent:
    """One step's news in columns: ``sequence_ids[i]`` emitted ``token_ids[i]``.

    A sequence that emitted several tokens (guesses came true) comes once for each, in order and in a row.

    A sequence's last token and its finish come in the same event; after the finish its id is never heard of again.
    `load` is None when the last one sent is of the latest 50 ms and nothing has begun or ended since. `logprobs` are
    (sequence id, of its token) for those that asked. `hold` is why the first waiting sequence still waits, None when
    none does; `preemptions` is how many sequences lost their blocks in this step; `cache_events`, in order, are what
    changed in the prefix cache since the last load: they come with one. Nobody changes an event; frozen, it would take
    three times as long to make, once per step.
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


Command = Configure | Submit | Abort | Ping
Report = WorkerReady | StartFailed | Failed | LongStep | StepEvent


def encode(message: Command | Report) -> bytes:
    """The message as one frame."""
    if type(message) is StepEvent and _is_plain(message):
        payload = _PLAIN_HEADER.pack(_PLAIN, _HOLD_AT[message.hold], message.drafted, message.accepted)
        payload += array("q", [*message.sequence_ids, *message.token_ids]).tobytes()
    else:
        payload = pickle.dumps(message, protocol=5)
    return _LENGTH.pack(len(payload)) + payload


def decode(payload: bytes) -> Command | Report:
    """The message of one frame's payload."""
    if payload[0] != _PLAIN:
        message: Command | Report = pickle.loads(payload)
        return message
    _, hold, drafted, accepted = _PLAIN_HEADER.unpack_from(payload)
    numbers = array("q", payload[_PLAIN_HEADER.size :]).tolist()
    half = len(numbers) // 2
    return StepEvent(
        sequence_ids=numbers[:half],
        token_ids=numbers[half:],
        finishes=(),
        hold=_HOLDS[hold],
        drafted=drafted,
        accepted=accepted,
    )


def _is_plain(event: StepEvent) -> bool:
    return event.load is None and not (event.finishes or event.logprobs or event.preemptions or event.cache_events)


def payload_bytes(header: bytes) -> int:
    """How long the payload is that follows this header."""
    return int(_LENGTH.unpack(header)[0])


class FrameBuffer:
    """Cuts a stream of bytes into messages."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._wanted = 0  # how much of it there must be for the next look

    def feed(self, data: bytes) -> list[Command | Report]:
        """The messages that `data` completes."""
        if self._rest:
            self._rest += data
            if len(self._rest) < self._wanted:
                return []
            data, self._rest = bytes(self._rest), bytearray()
        messages: list[Command | Report] = []
        at, self._wanted = 0, HEADER_BYTES
        while len(data) - at >= HEADER_BYTES:
            begin = at + HEADER_BYTES
            end = begin + payload_bytes(data[at:begin])
            if end > len(data):
                self._wanted = end - at
                break
            messages.append(decode(data[begin:end]))
            at = end
        self._rest += data[at:]
        return messages
