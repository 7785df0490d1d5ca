"""What an engine process is told at its start."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.base.settings import knob
from headrace.engine.worker.config import BackendName, KvCacheDtype, SpeculativeMethod, WorkerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """One replica of one bundle."""

    engine_id: str = knob("engine-0", help="id of this replica, stable over restarts")
    deployment: str = knob("", help="deployment it serves, as gateways name it; empty for an engine used alone")
    bundle: str = knob("", help="JSON file with the bundle to serve; empty: one is described from --model")
    model: str = knob("", help="a .gguf file or Hugging Face folder; empty: the bundle's, else the model that ships")
    backend: BackendName = knob(
        BackendName.MODEL, help="model, or simulated: deterministic timing and text, no weights"
    )
    address: str = knob("127.0.0.1:0", help="host:port to listen on; port 0 takes a free one")
    advertise: str = knob("", help="host:port others reach it at; empty: the bound address")
    metrics_address: str = knob("127.0.0.1:0", help="host:port of the Prometheus endpoint")
    redis_url: str | None = knob(None, help="Redis for heartbeats; empty: none are sent", env="HEADRACE_REDIS_URL")
    otlp_endpoint: str | None = knob(None, help="host:port for spans", env="HEADRACE_OTLP_ENDPOINT")
    max_num_seqs: int = knob(32, help="most sequences in one step", least=1, most=4096)
    max_num_batched_tokens: int = knob(512, help="most tokens computed in one step", least=1)
    enable_chunked_prefill: bool = knob(True, help="split long prompts over steps, so that running answers go on")
    max_itl_stretch: float = knob(
        2.0,
        help="how many times as long as usual a step of running streams is meant to take while newcomers' prompts are "
        "computed beside them (longer when more prompts wait than streams run); the rest of a prompt comes in later "
        "steps. Lower: steadier streams, later first tokens (at 2 a long prompt beside a stream takes over twice as "
        "long). 0: prompts take max_num_batched_tokens. Bounds nothing without enable_chunked_prefill",
        least=0,
        most=1000,
    )
    max_waiting: int = knob(256, help="sequences that may wait; one more is refused with QUEUE_FULL", least=1)
    kv_cache_memory_bytes: int = knob(512 << 20, help="memory of the KV cache, in bytes", least=1)
    kv_cache_dtype: KvCacheDtype = knob(
        KvCacheDtype.AUTO, help="auto, or int8: twice the tokens in that memory; all replicas of a deployment alike"
    )
    block_size: int = knob(16, help="tokens per KV block", least=1, most=1024)
    enable_prefix_caching: bool = knob(True, help="reuse the KV blocks of prompts that begin alike")
    prefix_cache_key: str = knob(
        "",
        help="secret of the prefix hashes, hexadecimal, for all who must agree on them; empty: random per process",
        env="HEADRACE_PREFIX_CACHE_KEY",
    )
    max_model_len: int = knob(0, help="context limit in tokens; 0: what bundle and KV cache hold", least=0)
    precision: str = knob("float32", help="float32, bfloat16, int8 or int4, when no bundle says")
    speculative_method: SpeculativeMethod = knob(
        SpeculativeMethod.NONE, help="ngram: guess next tokens from what the text said before; empty: do not guess"
    )
    num_speculative_tokens: int = knob(4, help="most guesses at a time", least=1, most=64)
    prompt_lookup_max: int = knob(4, help="longest n-gram that guesses are looked up by", least=1, most=64)
    prompt_lookup_min: int = knob(2, help="shortest n-gram that guesses are looked up by", least=1, most=64)
    speculative_disable_by_batch_size: int = knob(
        4, help="nothing is guessed while more sequences than this run", least=0
    )
    worker_stall_s: float = knob(
        5.0, help="seconds of a silent worker, beyond its longest step, after which the replica is not READY", least=0.1
    )
    worker_lost_s: float = knob(
        30.0, help="seconds of a silent worker, beyond its longest step, after which the replica ends", least=0.2
    )
    heartbeat_period_s: float = knob(0.25, help="seconds between heartbeats", least=0.01, most=5)
    grace_s: float = knob(30.0, help="seconds a drain waits for running answers", least=0)
    simulate_step_ms: float = knob(1.0, help="simulated: fixed cost of a step", least=0)
    simulate_prefill_tokens_per_s: float = knob(4000.0, help="simulated: prefill rate", least=1)
    simulate_itl_ms: float = knob(10.0, help="simulated: inter-token latency at batch 1", least=0)
    simulate_warm_up_s: float = knob(0.0, help="simulated: time to load", least=0)
    simulate_echo_tokens: int = knob(
        0,
        help="simulated: answers say again what stood this many tokens before, but for one in eight; 0: never",
        least=0,
    )
    fault: str = knob("", help="simulated: faults, e.g. die_after_tokens=5,slow=4")

    def worker_config(self, model: str, precision: str, context_limit: int, bundle_digest: str) -> WorkerConfig:
        """The worker's part; the arguments are the bundle's."""
        return WorkerConfig(
            backend=self.backend,
            model=model,
            precision=precision,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            enable_chunked_prefill=self.enable_chunked_prefill,
            max_itl_stretch=self.max_itl_stretch,
            max_waiting=self.max_waiting,
            kv_cache_memory_bytes=self.kv_cache_memory_bytes,
            kv_cache_dtype=self.kv_cache_dtype,
            block_size=self.block_size,
            max_model_len=self.max_model_len,
            context_limit=context_limit,
            bundle_digest=bundle_digest,
            enable_prefix_caching=self.enable_prefix_caching,
            prefix_cache_key=self.prefix_cache_key,
            speculative_method=self.speculative_method,
            num_speculative_tokens=self.num_speculative_tokens,
            prompt_lookup_max=self.prompt_lookup_max,
            prompt_lookup_min=self.prompt_lookup_min,
            speculative_disable_by_batch_size=self.speculative_disable_by_batch_size,
            simulate_step_ms=self.simulate_step_ms,
            simulate_prefill_tokens_per_s=self.simulate_prefill_tokens_per_s,
            simulate_itl_ms=self.simulate_itl_ms,
            simulate_warm_up_s=self.simulate_warm_up_s,
            simulate_echo_tokens=self.simulate_echo_tokens,
            fault=self.fault,
        )
