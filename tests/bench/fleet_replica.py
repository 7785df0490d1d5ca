"""One replica in virtual time: the engine's own scheduler, KV memory and prefix cache, and a price for each step.

Nothing is computed and nobody sleeps: a step's duration follows from what is in it, and the answers are written down
beforehand. Everything else is what runs in the engine: admission, chunked prefill, preemption, eviction, sequences
that wait for a prefix which another one is computing, cache events, and the rates that the heartbeat reports.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.base.prefix import PrefixKey
from headrace.engine.core.block_pool import BlockPool
from headrace.engine.core.cache_event import CacheEvent
from headrace.engine.core.finish import Finish
from headrace.engine.core.kv_memory import KvMemory
from headrace.engine.core.load import LastLoad, Load, Rates, StepRecord, load, measured, smallest_chunk
from headrace.engine.core.request import Sequence as EngineSequence
from headrace.engine.core.sampling_plan import SamplingPlan
from headrace.engine.core.scheduler import BatchLimits, Scheduler
from headrace.engine.core.step import Computed, SequenceSlice, StepPlan

KEY = PrefixKey(bytes(range(32)))
BUNDLE = "sb-27"
EOS = 2
NOISY_S, NOISY_FACTOR = 2.0, 2.0
WARM_UP_PROMPT, WARM_UP_ANSWER = 256, 8
"""What the engine's own warm-up measures its rates with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaModel:
    """What a replica is and what its steps cost.

    As delivered: a model of about 8 billion parameters on one accelerator. A step reads the weights (6 ms), computes
    10,000 prompt tokens a second, and pays 0.15 ms per sequence in it. No two steps take quite the same: `jitter` is
    the standard deviation of a duration's logarithm. The KV cache holds 65,536 tokens. With a `noisy_period_s`
    something else on its machine makes it half as fast for 2 s in every period.
    """

    step_s: float = 0.006
    prompt_token_s: float = 0.0001
    sequence_s: float = 0.00015
    jitter: float = 0.1
    noisy_period_s: float = 0.0
    total_blocks: int = 4096
    block_size: int = 16
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 1024
    max_model_len: int = 16_384
    max_waiting: int = 256

    @property
    def cache_tokens(self) -> int:
        """Tokens that its KV cache holds."""
        return self.total_blocks * self.block_size

    def duration_s(self, plan: StepPlan, chance: random.Random, at: float) -> float:
        """Seconds that a step takes which begins `at` seconds after the replica's first quiet time began."""
        usual = self.step_s + prompt_tokens(plan) * self.prompt_token_s + len(plan.slices) * self.sequence_s
        noisy = self.noisy_period_s and at % self.noisy_period_s >= self.noisy_period_s - NOISY_S
        return usual * chance.lognormvariate(0.0, self.jitter) * (NOISY_FACTOR if noisy else 1.0)


def prompt_tokens(plan: StepPlan) -> int:
    """Prompt tokens that a step computes."""
    return sum(len(piece.token_ids) for piece in plan.slices[plan.decodes :])


@dataclass(slots=True, eq=False)
class Request:
    """What a client asks, and the answer it will get, whose last token ends it; `answer` is shorter than `max_tokens`.

    `follow_up` is asked `think_s` after the answer has ended.
    """

    id: int
    prompt: Sequence[int]
    answer: Sequence[int]
    max_tokens: int
    hashes: Sequence[bytes]
    follow_up: Request | None = None
    think_s: float = 0.0


