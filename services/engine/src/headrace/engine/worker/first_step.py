"""What both computing backends do before the first sequence: count the blocks they can pay for, and warm up."""

from __future__ import annotations

from headrace.base.errors import StartError
from headrace.engine.core.sampling_plan import SamplingPlan
from headrace.engine.core.step import SequenceSlice
from headrace.engine.worker.backend import Backend
from headrace.engine.worker.config import WorkerConfig

# Enough rows for the many-row products, few enough to stay near 0.1 s on two cores.
WARM_UP_TOKENS = 32


def blocks_within(config: WorkerConfig, bytes_per_block: int) -> int:
    """KV blocks that `kv_cache_memory_bytes` pays for; StartError when that is none."""
    blocks = config.kv_cache_memory_bytes // bytes_per_block
    if blocks < 1:
        raise StartError(
            f"kv_cache_memory_bytes={config.kv_cache_memory_bytes} holds no block of {config.block_size} tokens:"
            f" give at least {bytes_per_block}"
        )
    return blocks


def warm_up(backend: Backend, block_size: int) -> None:
    """A prefill, then a sampled decode, in block 0 and those after it."""
    room = min(WARM_UP_TOKENS + 1, backend.num_blocks * block_size, backend.max_model_len)
    plan = SamplingPlan(max_tokens=1, temperature=1.0, top_k=2, top_p=0.5)
    table = range(-(-room // block_size))
    for start, count in ((0, max(1, room - 1)), (room - 1, 1)):
        piece = SequenceSlice(
            sequence_id=0, token_ids=[0] * count, start=start, block_table=table, samples=True, plan=plan
        )
        backend.execute([piece], {})
