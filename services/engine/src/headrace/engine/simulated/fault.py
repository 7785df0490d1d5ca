"""Faults a simulated replica can be told to have, as ``name`` or ``name=value``, separated by commas."""

from __future__ import annotations

import math
from dataclasses import dataclass

from headrace.base.errors import StartError

_ALLOWED = "slow=FACTOR, freeze_after_tokens=N, die_after_tokens=N, garbage_after_tokens=N, full_cache"


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """What goes wrong, and after how many tokens of the whole process (None: never).

    `slow` multiplies the time of every step. `freeze_after_tokens` stops shell and worker (SIGSTOP) as a hung machine
    would; `die_after_tokens` kills both; each strikes in the step after the last good token, 0 in the first step of the
    first sequence. `garbage_after_tokens` makes every later token lie outside the vocabulary. `full_cache` leaves no KV
    block free, so that nothing is ever admitted.
    """

    slow: float = 1.0
    freeze_after_tokens: int | None = None
    die_after_tokens: int | None = None
    garbage_after_tokens: int | None = None
    full_cache: bool = False


def parse_faults(text: str) -> Faults:
    """Read the `fault` setting; StartError names what is wrong and what may be written."""
    slow, full_cache = 1.0, False
    after_tokens: dict[str, int] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, _, value = part.partition("=")
        if part == "full_cache":
            full_cache = True
        elif name == "slow":
            slow = _factor(part, value)
        elif name in ("freeze_after_tokens", "die_after_tokens", "garbage_after_tokens"):
            after_tokens[name] = _count(part, value)
        else:
            raise _wrong(part)
    return Faults(
        slow=slow,
        full_cache=full_cache,
        freeze_after_tokens=after_tokens.get("freeze_after_tokens"),
        die_after_tokens=after_tokens.get("die_after_tokens"),
        garbage_after_tokens=after_tokens.get("garbage_after_tokens"),
    )


def _factor(part: str, value: str) -> float:
    try:
        factor = float(value)
    except ValueError:
        raise _wrong(part) from None
    if not 0.0 < factor < math.inf:
        raise _wrong(part)
    return factor


def _count(part: str, value: str) -> int:
    if not (value.isascii() and value.isdigit()):
        raise _wrong(part)
    return int(value)


def _wrong(part: str) -> StartError:
    return StartError(f"fault {part!r} is not one of: {_ALLOWED} (FACTOR above 0, N a whole number)")
