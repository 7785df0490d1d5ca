"""Any order of submissions, aborts, deadlines, grammars and steps keeps the accounts and the answers right."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import ClassVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from headrace.engine.core.finish import ErrorReason, FinishReason, Problem
from headrace.engine.core.pacing import Pacer
from headrace.engine.core.placement import Priority
from headrace.engine.core.request import State
from headrace.engine.core.sampling_plan import SamplingPlan
from headrace.engine.core.step import StepPlan
from headrace.testkit.engine_bench import Bench, oracle, shape, tenant

BLOCK_SIZE = 4
NO_GRAMMAR = Problem(reason=ErrorReason.INVALID_FIELD, message="cannot be compiled", field="sampling.constraint")


# So near that answers soon say again what they have said themselves: guesses come true, and do not.
ECHO = 3


@cache
def expected(prompt: tuple[int, ...], seed: int) -> list[int]:
    return oracle(prompt, 12, SamplingPlan(max_tokens=12, temperature=1.0, seed=seed), echo=ECHO)


class AnyLife(RuleBasedStateMachine):
    """Checked after every operation: block accounts, bounds of the step, order of service; at the end every answer."""

    operations: ClassVar[int] = 0
    accepted: ClassVar[int] = 0
    paced: ClassVar[int] = 0

    @initialize(
        blocks=st.integers(4, 16),
        seqs=st.integers(1, 6),
        budget=st.integers(6, 20),
        chunked=st.booleans(),
        caching=st.booleans(),
        guesses=st.sampled_from([0, 1, 5]),
        paced=st.booleans(),
    )
    def start(
        self, blocks: int, seqs: int, budget: int, chunked: bool, caching: bool, guesses: int, paced: bool
    ) -> None:
        if not chunked:
            budget = max(budget, blocks * BLOCK_SIZE)
        self.bench = Bench(
            blocks=blocks, block_size=4, seqs=seqs, budget=budget, chunked=chunked, waiting=6, caching=caching,
            guesses=guesses, echo=ECHO,
        )  # fmt: skip
        if paced and chunked:
            self.bench.scheduler.pacer = Pacer(1.5)
        self.caching = caching
        self.prompts: dict[int, list[int]] = {}
        self.plans: dict[int, SamplingPlan] = {}
        self.placements: dict[int, tuple[str, str]] = {}
        # What was computed, by sequence, in each isolation domain and adapter: all that may ever be hit there.
        self.computed: defaultdict[tuple[str, str], dict[int, Sequence[int]]] = defaultdict(dict)

    @rule(prompt=st.integers(1, 30), max_tokens=st.integers(1, 12), patience=st.sampled_from([math.inf, 2.0, 6.0]))
    def submit(self, prompt: int, max_tokens: int, patience: float) -> None:
        id = len(self.prompts) + 1
        self.submitted(id, [100 * id + i for i in range(prompt)], max_tokens, patience=patience)

    @rule(program=st.binary(min_size=120, max_size=240))
    def many_operations(self, program: bytes) -> None:
        for at in range(0, len(program) - 2, 3):
            self.operate(*program[at : at + 3])
            self.accounts_and_order_are_right()

    def operate(self, code: int, a: int, b: int) -> None:
        """One operation from three bytes: half of them are steps."""
        type(self).operations += 1
        if code < 64:
            prompt = [1000 * (a % 3) + i for i in range(1 + b % 28)] + ([a] if a & 64 else [])
            self.submitted(
                len(self.prompts) + 1,
                prompt,
                1 + a % 12,
                n=1 + b % 3,
                patience=(math.inf, math.inf, math.inf, 5.0)[a % 4],
                priority=Priority(1 + code % 3),
                domain="ab"[b & 1],
                adapter="xy"[code & 1],
                grammar_pending=code % 8 == 0,
            )
        elif code < 96:
            self.abort(a)
        elif code < 112:
            self.bench.scheduler.grammar_ready(a % (len(self.prompts) + 1))
        elif code < 116:
            id = a % (len(self.prompts) + 1)
            self.bench.collect(self.bench.scheduler.end(id, FinishReason.ERROR, self.bench.now, NO_GRAMMAR))
        else:
            self.step()

    def submitted(
        self,
        id: int,
        prompt: list[int],
        max_tokens: int,
        *,
        n: int = 1,
        patience: float,
        priority: Priority = Priority.STANDARD,
        domain: str = "",
        adapter: str = "",
        grammar_pending: bool = False,
    ) -> None:
        for index in range(n):
            self.prompts[id + index] = prompt
            self.plans[id + index] = SamplingPlan(max_tokens=max_tokens, seed=id + index)
            self.placements[id + index] = (domain, adapter)
        self.bench.submit(
            id,
            prompt,
            max_tokens,
            n=n,
            temperature=1.0,
            seed=id,
            deadline_at=self.bench.now + patience,
            placement=tenant(domain, adapter_digest=adapter, priority=priority),
            grammar_pending=grammar_pending,
        )

    @rule(which=st.integers(0, 30))
    def abort(self, which: int) -> None:
        self.bench.collect(self.bench.scheduler.abort(which, self.bench.now))

    @rule()
    def step(self) -> None:
        scheduler = self.bench.scheduler
        plan = self.bench.step()
        limits = scheduler.limits
        assert sum(shape(plan).values()) <= limits.max_num_batched_tokens
        assert len(plan.slices) <= limits.max_num_seqs
        assert not (plan.preempted and plan.admitted)
        assert len({p.sequence_id for p in plan.slices}) == len(plan.slices)
        self.someone_gets_on(plan)
        self.note(plan)
        for piece in plan.slices:
            known = self.computed[self.placements[piece.sequence_id]]
            if piece.sequence_id in plan.admitted and piece.start:
                assert self.caching
                assert any(other[: piece.start] == piece.known_token_ids[: piece.start] for other in known.values())
            known[piece.sequence_id] = piece.known_token_ids

    def note(self, plan: StepPlan) -> None:
        """Tell the pacer that the step took its time, now and then much longer."""
        pacer, tokens = self.bench.scheduler.pacer, sum(len(p.token_ids) for p in plan.slices[plan.decodes :])
        if pacer is not None and plan.slices:
            duration_s = (9.0 if self.bench.now % 7 == 0 else 1.0) * (4 + tokens)
            pacer.note(duration_s=duration_s, decodes=plan.decodes, prefill_tokens=tokens)
            type(self).paced += plan.pace is not None and plan.pace.tokens == tokens  # prompts had all they might

    def someone_gets_on(self, plan: StepPlan) -> None:
        """Every sequence that decodes has its token, and whoever runs gets on, or no one ever would."""
        sliced = {p.sequence_id for p in plan.slices}
        running = list(self.bench.scheduler.running)
        assert all(s.id in sliced for s in running if s.decoding and s.id not in plan.preempted and not s.forked)
        assert plan.slices or not running
        free_to_go = [s for s in self.bench.scheduler.waiting if s.state is State.WAITING]
        assert plan.slices or plan.preempted or not free_to_go

    @invariant()
    def accounts_and_order_are_right(self) -> None:
        if not hasattr(self, "bench"):
            return
        scheduler = self.bench.scheduler
        scheduler.check()
        for sequence in scheduler.running:  # no block is kept for guesses that did not come true
            assert len(sequence.block_table) <= scheduler.pool.blocks_for(len(sequence.token_ids))
        for ranking in (scheduler.running, scheduler.waiting):
            assert all(a.rank < b.rank for a, b in pairwise(ranking))
        present = {s.id for s in scheduler}
        assert present == self.prompts.keys() - self.bench.finishes.keys()
        attached = [f.id for s in (*scheduler.running, *scheduler.waiting) for f in s.followers]
        assert sorted([*(s.id for s in scheduler.running), *(s.id for s in scheduler.waiting), *attached]) == sorted(
            present
        )
        announcers = set(self.bench.memory._announced.values())
        assert announcers <= {s.id for s in scheduler.running}

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        bench = self.bench
        for id in self.prompts:
            bench.scheduler.grammar_ready(id)
        for _ in range(5000):
            if not (bench.scheduler.running or bench.scheduler.waiting):
                break
            self.step()
        type(self).accepted += bench.accepted
        assert bench.finishes.keys() == self.prompts.keys()
        assert bench.pool.free_blocks == bench.pool.total_blocks
        assert not bench.memory._announced
        for id, prompt in self.prompts.items():
            assert bench.tokens[id] == expected(tuple(prompt), self.plans[id].seed)[: len(bench.tokens[id])]
            if bench.finishes[id].reason is FinishReason.LENGTH:
                assert len(bench.tokens[id]) == self.plans[id].max_tokens


def test_any_life_keeps_accounts_and_answers_right() -> None:
    AnyLife.operations = AnyLife.accepted = AnyLife.paced = 0
    # How many a run draws is chance: again, until they are enough.
    while AnyLife.operations <= 20_000 or (AnyLife.paced <= 50 and AnyLife.operations <= 200_000):
        run_state_machine_as_test(AnyLife, settings=settings(max_examples=100, stateful_step_count=30, deadline=None))
    assert AnyLife.accepted > 200
    assert AnyLife.paced > 50
