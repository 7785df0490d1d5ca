"""Any order of submissions, aborts, deadlines and steps keeps the accounts and the answers right."""

from __future__ import annotations

import math

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from headrace.engine.core.block_pool import BlockPool
from headrace.engine.core.finish import Finish, FinishReason
from headrace.engine.core.request import Sequence
from headrace.engine.core.sampling_plan import SamplingPlan
from headrace.engine.core.scheduler import BatchLimits, Scheduler
from headrace.engine.simulated.backend import SimulatedBackend
from headrace.engine.worker.backend import SequenceSlice
from headrace.engine.worker.config import WorkerConfig

BLOCK_SIZE = 4


def backend(blocks: int) -> SimulatedBackend:
    return SimulatedBackend(
        WorkerConfig(
            block_size=BLOCK_SIZE,
            kv_cache_memory_bytes=46_080 * BLOCK_SIZE * blocks,
            simulate_step_ms=0.0,
            simulate_itl_ms=0.0,
            simulate_prefill_tokens_per_s=math.inf,
        )
    )


def expected(prompt: list[int], count: int) -> list[int]:
    """The first `count` tokens of the answer, one whole-prefix computation each: no cache, no batch, no chunks."""
    tokens = list(prompt)
    oracle = backend(64)
    for _ in range(count):
        piece = SequenceSlice(
            sequence_id=0,
            token_ids=tokens,
            start=0,
            block_table=range(64),
            samples=True,
            plan=SamplingPlan(max_tokens=1),
        )
        tokens += oracle.execute([piece])
    return tokens[len(prompt) :]


class AnyLife(RuleBasedStateMachine):
    """Checked after every operation: block accounts, answers so far, bounds of the step."""

    @initialize(blocks=st.integers(4, 16), seqs=st.integers(1, 6), budget=st.integers(6, 20), chunked=st.booleans())
    def start(self, blocks: int, seqs: int, budget: int, chunked: bool) -> None:
        if not chunked:
            budget = max(budget, blocks * BLOCK_SIZE)
        self.limits = BatchLimits(
            max_num_seqs=seqs, max_num_batched_tokens=budget, enable_chunked_prefill=chunked, max_waiting=4
        )
        self.pool = BlockPool(blocks, BLOCK_SIZE)
        self.scheduler = Scheduler(self.limits, self.pool, frozenset({2}))
        self.backend = backend(blocks)
        self.now = 0.0
        self.prompts: dict[int, list[int]] = {}
        self.plans: dict[int, SamplingPlan] = {}
        self.tokens: dict[int, list[int]] = {}
        self.finishes: dict[int, Finish] = {}

    @rule(prompt=st.integers(1, 30), max_tokens=st.integers(1, 12), patience=st.sampled_from([math.inf, 2.0, 6.0]))
    def submit(self, prompt: int, max_tokens: int, patience: float) -> None:
        id = len(self.prompts) + 1
        self.prompts[id] = [100 * id + i for i in range(prompt)]
        self.plans[id] = SamplingPlan(max_tokens=max_tokens)
        self.tokens[id] = []
        sequence = Sequence(
            id=id,
            token_ids=list(self.prompts[id]),
            prompt_length=prompt,
            plan=self.plans[id],
            arrived_at=self.now,
            deadline_at=self.now + patience,
        )
        self.record(self.scheduler.submit(sequence, self.now))

    @rule(which=st.integers(0, 30))
    def abort(self, which: int) -> None:
        self.record(self.scheduler.abort(which, self.now))

    @rule()
    def step(self) -> None:
        self.now += 1.0
        plan = self.scheduler.schedule(self.now)
        assert sum(len(p.token_ids) for p in plan.slices) <= self.limits.max_num_batched_tokens
        assert len(plan.slices) <= self.limits.max_num_seqs
        assert not (plan.preempted and plan.admitted)
        assert len({p.sequence_id for p in plan.slices}) == len(plan.slices)
        sliced = {p.sequence_id for p in plan.slices}
        assert all(s.id in sliced for s in self.scheduler.running if s.decoding)
        assert plan.slices or not self.scheduler.running  # whoever runs gets on, or no one would ever
        outcome = self.scheduler.update(plan, self.backend.execute(plan.slices), self.now)
        for id, token in zip(outcome.sequence_ids, outcome.token_ids, strict=True):
            assert id not in self.finishes
            self.tokens[id].append(token)
        self.record(*plan.expired, *outcome.finishes)

    def record(self, *finishes: Finish | None) -> None:
        for finish in finishes:
            if finish is not None:
                assert finish.sequence_id not in self.finishes
                self.finishes[finish.sequence_id] = finish

    @invariant()
    def accounts_and_answers_are_right(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check()
            present = [s.id for s in (*self.scheduler.running, *self.scheduler.waiting)]
            assert present == sorted(self.prompts.keys() - self.finishes.keys())  # nobody overtakes

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for _ in range(2000):
            if not (self.scheduler.running or self.scheduler.waiting):
                break
            self.step()
        assert self.finishes.keys() == self.prompts.keys()
        assert self.pool.free_blocks == self.pool.total_blocks
        for id, prompt in self.prompts.items():
            assert self.tokens[id] == expected(prompt, len(self.tokens[id]))
            if self.finishes[id].reason is FinishReason.LENGTH:
                assert len(self.tokens[id]) == self.plans[id].max_tokens


AnyLife.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAnyLife = AnyLife.TestCase
