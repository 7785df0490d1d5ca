"""What a plan does to a row of logits before a token is drawn: forbidden tokens, bias, penalties.

The result is a function of the plan and the known tokens alone. What is kept from one step to the next (token counts,
arrays made of the plan's sets) only saves time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from headrace.engine.core.sampling_plan import SamplingPlan
from headrace.engine.layers.noise import Floats

TokenBits = NDArray[np.int32]
"""Bit t % 32 of word t // 32 is set for token t; ceil(vocabulary / 32) words."""

# A tiny repetition penalty lifts logits out of float32; all of these are then equally certain.
_LARGEST_LOGIT = np.float32(1e30)
_MINUS_INFINITY_BITS = np.int32(-0x800000)


class Rules:
    """One sequence's rules, made once from its plan."""

    def __init__(self, plan: SamplingPlan, eos_ids: frozenset[int], vocab_size: int) -> None:
        self.plan = plan
        self._allowed = _allowed_bits(plan, vocab_size)
        ends = {*plan.stop_token_ids, *(() if plan.ignore_eos else eos_ids)}
        self._ends = np.array(sorted(ends), dtype=np.intp)
        self._biased = np.array(list(plan.logit_bias), dtype=np.intp)
        self._bias = np.array(list(plan.logit_bias.values()), dtype=np.float32)
        self._counts = TokenCounts(with_prompt=plan.repetition_penalty != 1.0) if plan.penalises else None

    def fit(self, plan: SamplingPlan, known: Sequence[int], prompt_length: int) -> bool:
        """Whether these rules were made for this sequence: a cheap check of what its unique id promises."""
        return self.plan is plan and (self._counts is None or self._counts.precede(known, prompt_length))

    def apply(self, row: Floats, known: Sequence[int], prompt_length: int, mask: TokenBits | None) -> None:
        """Change `row` [vocabulary] in place for the token that follows `known`; `mask` is what a grammar allows."""
        plan = self.plan
        if self._allowed is not None:
            mask = self._allowed if mask is None else mask & self._allowed
        if mask is not None:
            forbid_others(row, mask)
        if len(known) - prompt_length < plan.min_tokens:
            ends = row[self._ends]
            row[self._ends] = -np.inf
            # A complete grammar allows nothing but an end, and wins: there is no longer answer of that shape.
            if mask is not None and not (row > -np.inf).any():
                row[self._ends] = ends
        if len(self._biased):
            row[self._biased] += self._bias
        if self._counts is not None:
            self._counts.follow(known, prompt_length)
            self._counts.penalise(row, plan)


class TokenCounts:
    """How often each token occurs in one sequence's answer, and which occur in its prompt (if `with_prompt`).

    It follows a sequence that grows at its end, so a step costs one token, not the whole answer.
    """

    def __init__(self, *, with_prompt: bool) -> None:
        self._with_prompt = with_prompt
        self._known = self._prompt_length = 0  # tokens taken in, and how many of them are the prompt
        self._last = -1
        self._place: dict[int, int] = {}  # token → its place in the columns below
        self._ids = np.empty(64, dtype=np.intp)
        self._times = np.empty(64, dtype=np.float32)  # in the answer; 0 for tokens of the prompt only

    def precede(self, known: Sequence[int], prompt_length: int) -> bool:
        """Whether the tokens taken in so far may be the beginning of `known`."""
        return self._known == 0 or (
            self._prompt_length == prompt_length and self._known <= len(known) and self._last == known[self._known - 1]
        )

    def follow(self, known: Sequence[int], prompt_length: int) -> None:
        """Take in the tokens of `known` that are new."""
        if self._known < prompt_length:
            if self._with_prompt:
                for token in set(known[:prompt_length]):
                    self._add(token, 0)
            self._known = prompt_length
        for token in known[self._known :]:
            self._add(token, 1)
        self._known, self._prompt_length = len(known), prompt_length
        self._last = known[-1] if known else -1

    def penalise(self, row: Floats, plan: SamplingPlan) -> None:
        """Subtract and divide in place, as the plan's penalties say."""
        ids, times = self._ids[: len(self._place)], self._times[: len(self._place)]
        values = row[ids]
        if plan.repetition_penalty != 1.0:
            repetition = np.float32(plan.repetition_penalty)
            values = np.where(values > 0, np.minimum(values / repetition, _LARGEST_LOGIT), values * repetition)
        values -= np.float32(plan.frequency_penalty) * times
        values -= np.float32(plan.presence_penalty) * (times > 0)
        row[ids] = values

    def _add(self, token: int, times: int) -> None:
        place = self._place.get(token)
        if place is None:
            place = self._place[token] = len(self._place)
            if place == len(self._ids):
                self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
                self._times = np.concatenate([self._times, np.empty_like(self._times)])
            self._ids[place] = token
            self._times[place] = 0
        self._times[place] += times


def forbid_others(row: Floats, allowed: TokenBits) -> None:
    """Set to -inf what `allowed` has no bit for.

    -inf is added where the bit is 0 and 0.0 where it is 1, both made of bits: 0.03 ms for 49,152 tokens, whatever the
    pattern, where a masked assignment takes up to 0.14.
    """
    bits = np.unpackbits(allowed.view(np.uint8), count=len(row), bitorder="little").astype(np.int32)
    row += ((bits - 1) & _MINUS_INFINITY_BITS).view(np.float32)


def bits_of(token_ids: Iterable[int], vocab_size: int) -> TokenBits:
    """The set of these tokens."""
    flags = np.zeros(-(-vocab_size // 32) * 32, dtype=np.bool_)
    flags[np.fromiter(token_ids, dtype=np.intp)] = True
    return np.packbits(flags, bitorder="little").view(np.int32)


def _allowed_bits(plan: SamplingPlan, vocab_size: int) -> TokenBits | None:
    allowed = None if plan.allowed_token_ids is None else bits_of(plan.allowed_token_ids, vocab_size)
    if not plan.banned_token_ids:
        return allowed
    unbanned = ~bits_of(plan.banned_token_ids, vocab_size)
    return unbanned if allowed is None else allowed & unbanned
