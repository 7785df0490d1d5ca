"""How many prompt tokens a step may compute beside running streams, so that those keep their rhythm.

A chunk of 512 tokens takes the shipped model 125 ms, a step of decodes 7 ms: bounded by tokens alone, a long prompt
makes everybody else's next token wait seventeen times as long. So a step that carries streams is bounded by time. It
may take `max_itl_stretch` times what its decodes take alone; what a prompt token costs beside them is learned from each
such step. Durations are arguments; nothing here looks at a clock.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum

# Prompts get on by so many tokens at least. Beside decodes a token in a chunk of 4 costs the native kernels no more
# than one in a chunk of 64, so chunks need not be large, nor multiples of anything.
_LEAST = 4
# What is known is the median of so many measurements: two spikes of a busy machine do not move it, three steps do.
_REMEMBERED = 5
# After so many steps with prompts one carries decodes alone. Otherwise a machine that has become slower meanwhile would
# look like prompts that have become dearer. Costs a prompt 3 % of its time.
_YARDSTICK_EVERY = 16
_MOST_UNREAD = 64


class PaceReason(Enum):
    """What decided a pace."""

    UNMEASURED = "UNMEASURED"  # nothing is known yet of decodes alone, or of prompts: as many as there is room for
    YARDSTICK = "YARDSTICK"  # none: this step measures anew what the decodes take alone
    STRETCH = "STRETCH"  # as many as fit into the time by which the step may be longer than its decodes alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Up to `tokens` prompt tokens beside the decodes of one step, for which `allowed_s` seconds were reckoned."""

    tokens: int
    reason: PaceReason
    allowed_s: float = 0.0


class Pacer:
    """Learns from steps how long they take, and says how much of prompts the next one may hold.

    ValueError for a stretch that leaves prompts no time at all.
    """

    def __init__(self, max_itl_stretch: float) -> None:
        if not max_itl_stretch > 1:
            raise ValueError(f"max_itl_stretch={max_itl_stretch:g} must be above 1, or 0 for no pacing")
        self._stretch = max_itl_stretch
        # Seconds of the latest steps with so many decodes and nothing else.
        self._alone: dict[int, _Latest] = {}
        # Seconds that prompt tokens cost: as decodes felt it, and before that a first idea from prompts alone.
        self._beside = _Latest()
        self._first_idea: float | None = None
        self._mixed = 0  # steps with decodes and prompts since the last one with decodes alone
        self._unread: list[tuple[float, int, int]] = []

    def pace(self, *, decodes: int, prompts: int, most: int) -> Pace:
        """For a step with `decodes` streams, while `prompts` sequences want their prompt computed.

        Never more than `most`. Never nothing twice in a row, so prompts get on. Who waits counts as much as who reads:
        with twice as many prompts as streams a step may stretch twice as long. Example: 4 decodes take 10 ms alone, a
        prompt token costs 0.25 ms: at a stretch of 2.2 one or up to four prompts have 48 tokens, eight have 136.
        """
        self._read()
        yardstick_s, token_s = self._yardstick_s(decodes), self._beside.median_s or self._first_idea
        if yardstick_s is None or token_s is None:
            return Pace(tokens=most, reason=PaceReason.UNMEASURED)
        if self._mixed >= _YARDSTICK_EVERY or (self._mixed and decodes not in self._alone):
            return Pace(tokens=0, reason=PaceReason.YARDSTICK)
        allowed_s = (self._stretch * max(1.0, prompts / decodes) - 1) * yardstick_s
        tokens = most if most * token_s <= allowed_s else max(_LEAST, int(allowed_s / token_s))
        return Pace(tokens=min(most, tokens), reason=PaceReason.STRETCH, allowed_s=allowed_s)

    def note(self, *, duration_s: float, decodes: int, prefill_tokens: int) -> None:
        """Learn from a computed step; one without a duration teaches nothing but that it was there.

        That happens when a pace is asked for: most steps have no prompts, and every step waits for this.
        """
        self._unread.append((duration_s, decodes, prefill_tokens))
        if len(self._unread) >= _MOST_UNREAD:
            self._read()

    def _read(self) -> None:
        for duration_s, decodes, prefill_tokens in self._unread:
            self._learn(duration_s, decodes, prefill_tokens)
        self._unread.clear()

    def _learn(self, duration_s: float, decodes: int, prefill_tokens: int) -> None:
        self._mixed = self._mixed + 1 if decodes and prefill_tokens else 0
        if duration_s <= 0:
            return
        if not prefill_tokens:
            self._alone.setdefault(decodes, _Latest()).note(duration_s)
        elif not decodes:  # the cheapest: of short prompts most is the step's fixed part
            cost_s = duration_s / prefill_tokens
            self._first_idea = cost_s if self._first_idea is None else min(self._first_idea, cost_s)
        elif (yardstick_s := self._yardstick_s(decodes)) is not None:
            self._beside.note(max(0.0, duration_s - yardstick_s) / prefill_tokens)

    def _yardstick_s(self, decodes: int) -> float | None:
        """What so many decodes take alone; if that was not seen yet, what the next fewer took, or the next more."""
        if not self._alone:
            return None
        if decodes not in self._alone:
            fewer = [seen for seen in self._alone if seen < decodes]
            decodes = max(fewer) if fewer else min(self._alone)
        return self._alone[decodes].median_s


class _Latest:
    """The latest measurements of something, and their median: 0 before the first."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=_REMEMBERED)
        self.median_s = 0.0

    def note(self, seconds: float) -> None:
        self._seconds.append(seconds)
        self.median_s = sorted(self._seconds)[len(self._seconds) // 2]
