"""The engine's Prometheus metrics."""

from __future__ import annotations

from headrace.engine.core.load import Load
from headrace.observe.metrics import counter, gauge

OPEN = gauge("headrace_engine_sequences_open", "Sequences handed to the worker and not finished.")
RUNNING = gauge("headrace_engine_running", "Sequences running.")
WAITING = gauge("headrace_engine_waiting", "Sequences waiting for their first step.")
BLOCKS_USED = gauge("headrace_engine_kv_blocks_used", "KV blocks in use.")
BLOCKS_TOTAL = gauge("headrace_engine_kv_blocks_total", "KV blocks there are.")
BLOCKS_CACHED = gauge("headrace_engine_kv_blocks_cached", "Free KV blocks that hold a cached prefix.")
PRESSURE = gauge("headrace_engine_kv_pressure", "Part of the KV blocks open to admission that is in use.")
GATEWAYS = gauge("headrace_engine_gateways_attached", "Attach streams open.")
TOKENS = counter("headrace_engine_tokens_total", "Tokens generated.")
PROMPT_TOKENS = counter("headrace_engine_prompt_tokens_total", "Prompt tokens submitted.")
CACHED_TOKENS = counter("headrace_engine_cached_tokens_total", "Prompt tokens found in the prefix cache.")
DRAFTED = counter("headrace_engine_draft_tokens_total", "Guesses at next tokens that were computed.")
ACCEPTED = counter("headrace_engine_accepted_tokens_total", "Guesses that became tokens of an answer.")
FINISHES = counter("headrace_engine_finishes_total", "Sequences ended, by reason.", ("reason", "error_reason"))
PREEMPTIONS = counter("headrace_engine_preemptions_total", "Times a running sequence was preempted.")
STALLS = counter("headrace_engine_worker_stalls_total", "Times the worker was silent for longer than a step may take.")
HEARTBEATS = counter("headrace_engine_heartbeats_total", "Heartbeats, by outcome.", ("outcome",))


def show_load(load: Load) -> None:
    """Bring the gauges to the worker's newest load."""
    RUNNING.set(load.running)
    WAITING.set(load.waiting)
    BLOCKS_USED.set(load.total_blocks - load.free_blocks)
    BLOCKS_TOTAL.set(load.total_blocks)
    BLOCKS_CACHED.set(load.cached_blocks)
    PRESSURE.set(load.pressure)
