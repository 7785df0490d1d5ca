"""Ids that sort by time."""

from __future__ import annotations

import os
import re
import time

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford base 32: no letter looks like a digit
_PAIRS = [a + b for a in _ALPHABET for b in _ALPHABET]
_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,64}")


def new_request_id() -> str:
    """26 characters: 48 bits of unix milliseconds, then 80 random bits (the ULID layout)."""
    number = (time.time_ns() // 1_000_000) << 80 | int.from_bytes(os.urandom(10), "big")
    return "".join([_PAIRS[(number >> shift) & 1023] for shift in range(120, -1, -10)])


def is_request_id(text: str) -> bool:
    """Whether a caller's id may be taken over: short, and safe in logs and keys."""
    return _REQUEST_ID.fullmatch(text) is not None


def new_epoch() -> int:
    """Unix nanoseconds now: larger for every later start of the same process."""
    return time.time_ns()
