"""A backend without a model: real scheduling and paging, simulated time, and tokens that follow from the prefix alone.

Each KV slot holds a hash of all tokens up to its position, computed from the slot before it through the block table,
so a wrong block table changes the answer here as it would in a model. The next token is picked by that hash: an answer
resumed elsewhere from prompt + emitted tokens goes on exactly as the unbroken one. Every word is as likely as every
other: allowed and banned tokens and grammars are obeyed, penalties and truncations change nothing.

With `simulate_echo_tokens` seven of eight tokens are those that stood so many places before, read through the block
table as well: text in which guesses come true.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from headrace.base.errors import StartError
from headrace.engine.core.finish import ErrorReason, Problem
from headrace.engine.core.likelihood import Likelihood, Logprobs
from headrace.engine.core.sampling_plan import SamplingPlan
from headrace.engine.core.step import Computed, SequenceSlice
from headrace.engine.simulated.fault import parse_faults
from headrace.engine.simulated.timing import Timing
from headrace.engine.worker.backend import TokenMask
from headrace.engine.worker.config import WorkerConfig

# SmolLM2-135M's shape: what the gateway's tokenizer expects, and its float32 keys and values
# (30 layers x 2 x 3 heads x 64 x 4 bytes).
_VOCAB_SIZE = 49_152
_EOS_IDS = frozenset({2})
_MAX_MODEL_LEN = 8_192
_KV_BYTES_PER_TOKEN = 46_080

# Token ids of SmolLM2's tokenizer that are a space and a whole English word of four letters or more: the first 64 by
# id that are not also the beginning of longer words. "that with from this have they will which ..."
# fmt: off
_WORDS = (
    338, 351, 429, 451, 457, 502, 523, 527, 540, 550, 563, 592, 597, 601, 618, 623,
    634, 645, 655, 656, 665, 670, 690, 699, 701, 702, 713, 715, 719, 724, 732, 736,
    737, 738, 746, 768, 800, 804, 805, 808, 826, 835, 837, 856, 864, 868, 876, 896,
    897, 904, 905, 908, 913, 915, 919, 929, 940, 965, 967, 971, 975, 979, 980, 981,
)
# fmt: on

# What the log-probabilities say: words share all of the probability but one part in a million.
_WORD_LOGPROB = math.log((1 - 1e-6) / len(_WORDS))
_OTHER_LOGPROB = math.log(1e-6 / (_VOCAB_SIZE - len(_WORDS)))
_NOTHING_ALLOWED = Problem(
    reason=ErrorReason.NO_TOKEN_ALLOWED, message="the request's rules leave no token to sample", field="sampling"
)

_LOW_CHOICES = 16
_PER_OWN_WORD = 8  # an echo has one word of its own in so many

# FNV-1a with 64 bits; its high bits are the well-mixed ones.
_OFFSET_BASIS = 0xCBF29CE484222325
_PRIME = 0x100000001B3
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


class SimulatedBackend:
    """Follows `Backend`; StartError when a `simulate_*` value or the cache size cannot be."""

    def __init__(self, config: WorkerConfig) -> None:
        self.vocab_size = _VOCAB_SIZE
        self.eos_ids = _EOS_IDS
        self.max_model_len = _MAX_MODEL_LEN
        self.num_blocks = config.kv_cache_memory_bytes // (_KV_BYTES_PER_TOKEN * config.block_size)
        if self.num_blocks < 1:
            needed = _KV_BYTES_PER_TOKEN * config.block_size
            raise StartError(f"kv_cache_memory_bytes={config.kv_cache_memory_bytes} is less than one block of {needed}")
        self._timing = _timing(config)
        self._warm_up_s = config.simulate_warm_up_s
        self._block_size = config.block_size
        self._echo = config.simulate_echo_tokens
        self._slots = [0] * (self.num_blocks * config.block_size)
        self._tokens = [0] * len(self._slots)

    def warm_up(self) -> None:
        """Take `simulate_warm_up_s`."""
        time.sleep(self._warm_up_s)

    def execute(self, slices: Sequence[SequenceSlice], masks: Mapping[int, TokenMask]) -> list[Computed]:
        """The next words, after as long as the timing model says."""
        prefill_tokens = decodes = 0
        results: list[Computed] = []
        for piece in slices:
            if len(piece.token_ids) == 1 + piece.drafted and piece.start:
                decodes += len(piece.token_ids)
            else:
                prefill_tokens += len(piece.token_ids)
            results.append(self._result(piece, self._compute(piece), masks.get(piece.sequence_id)))
        duration_s = self._timing.duration_s(prefill_tokens=prefill_tokens, decodes=decodes)
        if duration_s:
            time.sleep(duration_s)
        return results

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy the slots of the first block of each pair to the second."""
        size = self._block_size
        for source, target in pairs:
            for store in (self._slots, self._tokens):
                store[target * size : (target + 1) * size] = store[source * size : (source + 1) * size]

    def _compute(self, piece: SequenceSlice) -> list[int]:
        """Fill the slots of the slice's positions; the hashes of the prefixes that its sampled tokens follow."""
        state = self._slots[self._slot(piece, piece.start - 1)] if piece.start else _OFFSET_BASIS
        hashes = []
        for position, token in enumerate(piece.token_ids, piece.start):
            state = ((state ^ (token + 1)) * _PRIME) & _MASK
            slot = self._slot(piece, position)
            self._slots[slot], self._tokens[slot] = state, token
            hashes.append(state)
        return hashes[-1 - piece.drafted :]

    def _result(self, piece: SequenceSlice, hashes: Sequence[int], mask: TokenMask | None) -> Computed:
        """The slice's token, and those after the guesses that came true."""
        prompt_logprobs = _prompt_logprobs(piece)
        if not piece.samples:
            return Computed(prompt_logprobs=prompt_logprobs)
        first = piece.start + len(piece.token_ids) - piece.drafted
        found: list[Computed] = []
        for at, prefix_hash in enumerate(hashes):
            echoed = self._echoed(piece, first + at, prefix_hash)
            found.append(_sampled(piece.plan, prefix_hash, mask, echoed))
            if at < piece.drafted and found[at].token_id != piece.token_ids[at - piece.drafted]:
                break
        return replace(found[0], prompt_logprobs=prompt_logprobs, more=tuple(found[1:]))

    def _echoed(self, piece: SequenceSlice, position: int, prefix_hash: int) -> int | None:
        """The token that is to be said again at `position`, if any."""
        source = position - self._echo
        if not self._echo or source < 0 or (prefix_hash * _GOLDEN & _MASK) >> 32 & (_PER_OWN_WORD - 1) == 0:
            return None
        return self._tokens[self._slot(piece, source)]

    def _slot(self, piece: SequenceSlice, position: int) -> int:
        block, offset = divmod(position, self._block_size)
        return piece.block_table[block] * self._block_size + offset


