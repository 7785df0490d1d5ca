"""A scheduler with real memory over a backend that takes no time, stepped by hand."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence as Seq

from headrace.base.prefix import PrefixKey
from headrace.engine.core.block_pool import BlockPool
from headrace.engine.core.finish import Finish
from headrace.engine.core.kv_memory import KvMemory
from headrace.engine.core.ngram import Speculation
from headrace.engine.core.placement import USUAL, Placement
from headrace.engine.core.request import Sequence
from headrace.engine.core.sampling_plan import SamplingPlan
from headrace.engine.core.scheduler import BatchLimits, Scheduler
from headrace.engine.core.step import SequenceSlice, StepPlan
from headrace.engine.simulated.backend import SimulatedBackend
from headrace.engine.worker.config import WorkerConfig

KEY = PrefixKey(bytes(range(32)))
EOS_IDS = frozenset({2})


def timeless_backend(blocks: int, block_size: int, *, echo: int = 0) -> SimulatedBackend:
    """The simulated backend with a clock that stands still; `echo` is its `simulate_echo_tokens`."""
    return SimulatedBackend(
        WorkerConfig(
            block_size=block_size,
            kv_cache_memory_bytes=46_080 * block_size * blocks,
            simulate_step_ms=0.0,
            simulate_itl_ms=0.0,
            simulate_prefill_tokens_per_s=math.inf,
            simulate_echo_tokens=echo,
        )
    )


class Bench:
    """Everything that came out of a scheduler, which is checked after every step.

    `caching` False turns the prefix cache off. Time is the number of steps taken. `guesses` are made at up to so many
    tokens, while at most `guessed_sequences` run (None: any number); answers say again what stood `echo` tokens before.
    """

    def __init__(
        self,
        *,
        blocks: int = 64,
        block_size: int = 4,
        seqs: int = 8,
        budget: int = 64,
        chunked: bool = True,
        waiting: int = 16,
        caching: bool = True,
        guesses: int = 0,
        guessed_sequences: int | None = None,
        echo: int = 0,
    ) -> None:
        self.pool = BlockPool(blocks, block_size)
        limits = BatchLimits(
            max_num_seqs=seqs, max_num_batched_tokens=budget, enable_chunked_prefill=chunked, max_waiting=waiting
        )
        self.memory = KvMemory(self.pool, KEY if caching else None, "bundle")
        most = seqs if guessed_sequences is None else guessed_sequences
        speculation = Speculation(tokens=guesses, longest=3, shortest=1, most_sequences=most) if guesses else None
        self.scheduler = Scheduler(limits, self.memory, EOS_IDS, speculation)
        self.backend = timeless_backend(blocks, block_size, echo=echo)
        self.drafted = self.accepted = 0
        self.now = 0.0
        self.tokens: dict[int, list[int]] = {}
        self.finishes: dict[int, Finish] = {}

    def submit(
        self, id: int, prompt: int | list[int], max_tokens: int = 4, *, n: int = 1, **fields: object
    ) -> Sequence:
        """Submit `n` answers with ids from `id`; a prompt given by its length is one that no other id shares.

        `fields` are the sequence's, or the sampling plan's. Returns the first sequence.
        """
        token_ids = [1000 * id + i for i in range(prompt)] if isinstance(prompt, int) else prompt
        names = {field.name for field in dataclasses.fields(SamplingPlan)}
        plan = SamplingPlan(max_tokens=max_tokens, **{k: v for k, v in fields.items() if k in names})  # type: ignore[arg-type]
        rest = {k: v for k, v in fields.items() if k not in names}
        family = [
            Sequence(
                id=id + index,
                token_ids=list(token_ids),
                prompt_length=len(token_ids),
                plan=dataclasses.replace(plan, seed=plan.seed + index),
                arrived_at=self.now,
                **rest,  # type: ignore[arg-type]
            )
            for index in range(n)
        ]
        for sequence in family:
            self.tokens[sequence.id] = []
        self.collect(*self.scheduler.submit(family[0], self.now, family[1:]))
        return family[0]

    def step(self) -> StepPlan:
        """One step; raises when a slice would write what is not its own, or the accounts do not add up."""
        plan = self.scheduler.schedule(self.now)
        self._check_writes(plan)
        self._check_guesses(plan)
        self.backend.copy_blocks(plan.copies)
        outcome = self.scheduler.update(plan, self.backend.execute(plan.slices, {}), self.now)
        for id, token in zip(outcome.sequence_ids, outcome.token_ids, strict=True):
            assert id not in self.finishes
            self.tokens[id].append(token)
        self.drafted += outcome.drafted
        self.accepted += outcome.accepted
        self.collect(*plan.expired, *outcome.finishes)
        self.scheduler.check()
        self.now += 1.0
        return plan

    def collect(self, *finishes: Finish | None) -> None:
        """Note how sequences ended; each ends once."""
        for finish in finishes:
            if finish is not None:
                assert finish.sequence_id not in self.finishes
                self.finishes[finish.sequence_id] = finish

    def run(self) -> None:
        """Step until nothing is left."""
        while self.scheduler.running or self.scheduler.waiting:
            self.step()

    def _check_guesses(self, plan: StepPlan) -> None:
        """They get what is left over, in a step in which nobody had to give way; the sequences do not know of them."""
        size = self.pool.block_size
        for piece in plan.slices:
            if piece.drafted:
                end = piece.start + len(piece.token_ids)
                assert len(piece.known_token_ids) == end - piece.drafted
                took_blocks = self.pool.blocks_for(end) > (end - piece.drafted - 1) // size + 1
                assert not plan.preempted
                assert not took_blocks or self.pool.free_blocks >= self.scheduler.watermark

    def _check_writes(self, plan: StepPlan) -> None:
        size = self.pool.block_size
        for piece in plan.slices:
            end = piece.start + len(piece.token_ids)
            for at in range(piece.start // size, self.pool.blocks_for(end)):
                assert self.pool.is_writable(piece.block_table[at]), "a block that is shared or cached is written"


def shape(plan: StepPlan) -> dict[int, int]:
    """Tokens per sequence in a step."""
    return {piece.sequence_id: len(piece.token_ids) for piece in plan.slices}


def oracle(prompt: Seq[int], count: int, plan: SamplingPlan, *, echo: int = 0) -> list[int]:
    """The first `count` tokens of an answer, one whole-prefix computation each: no cache, no batch, no chunks."""
    tokens = list(prompt)
    blocks = -(-(len(prompt) + count) // 4)
    backend = timeless_backend(blocks, 4, echo=echo)
    for _ in range(count):
        piece = SequenceSlice(
            sequence_id=0, token_ids=tokens, start=0, block_table=range(blocks), samples=True, plan=plan
        )
        tokens += [result.token_id for result in backend.execute([piece], {}) if result.token_id is not None]
    return tokens[len(prompt) :]


def alone(prompt: int, max_tokens: int, id: int) -> list[int]:
    """The whole answer of a greedy sequence as `Bench.submit` makes it."""
    return oracle([1000 * id + i for i in range(prompt)], max_tokens, SamplingPlan(max_tokens=max_tokens))


def tenant(name: str, **fields: object) -> Placement:
    """A placement in an isolation domain."""
    return dataclasses.replace(USUAL, isolation_domain=name, **fields)  # type: ignore[arg-type]
