"""What a replica says of its own load: counts now, and rates once they have been measured."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from headrace.engine.core.scheduler import Scheduler

# A smaller chunk measures the fixed cost of a step, not the prefill rate.
_MEASURED_CHUNK = 32
# Weight of the newest step. At 10 ms per step the mean forgets with a time constant of 0.1 s, well within the 250 ms
# between heartbeats.
_NEWEST = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One computed step: how long it took and what was in it."""

    duration_s: float
    decodes: int
    prefill_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Exponentially weighted means over step records; None until a record measured them.

    `itl_s` covers every step that decoded, so it is what a reader sees; `decode_only_s` leaves out steps that also
    prefilled. The prefill rate is a quotient of two means, so a long chunk counts for more than a short one.
    """

    itl_s: float | None = None
    decode_only_s: float | None = None
    prefill_tokens: float | None = None
    prefill_s: float | None = None

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """Prompt tokens per second of time spent on prompts."""
        return self.prefill_tokens / self.prefill_s if self.prefill_tokens and self.prefill_s else None


def smallest_chunk(max_num_batched_tokens: int) -> int:
    """The fewest prompt tokens of a step that measure a prefill rate: 32, or half a step that holds fewer than 64."""
    return min(_MEASURED_CHUNK, max(1, max_num_batched_tokens // 2))


def measured(rates: Rates, record: StepRecord, *, smallest_chunk: int) -> Rates:
    """`rates` after one more step; one with fewer than `smallest_chunk` prompt tokens measures no prefill rate.

    A mixed step's time counts as prefill beyond what a step of decodes alone takes; until that is known, a mixed step
    measures no prefill rate. Example: decodes alone take 10 ms; a mixed step of 100 prompt tokens and 60 ms adds
    100 tokens in 50 ms.
    """
    if record.decodes:
        rates = dataclasses.replace(rates, itl_s=_mean(rates.itl_s, record.duration_s))
    if not record.prefill_tokens:
        return dataclasses.replace(rates, decode_only_s=_mean(rates.decode_only_s, record.duration_s))
    decode_s = rates.decode_only_s if record.decodes else 0.0
    if record.prefill_tokens < smallest_chunk or decode_s is None or record.duration_s <= decode_s:
        return rates
    return dataclasses.replace(
        rates,
        prefill_tokens=_mean(rates.prefill_tokens, record.prefill_tokens),
        prefill_s=_mean(rates.prefill_s, record.duration_s - decode_s),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The scheduler's part of a heartbeat. A rate is None until it has been measured.

    `waiting_prefill_tokens` are the known tokens of waiting sequences and of running ones' chunks still to come.
    `cached_blocks`, a part of `free_blocks`, hold a prefix until they are needed. `pressure` is the part of the blocks
    open to admission that is in use: at 1 nothing more is admitted.
    """

    waiting: int
    waiting_prefill_tokens: int
    running: int
    free_blocks: int
    total_blocks: int
    cached_blocks: int
    pressure: float
    prefill_tokens_per_s: float | None
    itl_ms: float | None


def load(scheduler: Scheduler, rates: Rates) -> Load:
    """The load at this moment."""
    return Load(
        waiting=scheduler.num_waiting,
        waiting_prefill_tokens=sum(len(s.token_ids) for s in scheduler.waiting)
        + sum(s.remaining_tokens for s in scheduler.running if not s.decoding),
        running=len(scheduler.running),
        free_blocks=scheduler.pool.free_blocks,
        total_blocks=scheduler.pool.total_blocks,
        cached_blocks=scheduler.pool.cached_blocks,
        pressure=_pressure(scheduler),
        prefill_tokens_per_s=rates.prefill_tokens_per_s,
        itl_ms=None if rates.itl_s is None else rates.itl_s * 1000,
    )


def _pressure(scheduler: Scheduler) -> float:
    pool = scheduler.pool
    # Beside others nobody may have the watermark's blocks; of a pool without more than those, all count.
    reserve = scheduler.watermark if pool.total_blocks > scheduler.watermark else 0
    return 1.0 - max(0, pool.free_blocks - reserve) / (pool.total_blocks - reserve)


def _mean(old: float | None, new: float) -> float:
    return new if old is None else old + _NEWEST * (new - old)
