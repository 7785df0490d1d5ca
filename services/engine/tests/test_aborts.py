"""An abort in any state, a thousand times over, frees everything."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from headrace.engine.core.request import State
from headrace.testkit.engine_bench import Bench


def waiting(bench: Bench, id: int) -> None:
    bench.submit(99_990, 1, max_tokens=30)
    while not bench.scheduler.running:
        bench.step()
    for other in range(1, bench.scheduler.limits.max_num_seqs):
        bench.submit(99_990 + other, 1, max_tokens=30)
    bench.step()
    bench.submit(id, 6)
    bench.step()


def waiting_for_grammar(bench: Bench, id: int) -> None:
    bench.submit(id, 6, grammar_pending=True)
    bench.step()


def prefilling(bench: Bench, id: int) -> None:
    bench.submit(id, 60)
    for _ in range(1 + id % 6):
        bench.step()


def decoding(bench: Bench, id: int) -> None:
    bench.submit(id, 6, max_tokens=40)
    for _ in range(2 + id % 9):
        bench.step()


def preempted(bench: Bench, id: int) -> None:
    bench.submit(99_990, 8, max_tokens=40)
    bench.step()
    bench.submit(id, 8, max_tokens=40)
    while not bench.step().preempted:
        pass


def attached(bench: Bench, id: int) -> None:
    bench.submit(id - 1, 30, n=3)
    bench.step()


def forked(bench: Bench, id: int) -> None:
    bench.submit(id - 1, 6, n=3, max_tokens=40)
    for _ in range(1 + id % 9):
        bench.step()


IN_STATE = [
    (waiting, State.WAITING),
    (waiting_for_grammar, State.WAITING_FOR_GRAMMAR),
    (prefilling, State.RUNNING),
    (decoding, State.RUNNING),
    (preempted, State.WAITING),
    (attached, State.ATTACHED),
    (forked, State.RUNNING),
]


@pytest.mark.parametrize(("bring", "state"), IN_STATE, ids=[bring.__name__ for bring, _ in IN_STATE])
def test_a_thousand_aborts_in_a_state_bring_the_pool_back_to_its_start(
    bring: Callable[[Bench, int], None], state: State
) -> None:
    """(vllm#46283, sglang-jax#982)"""
    bench = Bench(blocks=12 if state is State.WAITING else 20, budget=8, seqs=4)
    for id in range(1000, 1000 + 3 * 1000, 3):
        bring(bench, id)
        sequence = next(s for s in bench.scheduler if s.id == id)
        assert sequence.state is state
        assert bench.scheduler.abort(id, bench.now) is not None
        for other in list(bench.scheduler):
            bench.scheduler.abort(other.id, bench.now)
        bench.scheduler.check()
        assert bench.pool.free_blocks == bench.pool.total_blocks
        bench.finishes.clear()
    assert bench.step().slices == ()