def _prompt_logprobs(piece: SequenceSlice) -> tuple[Logprobs, ...]:
    if piece.plan.prompt_logprobs is None:
        return ()
    first = piece.start + 1
    following = piece.known_token_ids[first : min(first + len(piece.token_ids), piece.prompt_length)]
    return tuple(_logprobs(token, piece.plan.prompt_logprobs) for token in following)


def _sampled(plan: SamplingPlan, prefix_hash: int, mask: TokenMask | None, echoed: int | None) -> Computed:
    choices = _choices(plan, mask)
    if echoed is not None and (choices is _WORDS or echoed in choices):
        token: int | None = echoed
    else:
        token = _pick(prefix_hash, plan, choices)
    if token is None:
        return Computed(problem=_NOTHING_ALLOWED)
    return Computed(token_id=token, logprobs=None if plan.logprobs is None else _logprobs(token, plan.logprobs))


def _pick(prefix_hash: int, plan: SamplingPlan, choices: Sequence[int]) -> int | None:
    """One of `choices`; sampled sequences with other seeds say other things, greedy ones do not look at the seed."""
    noise = plan.seed * _PRIME if plan.temperature > 0 else 0
    mixed = ((prefix_hash ^ noise) * _GOLDEN) & _MASK
    return choices[(mixed >> 32) * len(choices) >> 32] if choices else None


def _choices(plan: SamplingPlan, mask: TokenMask | None) -> Sequence[int]:
    """The words that may come next; if none may, or under a grammar, the tokens that may with the lowest ids.

    Those are single characters and the end of sequence, so that a grammar's strings and numbers soon close.
    """
    if mask is None and plan.allowed_token_ids is None and not plan.banned_token_ids:
        return _WORDS
    allowed = np.ones(_VOCAB_SIZE, dtype=np.bool_)
    if mask is not None:
        allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")[:_VOCAB_SIZE].astype(np.bool_)
    if plan.allowed_token_ids is not None:
        asked = np.zeros_like(allowed)
        asked[list(plan.allowed_token_ids)] = True
        allowed &= asked
    allowed[list(plan.banned_token_ids)] = False
    words = [word for word in _WORDS if allowed[word]] if mask is None else []
    choices: list[int] = words or allowed.nonzero()[0][:_LOW_CHOICES].tolist()
    return choices


def _logprobs(token: int, count: int) -> Logprobs:
    return Logprobs(token=_likelihood(token), top=tuple(_likelihood(word) for word in _WORDS[:count]))


def _likelihood(token: int) -> Likelihood:
    if token in _WORDS:
        return Likelihood(token_id=token, logprob=_WORD_LOGPROB, rank=1)
    return Likelihood(token_id=token, logprob=_OTHER_LOGPROB, rank=len(_WORDS) + 1)


def _timing(config: WorkerConfig) -> Timing:
    rate = config.simulate_prefill_tokens_per_s
    if not rate > 0:
        raise StartError(f"simulate_prefill_tokens_per_s={rate} must be above 0")
    for name in ("simulate_step_ms", "simulate_itl_ms", "simulate_warm_up_s"):
        if not 0 <= getattr(config, name) < math.inf:
            raise StartError(f"{name}={getattr(config, name)} must be at least 0")
    return Timing(
        step_s=config.simulate_step_ms / 1000,
        prefill_tokens_per_s=rate,
        itl_s=config.simulate_itl_ms / 1000,
        slow=parse_faults(config.fault).slow,
    )
