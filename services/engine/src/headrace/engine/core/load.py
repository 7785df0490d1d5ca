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
RESTED_S = 5.0
_MOST_UNREAD = 64
_SHORTEST_CLASS = 64  # classes of prompts end at 64, 256, 1024, … tokens, those of batches at 1, 2, 4, … sequences


@dataclass(slots=True, kw_only=True)
class StepRecord:
    """One computed step: how long it took and what was in it.

    `accepted` guesses came out of it beside one token per decode. `longest_prefill` is the uncached length of the
    longest prompt of which it computed a chunk. Nobody changes a record: see `SequenceSlice`.
    """

    duration_s: float
    decodes: int
    prefill_tokens: int
    accepted: int = 0
    longest_prefill: int = 0

    @property
    def itl_s(self) -> float:
        """From token to token, as a reader of one of its decodes feels it."""
        return self.duration_s * self.decodes / (self.decodes + self.accepted)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillClass:
    """Means over prefill steps of prompts with up to `upper` uncached tokens."""

    upper: int
    tokens: float
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        """Their rate."""
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchClass:
    """The mean over steps of up to `upper` decodes and no prompt tokens.

    Other people's prompts lengthen a step tenfold and are no property of the batch: a router that took that for the
    replica's speed would send nothing more, and a replica that gets nothing never measures again.
    """

    upper: int
    itl_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Exponentially weighted means over step records; None until a record measured them.

    `itl_s` covers every step that decoded, so it is what a reader sees; `decode_only_s` leaves out steps that also
    prefilled. The prefill rate is a quotient of two means, so a long chunk counts for more than a short one.
    The classes, ascending, hold what was seen of each: an engine that idles after a full batch still knows what a small
    one takes, and a short prompt's fixed cost is not taken for a long prompt's rate.
    """

    itl_s: float | None = None
    decode_only_s: float | None = None
    prefill_tokens: float | None = None
    prefill_s: float | None = None
    by_length: tuple[PrefillClass, ...] = ()
    by_batch: tuple[BatchClass, ...] = ()

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
    if not record.prefill_tokens:
        # The usual step, made without `replace`, which would take a tenth of all the Python between two steps.
        return Rates(
            itl_s=_mean(rates.itl_s, record.itl_s) if record.decodes else rates.itl_s,
            decode_only_s=_mean(rates.decode_only_s, record.duration_s),
            prefill_tokens=rates.prefill_tokens,
            prefill_s=rates.prefill_s,
            by_length=rates.by_length,
            by_batch=_with_batch(rates.by_batch, record) if record.decodes else rates.by_batch,
        )
    if record.decodes:
        rates = dataclasses.replace(rates, itl_s=_mean(rates.itl_s, record.itl_s))
    decode_s = rates.decode_only_s if record.decodes else 0.0
    if decode_s is None or record.duration_s <= decode_s:
        return rates
    # Beside decodes a small chunk's share of the time is lost in the noise; alone it is what such prompts cost.
    if record.prefill_tokens >= smallest_chunk or not record.decodes:
        rates = dataclasses.replace(
            rates, by_length=_with_prefill(rates.by_length, record, record.duration_s - decode_s)
        )
    if record.prefill_tokens < smallest_chunk:
        return rates
    return dataclasses.replace(
        rates,
        prefill_tokens=_mean(rates.prefill_tokens, record.prefill_tokens),
        prefill_s=_mean(rates.prefill_s, record.duration_s - decode_s),
    )


class Meter:
    """The rates of all steps noted so far. They are reckoned when they are asked for: every step waits for `note`."""

    def __init__(self, *, smallest_chunk: int) -> None:
        self._smallest_chunk = smallest_chunk
        self._rates = Rates()
        self._unread: list[StepRecord] = []

    def note(self, record: StepRecord) -> None:
        """One more step."""
        self._unread.append(record)
        if len(self._unread) >= _MOST_UNREAD:
            self._read()

    @property
    def rates(self) -> Rates:
        """As `measured` has them, step by step."""
        self._read()
        return self._rates

    def _read(self) -> None:
        for record in self._unread:
            self._rates = measured(self._rates, record, smallest_chunk=self._smallest_chunk)
        self._unread.clear()


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
    prefill_rates: tuple[tuple[int, float], ...] = ()  # (uncached tokens up to, tokens/s)
    batch_latencies: tuple[tuple[int, float], ...] = ()  # (sequences up to, ms)


class LastLoad:
    """What to say of the load between steps: rates age once nothing runs.

    A rate measured in a slow moment (a neighbour was busy) keeps work away, and without work nothing is measured again.
    So a replica that has had nothing to do for `RESTED_S` says what it measured at its start, where that was faster.
    """

    def __init__(self, at_start: Load) -> None:
        self._at_start = at_start
        self._last = at_start
        self._idle_since: float | None = None

    def note(self, load: Load, now: float) -> None:
        """The load changed, or did not."""
        self._last = load
        if load.running or load.waiting:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = now

    def at(self, now: float) -> Load:
        """The load to report."""
        if self._idle_since is None or now - self._idle_since < RESTED_S:
            return self._last
        return _rested(self._last, self._at_start)


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
        prefill_rates=tuple((c.upper, c.tokens_per_s) for c in rates.by_length),
        batch_latencies=tuple((c.upper, c.itl_s * 1000) for c in rates.by_batch),
    )


def _rested(last: Load, at_start: Load) -> Load:
    """`last` with the better of its rates and the start's; of batches only what the start knew, for the same reason."""
    rate, itl = last.prefill_tokens_per_s, last.itl_ms
    first_rate, first_itl = at_start.prefill_tokens_per_s, at_start.itl_ms
    prefills, batches = dict(last.prefill_rates), dict(last.batch_latencies)
    return dataclasses.replace(
        last,
        prefill_tokens_per_s=max(rate, first_rate) if rate and first_rate else rate or first_rate,
        itl_ms=min(itl, first_itl) if itl and first_itl else itl or first_itl,
        prefill_rates=tuple((upper, max(r, prefills.get(upper, r))) for upper, r in at_start.prefill_rates),
        batch_latencies=tuple((upper, min(ms, batches.get(upper, ms))) for upper, ms in at_start.batch_latencies),
    )


