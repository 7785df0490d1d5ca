"""The account of one request, as it lies in memory that outlives its process.

A slot is a fixed piece of a file mapped into memory, and every note is a store into it. What was stored is in the
kernel's hands at once: killing the process at any instruction loses nothing that was noted before. Numbers are stored
whole (one aligned 64-bit move); what is longer is written first and made valid by a number stored last.

    state | kind | body length, CRC | prompt | cached | output | ended | attempts      8 numbers of 64 bits
    outcome                                                                            64 bytes
    body: what was known at admission, or an audit event                               576 bytes
    12 attempts: number | epoch | tokens, outcome (24 bytes), engine (64 bytes)        1344 bytes
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from enum import IntEnum

SLOT_BYTES = 2048
"""Two to a page of 4096 bytes, so that no slot lies across two pages, which a power cut may part."""

_HEADER = 8
_OUTCOME_AT, _OUTCOME_BYTES = 64, 64
_BODY_AT = 128
MOST_ATTEMPTS = 12
_ATTEMPT_BYTES = 112
_ATTEMPTS_AT = SLOT_BYTES - MOST_ATTEMPTS * _ATTEMPT_BYTES
_ATTEMPT_OUTCOME, _ATTEMPT_ENGINE = 24, 48  # offsets of the texts within an attempt

MOST_USAGE_BODY = _ATTEMPTS_AT - _BODY_AT
MOST_AUDIT_BODY = SLOT_BYTES - _BODY_AT
"""An audit event has no attempts, and their place as well."""

_STATE, _KIND, _BODY, _PROMPT, _CACHED, _OUTPUT, _ENDED, _ATTEMPTS = range(_HEADER)


class State(IntEnum):
    """What a slot holds. Zero, as in a new file, is nothing."""

    FREE = 0
    OPEN = 1
    CLOSED = 2


class Kind(IntEnum):
    """What a record is about."""

    USAGE = 1
    AUDIT = 2


_STATES, _KINDS = frozenset(State), frozenset(Kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptNote:
    """One attempt as noted; an empty outcome: it had not ended."""

    number: int
    engine_id: str
    epoch: int
    tokens: int
    outcome: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What a slot says. `closed` is False for a request whose gateway ended before it did."""

    kind: Kind
    closed: bool
    body: bytes
    prompt: int = 0
    cached: int = 0
    output: int = 0
    ended_ns: int = 0
    outcome: str = ""
    attempts: tuple[AttemptNote, ...] = ()


class Damaged(Exception):
    """A slot says that it holds something, and does not: its page was written halfway when the power went."""