class SimulatedReplica:
    """Steps whenever it has work; `at` is how it asks to be called later, `ended` hears of each answer's end."""

    def __init__(
        self,
        model: ReplicaModel,
        at: Callable[[float, Callable[[float], None]], None],
        *,
        seed: int,
        caching: bool,
        published: Callable[[Sequence[CacheEvent], float], None],
        ended: Callable[[Request, EngineSequence, Finish], None],
    ) -> None:
        self.model = model
        self.rates = Rates()
        self._at = at
        self._chance = random.Random(seed)
        self._quiet_since = -model.noisy_period_s * self._chance.random()
        self._published = published
        self._ended = ended
        limits = BatchLimits(
            max_num_seqs=model.max_num_seqs,
            max_num_batched_tokens=model.max_num_batched_tokens,
            enable_chunked_prefill=True,
            max_waiting=model.max_waiting,
        )
        memory = KvMemory(BlockPool(model.total_blocks, model.block_size), KEY if caching else None, BUNDLE)
        self.scheduler = Scheduler(limits, memory, frozenset({EOS}))
        self._chunk = smallest_chunk(model.max_num_batched_tokens)
        self._requests: dict[int, tuple[Request, EngineSequence]] = {}
        self._stepping = False
        self._warm_up()
        self._last_load = LastLoad(load(self.scheduler, self.rates))

    def submit(self, request: Request, now: float) -> None:
        """Take a request; it raises when the engine would refuse it, which a placement never brings about here."""
        sequence = EngineSequence(
            id=request.id,
            token_ids=list(request.prompt),
            prompt_length=len(request.prompt),
            plan=SamplingPlan(max_tokens=request.max_tokens),
            arrived_at=now,
        )
        refusals = self.scheduler.submit(sequence, now)
        if refusals:
            raise RuntimeError(f"request {request.id} was refused: {refusals[0].problem}")
        self._requests[request.id] = request, sequence
        if not self._stepping:
            self._begin_step(now)

    def load(self, now: float) -> Load:
        """The heartbeat's numbers."""
        self._last_load.note(load(self.scheduler, self.rates), now)
        return self._last_load.at(now)

    def _warm_up(self) -> None:
        """One sequence through all steps measures the rates, as in the engine; its blocks are forgotten."""
        prompt, answer = [7] * WARM_UP_PROMPT, [8] * (WARM_UP_ANSWER - 1) + [EOS]
        request = Request(0, prompt, answer, WARM_UP_ANSWER, ())
        sequence = EngineSequence(
            id=0,
            token_ids=list(prompt),
            prompt_length=len(prompt),
            plan=SamplingPlan(max_tokens=WARM_UP_ANSWER),
            arrived_at=0.0,
        )
        self.scheduler.submit(sequence, 0.0)
        self._requests[0] = request, sequence
        while self.scheduler.running or self.scheduler.waiting:
            plan = self.scheduler.schedule(0.0)
            self._account(plan, self.model.duration_s(plan, self._chance, 0.0), 0.0)
        self._requests.clear()
        self.scheduler.clear_cache()
        self.scheduler.take_cache_events()

    def _begin_step(self, now: float) -> None:
        plan = self.scheduler.schedule(now)
        self._stepping = bool(plan.slices)
        if plan.slices:
            duration_s = self.model.duration_s(plan, self._chance, now - self._quiet_since)
            self._at(now + duration_s, lambda then: self._end_step(plan, duration_s, then))

    def _end_step(self, plan: StepPlan, duration_s: float, now: float) -> None:
        finishes = self._account(plan, duration_s, now)
        events = self.scheduler.take_cache_events()
        if events:
            self._published(events, now)
        for finish in finishes:
            self._ended(*self._requests.pop(finish.sequence_id), finish)
        self._begin_step(now)

    def _account(self, plan: StepPlan, duration_s: float, now: float) -> Sequence[Finish]:
        computed = [self._computed(piece) for piece in plan.slices]
        chunks = [self._requests[piece.sequence_id][1] for piece in plan.slices[plan.decodes :]]
        record = StepRecord(
            duration_s=duration_s,
            decodes=plan.decodes,
            prefill_tokens=prompt_tokens(plan),
            longest_prefill=max((s.prompt_length - s.cached_tokens for s in chunks), default=0),
        )
        outcome = self.scheduler.update(plan, computed, now)
        self.rates = measured(self.rates, record, smallest_chunk=self._chunk)
        return outcome.finishes

    def _computed(self, piece: SequenceSlice) -> Computed:
        if not piece.samples:
            return Computed()
        request, _ = self._requests[piece.sequence_id]
        return Computed(token_id=request.answer[piece.start + len(piece.token_ids) - len(request.prompt)])
