"""From a WorkerConfig to a warmed-up step loop."""

from __future__ import annotations

import time
from pathlib import Path

from headrace.base.errors import StartError
from headrace.base.prefix import PrefixKey
from headrace.engine.core.block_pool import BlockPool
from headrace.engine.core.kv_memory import KvMemory
from headrace.engine.core.load import load
from headrace.engine.core.ngram import Speculation
from headrace.engine.core.pacing import Pacer
from headrace.engine.core.scheduler import BatchLimits, Scheduler
from headrace.engine.core.submission import ModelLimits
from headrace.engine.simulated.backend import SimulatedBackend
from headrace.engine.simulated.fault import Faults, parse_faults
from headrace.engine.simulated.faulty import FaultyBackend
from headrace.engine.worker.backend import Backend
from headrace.engine.worker.config import BackendName, SpeculativeMethod, WorkerConfig
from headrace.engine.worker.grammar import Grammars
from headrace.engine.worker.loop import StepLoop
from headrace.engine.worker.messages import WorkerReady


def assemble(config: WorkerConfig) -> tuple[StepLoop, WorkerReady]:
    """Load the backend, warm it up and measure it; StartError names the setting that cannot be honoured."""
    faults = _faults(config)
    batch = _batch_limits(config)
    speculation = _speculation(config)
    pacer = _pacer(config)
    backend, computes_on = _load_backend(config)
    pool = BlockPool(backend.num_blocks, config.block_size)
    memory = KvMemory(pool, _prefix_key(config), config.bundle_digest)
    limits = ModelLimits(vocab_size=backend.vocab_size, max_model_len=_context(config, backend, pool))
    scheduler = Scheduler(batch, memory, backend.eos_ids, speculation, pacer)
    model = Path(config.model) if config.model else None
    grammars = Grammars(model, vocab_size=backend.vocab_size, eos_ids=backend.eos_ids)
    loop = StepLoop(scheduler, backend, grammars, limits, clock=time.monotonic)
    loop.warm_up()
    if faults != Faults():  # only now: the warm-up's tokens are not the ones that a fault counts
        loop.backend = FaultyBackend(backend, faults)
    if faults.full_cache:
        loop.occupied = pool.allocate(pool.free_blocks)
    ready = WorkerReady(
        vocab_size=backend.vocab_size,
        eos_ids=backend.eos_ids,
        max_model_len=limits.max_model_len,
        block_size=config.block_size,
        load=load(scheduler, loop.rates),
        computes_on=computes_on,
    )
    return loop, ready


def _faults(config: WorkerConfig) -> Faults:
    if config.fault and config.backend is not BackendName.SIMULATED:
        raise StartError(f"fault={config.fault!r} needs backend=simulated: a real model has no faults to switch on")
    return parse_faults(config.fault)


def _prefix_key(config: WorkerConfig) -> PrefixKey | None:
    if not config.enable_prefix_caching:
        return None
    if not config.prefix_cache_key:
        return PrefixKey.random()
    try:
        return PrefixKey.parse(config.prefix_cache_key)
    except ValueError as error:
        raise StartError(f"prefix_cache_key: {error}") from None


def _batch_limits(config: WorkerConfig) -> BatchLimits:
    if config.max_waiting < 1 or config.block_size < 1:
        raise StartError("max_waiting and block_size must be at least 1")
    try:
        return BatchLimits(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            enable_chunked_prefill=config.enable_chunked_prefill,
            max_waiting=config.max_waiting,
        )
    except ValueError as error:
        raise StartError(str(error)) from error


def _pacer(config: WorkerConfig) -> Pacer | None:
    """None, too, where prompts are not cut: a whole one cannot keep to any time."""
    if not config.max_itl_stretch:
        return None
    try:
        pacer = Pacer(config.max_itl_stretch)
    except ValueError as error:
        raise StartError(str(error)) from error
    return pacer if config.enable_chunked_prefill else None


def _speculation(config: WorkerConfig) -> Speculation | None:
    if config.speculative_method is SpeculativeMethod.NONE:
        return None
    try:
        return Speculation(
            tokens=config.num_speculative_tokens,
            longest=config.prompt_lookup_max,
            shortest=config.prompt_lookup_min,
            most_sequences=config.speculative_disable_by_batch_size,
        )
    except ValueError as error:
        raise StartError(str(error)) from error


def _load_backend(config: WorkerConfig) -> tuple[Backend, str]:
    """The backend, and what it computes on, in words."""
    if config.backend is BackendName.SIMULATED:
        return SimulatedBackend(config), "nothing: simulated"
    # Imported here: a simulated replica has no use for the kernels, nor a model on the kernels for torch, which costs
    # 2 s.
    from headrace.engine.worker.backend_native import NotNative, load_native_backend

    try:
        native = load_native_backend(config)
        return native, native.computes_on
    except NotNative as reason:
        from headrace.engine.worker.backend_model import load_model_backend

        return load_model_backend(config), f"torch {config.precision}: {reason}"


def _context(config: WorkerConfig, backend: Backend, pool: BlockPool) -> int:
    """The longest sequence: as set, or what the model, the cache and an uncut prompt's step all hold."""
    model = min(backend.max_model_len, config.context_limit or backend.max_model_len)
    step = model if config.enable_chunked_prefill else config.max_num_batched_tokens
    most = min(model, step)
    if config.max_model_len > most:
        why = "model and bundle allow" if most == model else "max_num_batched_tokens without chunks allows"
        raise StartError(f"max_model_len={config.max_model_len} is more than the {most} tokens that {why}")
    context = config.max_model_len or min(most, pool.total_blocks * pool.block_size)
    if context < 2:
        raise StartError(f"a context of {context} tokens holds no prompt and answer: it must be at least 2")
    return context
