"""Everything a worker process is told at its start."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class BackendName(StrEnum):
    """Which backend a worker runs."""

    MODEL = "model"
    SIMULATED = "simulated"


class KvCacheDtype(StrEnum):
    """What keys and values are kept as."""

    AUTO = "auto"  # bfloat16 on the native kernels, the model's precision in torch
    INT8 = "int8"  # twice the tokens in the same memory; native kernels only


class SpeculativeMethod(StrEnum):
    """Where guesses at the next tokens come from."""

    NONE = ""
    NGRAM = "ngram"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """Settings of one worker: plain values only, they cross to the worker's process.

    `max_model_len` 0 takes the longest sequence that both the model and its KV cache hold. `fault` and the
    `simulate_*` values are the simulated backend's: see `headrace.engine.simulated`.
    """

    backend: BackendName = BackendName.MODEL
    model: str = ""  # path of the model file or folder; the simulated backend reads none
    precision: str = "float32"
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    enable_chunked_prefill: bool = True
    max_itl_stretch: float = 2.0  # of steps with running streams, by prompts; 0: prompts take what they find
    max_waiting: int = 256  # sequences that may wait for their first step; one more is refused
    kv_cache_memory_bytes: int = 256 << 20
    kv_cache_dtype: KvCacheDtype = KvCacheDtype.AUTO
    block_size: int = 16
    max_model_len: int = 0
    context_limit: int = 0  # the bundle's: no sequence is longer, even if the model could; 0 when there is none
    bundle_digest: str = ""  # part of the identity of cached prefixes
    enable_prefix_caching: bool = True
    prefix_cache_key: str = field(default="", repr=False)  # hexadecimal; empty: random, this worker's own
    speculative_method: SpeculativeMethod = SpeculativeMethod.NONE
    num_speculative_tokens: int = 4
    prompt_lookup_max: int = 4
    prompt_lookup_min: int = 2
    speculative_disable_by_batch_size: int = 4
    simulate_step_ms: float = 1.0
    simulate_prefill_tokens_per_s: float = 4000.0
    simulate_itl_ms: float = 10.0
    simulate_warm_up_s: float = 0.0
    simulate_echo_tokens: int = 0
    fault: str = ""