def _pressure(scheduler: Scheduler) -> float:
    pool = scheduler.pool
    # Beside others nobody may have the watermark's blocks; of a pool without more than those, all count.
    reserve = scheduler.watermark if pool.total_blocks > scheduler.watermark else 0
    return 1.0 - max(0, pool.free_blocks - reserve) / (pool.total_blocks - reserve)


def _with_batch(classes: tuple[BatchClass, ...], record: StepRecord) -> tuple[BatchClass, ...]:
    upper = 1 << (record.decodes - 1).bit_length()
    for at, known in enumerate(classes):
        if known.upper == upper:
            return (*classes[:at], BatchClass(upper=upper, itl_s=_mean(known.itl_s, record.itl_s)), *classes[at + 1 :])
    return tuple(sorted((*classes, BatchClass(upper=upper, itl_s=record.itl_s)), key=lambda c: c.upper))


def _with_prefill(classes: tuple[PrefillClass, ...], record: StepRecord, seconds: float) -> tuple[PrefillClass, ...]:
    upper = _SHORTEST_CLASS
    while upper < max(record.longest_prefill, record.prefill_tokens):
        upper *= 4
    known = {c.upper: c for c in classes}
    before = known.get(upper)
    known[upper] = PrefillClass(
        upper=upper,
        tokens=_mean(before.tokens if before else None, record.prefill_tokens),
        seconds=_mean(before.seconds if before else None, seconds),
    )
    return tuple(known[at] for at in sorted(known))


def _mean(old: float | None, new: float) -> float:
    return new if old is None else old + _NEWEST * (new - old)
