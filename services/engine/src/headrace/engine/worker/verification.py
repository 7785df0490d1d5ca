"""Which guesses came true: what a backend makes of the rows of a slice that ends with guesses.

A guess is true when it is the token that would have been sampled in its place, so an answer is the same with and
without guesses, whatever its sampling.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from headrace.engine.core.step import Computed, SequenceSlice
from headrace.engine.layers.noise import Floats
from headrace.engine.layers.sampler import NOT_NUMBERS, Sampler
from headrace.engine.worker.backend import TokenMask


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A slice whose tokens are drawn from logits: its first row of them; those after its guesses follow."""

    piece: SequenceSlice
    row: int


def found(token: int) -> Computed:
    """The likeliest token; -1 where logits are not numbers."""
    return Computed(token_id=token) if token >= 0 else Computed(problem=NOT_NUMBERS)


def greedy(piece: SequenceSlice, likeliest: Sequence[int]) -> Computed:
    """`likeliest` are the tokens after the last known one and after each guess, as `found` takes them."""
    guesses = _guesses(piece)
    true = next((i for i, guess in enumerate(guesses) if likeliest[i] != guess), len(guesses))
    return _joined([found(token) for token in likeliest[: true + 1]])


def drawn(sampler: Sampler, logits: Floats, wanted: Sequence[Drawn], masks: Mapping[int, TokenMask]) -> list[Computed]:
    """One result per slice. All slices draw their first token together, then those whose first guess came true."""
    answers: list[list[Computed]] = [[] for _ in wanted]
    turn, depth = list(range(len(wanted))), 0
    while turn:
        rows = [wanted[i].row + depth for i in turn]
        # Without guesses these are all rows, and copying them costs 2 ms for 32 of 49,152 tokens.
        part = logits if len(rows) == len(logits) else logits[rows]
        pieces = [_after_guesses(wanted[i].piece, depth) for i in turn]
        computed = sampler.sample(part, pieces, {} if depth else masks)
        for i, token in zip(turn, computed, strict=True):
            answers[i].append(token)
        turn = [i for i in turn if _guesses(wanted[i].piece)[depth : depth + 1] == [answers[i][-1].token_id]]
        depth += 1
    return [_joined(tokens) for tokens in answers]


def _guesses(piece: SequenceSlice) -> list[int]:
    return list(piece.token_ids[len(piece.token_ids) - piece.drafted :]) if piece.drafted else []


def _after_guesses(piece: SequenceSlice, count: int) -> SequenceSlice:
    """The slice as it would be if its first `count` guesses were known, and nothing else guessed."""
    if not piece.drafted:
        return piece
    end = len(piece.token_ids) - piece.drafted
    guesses = piece.token_ids[end : end + count]
    return replace(
        piece,
        token_ids=piece.token_ids[: end + count],
        known_token_ids=[*piece.known_token_ids, *guesses],
        drafted=0,
    )


def _joined(tokens: list[Computed]) -> Computed:
    return replace(tokens[0], more=tuple(tokens[1:])) if len(tokens) > 1 else tokens[0]
