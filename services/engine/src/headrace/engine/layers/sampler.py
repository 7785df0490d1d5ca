"""From logits to tokens: every row on its own, every draw a pure function of its sequence and its mask.

In order: raw log-probabilities; forbidden tokens (allowed, banned, grammar, ends before min_tokens); logit bias;
repetition, frequency and presence penalties; then the likeliest token, or temperature, top_k, top_p, min_p and a draw.
A draw adds Gumbel noise to the scaled logits and takes the largest: an exact sample from the softmax. Noise is a hash
of (seed, position, token), so neither the batch nor a preemption nor a migration can change an answer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from headrace.engine.core.finish import ErrorReason, Problem
from headrace.engine.core.sampling_plan import SamplingPlan
from headrace.engine.core.step import Computed, Logprobs, SequenceSlice
from headrace.engine.layers.logprob import logprobs_of
from headrace.engine.layers.noise import Floats, gumbel, loudest
from headrace.engine.layers.rules import Rules, TokenBits, forbid_others
from headrace.engine.layers.truncation import least_kept

if TYPE_CHECKING:  # a worker on the native kernels never imports torch
    from torch import Tensor

# Below this an answer is greedy: two logits a thousandth apart are a hundred temperatures apart.
LEAST_TEMPERATURE = 1e-5

NOT_NUMBERS = Problem(reason=ErrorReason.NUMERICAL, message="the model's logits for this sequence are not numbers")
NOTHING_ALLOWED = Problem(
    reason=ErrorReason.NO_TOKEN_ALLOWED,
    message="allowed and banned tokens, the constraint and min_tokens together leave no token to sample",
    field="sampling",
)


def prompt_logprobs(logits: Tensor | Floats, token_ids: Sequence[int], top: int) -> list[Logprobs] | Problem:
    """Those of ``token_ids[i]`` by row i of `logits`, float32 [tokens, vocabulary]."""
    rows = np.asarray(logits)
    if not np.isfinite(rows.max(axis=1)).all():
        return NOT_NUMBERS
    return [logprobs_of(row, token_id, top) for row, token_id in zip(rows, token_ids, strict=True)]


class Sampler:
    """Draws the tokens of one model's sequences.

    It keeps the rules of the sequences it saw in the last step, found by `sequence_id`: an id names one growing list
    of tokens. A sequence that comes back after a pause has its rules made anew, with the same result.
    """

    def __init__(self, eos_ids: frozenset[int]) -> None:
        self._eos_ids = eos_ids
        self._rules: dict[int, Rules] = {}

    def sample(
        self, logits: Tensor | Floats, slices: Sequence[SequenceSlice], masks: Mapping[int, TokenBits]
    ) -> list[Computed]:
        """The token (or problem) and, if asked for, log-probabilities of each row of `logits`.

        `logits` is float32 [rows, vocabulary] and is left as it is; row i belongs to ``slices[i]``, all of which
        sample. Among equal logits the lowest token id wins.
        """
        rows = np.asarray(logits)
        likeliest = rows.argmax(axis=1).tolist()  # numpy: 2 us a row, torch: 26
        kept: dict[int, Rules] = {}
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            computed = [
                self._sample(row, best, piece, masks.get(piece.sequence_id), kept)
                for row, best, piece in zip(rows, likeliest, slices, strict=True)
            ]
        self._rules = kept
        return computed

    def _sample(
        self, raw: Floats, best: int, piece: SequenceSlice, mask: TokenBits | None, kept: dict[int, Rules]
    ) -> Computed:
        plan = piece.plan
        if not math.isfinite(raw[best]):  # the largest of a row with a NaN is that NaN
            return Computed(problem=NOT_NUMBERS)
        row = raw
        if plan.has_rules:
            rules = kept[piece.sequence_id] = self._rules_of(piece, len(raw))
            row = raw.copy()
            rules.apply(row, piece.known_token_ids, piece.prompt_length, mask)
        elif mask is not None:
            row = raw.copy()
            forbid_others(row, mask)
        if row is not raw:
            best = int(row.argmax())
            if row[best] == -np.inf:
                return Computed(problem=NOTHING_ALLOWED)
        token_id = _chosen(row, best, plan, piece.start + len(piece.token_ids))
        logprobs = None if plan.logprobs is None else logprobs_of(raw, token_id, plan.logprobs)
        return Computed(token_id=token_id, logprobs=logprobs)

    def _rules_of(self, piece: SequenceSlice, vocab_size: int) -> Rules:
        rules = self._rules.get(piece.sequence_id)
        if rules is None or not rules.fit(piece.plan, piece.known_token_ids, piece.prompt_length):
            rules = Rules(piece.plan, self._eos_ids, vocab_size)
        return rules


def _chosen(row: Floats, best: int, plan: SamplingPlan, position: int) -> int:
    """The token for `position`, whose likeliest is `best`."""
    if plan.temperature < LEAST_TEMPERATURE or plan.top_k == 1:
        return best
    scaled = (row - row[best]) / np.float32(plan.temperature)  # at most 0, so nothing overflows upwards
    least = least_kept(scaled, plan)
    if least is None:
        return loudest(scaled, plan.seed, position)
    kept = (scaled >= least).nonzero()[0]
    return int(kept[(scaled[kept] + gumbel(plan.seed, position, kept.astype(np.uint32))).argmax()])