class Slot:
    """One slot, for writing. `memory` is exactly its bytes; nothing here waits, and nothing raises on good memory."""

    __slots__ = ("_memory", "_numbers", "extra")

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._numbers = memory.cast("Q")
        self.extra: dict[int, AttemptNote] = {}  # attempts beyond the slot's room, in this process's memory only

    def open(self, kind: Kind, body: bytes) -> None:
        """Begin; the body may be as long as the kind's bound."""
        numbers = self._numbers
        numbers[_STATE] = State.FREE
        for field in (_PROMPT, _CACHED, _OUTPUT, _ENDED, _ATTEMPTS):
            numbers[field] = 0
        self._text(_OUTCOME_AT, _OUTCOME_BYTES, "")
        self._memory[_BODY_AT : _BODY_AT + len(body)] = body
        numbers[_KIND] = kind
        numbers[_BODY] = len(body) << 32 | zlib.crc32(body)
        numbers[_STATE] = State.OPEN

    def prompt(self, tokens: int) -> None:
        """Set the prompt's length."""
        self._numbers[_PROMPT] = tokens

    def cached(self, tokens: int) -> None:
        """Set how much of the prompt was cached."""
        self._numbers[_CACHED] = tokens

    def output(self, tokens: int) -> None:
        """Set the answer's length, instead of the sum of what was added."""
        self._numbers[_OUTPUT] = tokens

    def attempt(self, number: int, engine_id: str, epoch: int) -> int | None:
        """Add an attempt; where to add its tokens, or None when there is no room left for it."""
        count = self._numbers[_ATTEMPTS]
        if count == MOST_ATTEMPTS:
            self.extra[number] = AttemptNote(number=number, engine_id=engine_id, epoch=epoch, tokens=0, outcome="")
            return None
        at = _ATTEMPTS_AT + count * _ATTEMPT_BYTES
        self._text(at + _ATTEMPT_OUTCOME, _ATTEMPT_ENGINE - _ATTEMPT_OUTCOME, "")
        self._text(at + _ATTEMPT_ENGINE, _ATTEMPT_BYTES - _ATTEMPT_ENGINE, engine_id)
        index = at // 8
        self._numbers[index] = number
        self._numbers[index + 1] = epoch
        self._numbers[index + 2] = 0
        self._numbers[_ATTEMPTS] = count + 1
        return index + 2

    def add_tokens(self, where: int | None, tokens: int) -> None:
        """Count output tokens, of the attempt at `where`."""
        # The total first: a kill between the two may leave the attempt's share short, never the bill.
        self._numbers[_OUTPUT] += tokens
        if where is not None:
            self._numbers[where] += tokens

    def attempt_ended(self, where: int, outcome: str) -> None:
        """Say how the attempt at `where` ended."""
        at = 8 * (where - 2)
        self._text(at + _ATTEMPT_OUTCOME, _ATTEMPT_ENGINE - _ATTEMPT_OUTCOME, outcome)

    def close(self, outcome: str, ended_ns: int) -> None:
        """Finish; what is noted afterwards does not count."""
        self._text(_OUTCOME_AT, _OUTCOME_BYTES, outcome)
        self._numbers[_ENDED] = ended_ns
        self._numbers[_STATE] = State.CLOSED

    def read(self) -> Entry | None:
        """What it holds; see `read_slot`."""
        return read_slot(self._memory)

    def free(self) -> None:
        """Hold nothing."""
        self.extra = {}
        self._numbers[_STATE] = State.FREE

    def _text(self, at: int, room: int, text: str) -> None:
        """Write a text, cut to its room."""
        self._memory[at : at + room] = _cut(text, room).ljust(room, b"\0")


def read_slot(memory: memoryview) -> Entry | None:
    """What a slot holds; None for a free one. Raises Damaged."""
    numbers = memory.cast("Q")
    state, kind = numbers[_STATE], numbers[_KIND]
    if state == State.FREE:
        return None
    length, crc = numbers[_BODY] >> 32, numbers[_BODY] & 0xFFFFFFFF
    body = bytes(memory[_BODY_AT : _BODY_AT + length])
    if state not in _STATES or kind not in _KINDS or length > MOST_AUDIT_BODY or zlib.crc32(body) != crc:
        raise Damaged
    closed = state == State.CLOSED
    if kind == Kind.AUDIT:
        return Entry(kind=Kind.AUDIT, closed=closed, body=body)
    if numbers[_ATTEMPTS] > MOST_ATTEMPTS:
        raise Damaged
    return Entry(
        kind=Kind.USAGE,
        closed=closed,
        body=body,
        prompt=numbers[_PROMPT],
        cached=numbers[_CACHED],
        output=numbers[_OUTPUT],
        ended_ns=numbers[_ENDED] if closed else 0,
        outcome=_read_text(memory, _OUTCOME_AT, _OUTCOME_BYTES) if closed else "",
        attempts=tuple(_attempt(memory, numbers, number) for number in range(numbers[_ATTEMPTS])),
    )


def _attempt(memory: memoryview, numbers: memoryview, place: int) -> AttemptNote:
    at = _ATTEMPTS_AT + place * _ATTEMPT_BYTES
    return AttemptNote(
        number=numbers[at // 8],
        epoch=numbers[at // 8 + 1],
        tokens=numbers[at // 8 + 2],
        outcome=_read_text(memory, at + _ATTEMPT_OUTCOME, _ATTEMPT_ENGINE - _ATTEMPT_OUTCOME),
        engine_id=_read_text(memory, at + _ATTEMPT_ENGINE, _ATTEMPT_BYTES - _ATTEMPT_ENGINE),
    )


def _read_text(memory: memoryview, at: int, room: int) -> str:
    return bytes(memory[at : at + room]).rstrip(b"\0").decode(errors="replace")


def _cut(text: str, room: int) -> bytes:
    """UTF-8 of the text, no longer than the room and never ending within a character."""
    data = text.encode(errors="replace")
    return data if len(data) <= room else data[:room].decode(errors="ignore").encode()
