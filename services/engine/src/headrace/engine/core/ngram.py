"""Guesses at what comes next, looked up in the sequence itself: what followed the last time it said the same.

Prompt lookup (Saxena 2023): answers that edit, quote or repeat say again what stands before them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """How guesses are made: at most `tokens` of them at a time, by n-grams of `shortest` to `longest` tokens.

    Nothing is guessed in a step of more than `most_sequences`: a large batch has no time to spare. ValueError names
    the bound that cannot be.
    """

    tokens: int
    longest: int
    shortest: int
    most_sequences: int

    def __post_init__(self) -> None:
        if not 1 <= self.shortest <= self.longest:
            raise ValueError(f"prompt_lookup_min={self.shortest} must be from 1 to prompt_lookup_max={self.longest}")
        if self.tokens < 1:
            raise ValueError(f"num_speculative_tokens={self.tokens} must be at least 1")


class NgramIndex:
    """Where each n-gram of one growing sequence last ended. Each token is taken in once, so a step costs the new ones.

    For a prompt of 8,192 tokens and three lengths that is 6 ms, once, and 320 bytes per token; then 2 us per token.
    """

    def __init__(self, *, shortest: int, longest: int) -> None:
        self._lengths = range(longest, shortest - 1, -1)
        self._ends: dict[tuple[int, ...], int] = {}
        self._taken_in = 0

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """`count` guesses at what follows `tokens`, or none: what followed the newest earlier place that ends alike.

        Longer n-grams are preferred to shorter ones. Where the earlier place is so near that what follows it runs into
        the end of `tokens`, the guesses go on by repeating themselves. `tokens` must only have grown since last time.
        """
        end = len(tokens)
        self._take_in(tokens, end - 1)
        for length in self._lengths:
            place = self._ends.get(tuple(tokens[end - length :])) if length < end else None
            if place is not None:
                following = list(tokens[place : place + count])
                period = end - place
                for at in range(len(following), count):
                    following.append(following[at - period])
                return following
        return []

    def _take_in(self, tokens: Sequence[int], until: int) -> None:
        """Note every n-gram that ends at or before `until`, so not the one that ends the sequence."""
        ends = self._ends
        for end in range(self._taken_in + 1, until + 1):
            for length in self._lengths:
                if length <= end:
                    ends[tuple(tokens[end - length : end])] = end
        self._taken_in = max(self._taken_in, until)
