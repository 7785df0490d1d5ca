"""Twenty thousand requests through the worker's loop, on a clock that does not wait: nothing is left of them."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from headrace.engine.core.block_pool import BlockPool
from headrace.engine.core.finish import FinishReason
from headrace.engine.core.kv_memory import KvMemory
from headrace.engine.core.placement import Placement, Priority
from headrace.engine.core.sampling_plan import SamplingPlan
from headrace.engine.core.scheduler import BatchLimits, Scheduler
from headrace.engine.core.submission import ModelLimits
from headrace.engine.worker.grammar import Grammars
from headrace.engine.worker.loop import StepLoop
from headrace.engine.worker.messages import Abort, Command, LongStep, StepEvent, Submit
from headrace.testkit.engine_bench import EOS_IDS, KEY, timeless_backend

REQUESTS = 20_000
AT_ONCE = 24
BLOCKS, BLOCK_SIZE = 96, 8


class Over(Exception):
    """All requests are answered."""


class Shell:
    """Keeps `AT_ONCE` requests in the worker: some cancelled, some with several answers, some late, many alike."""

    def __init__(self) -> None:
        self.now = 0.0
        self.order = random.Random(3)
        self.next_id = 1
        self.submitted = 0
        self.open: set[int] = set()
        self.ends: dict[FinishReason, int] = dict.fromkeys(FinishReason, 0)
        self.tokens = 0
        self.cached_tokens = 0
        self.resident: list[int] = []
        self.free_blocks = -1

    def clock(self) -> float:
        return self.now

    def receive(self, wait_s: float, /) -> list[Command]:
        self.now += 0.01
        if self.submitted >= REQUESTS and not self.open:
            raise Over
        commands: list[Command] = []
        while self.submitted < REQUESTS and len(self.open) < AT_ONCE:
            commands.append(self.request())
        if self.open and self.order.random() < 0.05:
            commands.append(Abort(sequence_id=self.order.choice(sorted(self.open))))
        return commands

    def request(self) -> Submit:
        order, first = self.order, self.next_id
        n = order.choice((1, 1, 1, 1, 3))
        self.next_id += n
        self.submitted += 1
        self.open |= set(range(first, self.next_id))
        if self.submitted % (REQUESTS // 20) == 0:
            self.resident.append(resident_bytes())
        first_token = 1000 + 100 * order.randrange(6)
        stem = range(first_token, first_token + order.randrange(1, 60))
        return Submit(
            sequence_id=first,
            token_ids=[*stem, *(order.randrange(40_000) for _ in range(order.randrange(4)))],
            plan=SamplingPlan(max_tokens=order.randrange(1, 12), temperature=1.0, seed=first),
            arrived_at=self.now,
            deadline_at=self.now + order.choice((0.05, 1e6, 1e6, 1e6)),
            n=n,
            placement=Placement(priority=order.choice(list(Priority)), isolation_domain=order.choice("ab")),
        )

    def send(self, report: StepEvent | LongStep, /) -> None:
        if isinstance(report, LongStep):
            return
        self.tokens += len(report.token_ids)
        if report.load is not None:
            self.free_blocks = report.load.free_blocks
        for finish in report.finishes:
            self.open.remove(finish.sequence_id)
            self.ends[finish.reason] += 1
            self.cached_tokens += finish.cached_tokens


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_twenty_thousand_requests_leave_memory_flat_and_every_block_free() -> None:
    shell = Shell()
    memory = KvMemory(BlockPool(BLOCKS, BLOCK_SIZE), KEY, "bundle")
    limits = BatchLimits(max_num_seqs=16, max_num_batched_tokens=64, enable_chunked_prefill=True, max_waiting=64)
    scheduler = Scheduler(limits, memory, EOS_IDS)
    grammars = Grammars(Path(), vocab_size=49_152, eos_ids=EOS_IDS)
    model = ModelLimits(vocab_size=49_152, max_model_len=256)
    loop = StepLoop(scheduler, timeless_backend(BLOCKS, BLOCK_SIZE), grammars, model, clock=shell.clock)
    with pytest.raises(Over):
        loop.serve(shell)
    assert sum(shell.ends.values()) == shell.next_id - 1
    assert all(shell.ends[reason] > 500 for reason in (FinishReason.LENGTH, FinishReason.CANCELLED))
    assert shell.cached_tokens > 50_000
    assert shell.free_blocks == BLOCKS
    assert list(scheduler) == []
    scheduler.check()
    # Between a fifth and the end of 20,000 requests: a leak of 100 bytes each would be 1.6 MB.
    assert shell.resident[-1] - shell.resident[3] < 1_500_000
