"""A backend without a model: real scheduling and paging, simulated time, and tokens that follow from the prefix alone.

Each KV slot holds a hash of all tokens up to its position, computed from the slot before it through the block table,
so a wrong block table changes the answer here as it would in a model. The next token is picked by that hash: an answer
resumed elsewhere from prompt + emitted tokens goes on exactly as the unbroken one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from headrace.base.errors import StartError
from headrace.engine.simulated.fault import parse_faults
from headrace.engine.simulated.timing import Timing
from headrace.engine.worker.backend import SequenceSlice
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
        self._slots = [0] * (self.num_blocks * config.block_size)

    def warm_up(self) -> None:
        """Take `simulate_warm_up_s`."""
        time.sleep(self._warm_up_s)

    def execute(self, slices: Sequence[SequenceSlice]) -> list[int]:
        """The next words, after as long as the timing model says."""
        prefill_tokens = decodes = 0
        tokens: list[int] = []
        for piece in slices:
            if len(piece.token_ids) == 1 and piece.start:
                decodes += 1
            else:
                prefill_tokens += len(piece.token_ids)
            prefix_hash = self._compute(piece)
            if piece.samples:
                tokens.append(_pick(prefix_hash, piece))
        duration_s = self._timing.duration_s(prefill_tokens=prefill_tokens, decodes=decodes)
        if duration_s:
            time.sleep(duration_s)
        return tokens

    def _compute(self, piece: SequenceSlice) -> int:
        """Fill the slots of the slice's positions; the hash of the prefix that ends with it."""
        state = self._slots[self._slot(piece, piece.start - 1)] if piece.start else _OFFSET_BASIS
        for position, token in enumerate(piece.token_ids, piece.start):
            state = ((state ^ (token + 1)) * _PRIME) & _MASK
            self._slots[self._slot(piece, position)] = state
        return state

    def _slot(self, piece: SequenceSlice, position: int) -> int:
        block, offset = divmod(position, self._block_size)
        return piece.block_table[block] * self._block_size + offset


def _pick(prefix_hash: int, piece: SequenceSlice) -> int:
    """One of the words; sampled sequences with other seeds say other things, greedy ones do not look at the seed."""
    noise = piece.plan.seed * _PRIME if piece.plan.temperature > 0 else 0
    mixed = ((prefix_hash ^ noise) * _GOLDEN) & _MASK
    return _WORDS[mixed >> 58]


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
