"""The worker process through its client: every test starts a real one."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from headrace.base.deadline import Deadline
from headrace.base.errors import StartError
from headrace.engine.core.finish import ErrorReason, Finish, FinishReason
from headrace.engine.core.load import Load
from headrace.engine.core.sampling_plan import SamplingPlan
from headrace.engine.core.step import Hold
from headrace.engine.worker.client import StepEvent, WorkerClient, WorkerConfig, WorkerDied, WorkerReady
from headrace.engine.worker.config import BackendName
from headrace.engine.worker.messages import Configure, encode

SOON = 20.0


def config(**changes: object) -> WorkerConfig:
    values: dict[str, object] = {
        "backend": BackendName.SIMULATED,
        "simulate_step_ms": 0.0,
        "simulate_itl_ms": 0.0,
        "simulate_prefill_tokens_per_s": 1e9,
    }
    return WorkerConfig(**(values | changes))  # type: ignore[arg-type]


def gone(pid: int) -> bool:
    """Whether the process has ended (a zombie has)."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


async def eventually(condition: Callable[[], bool], within_s: float = SOON) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.01)


class Ear:
    """Everything a worker has said so far."""

    def __init__(self, client: WorkerClient) -> None:
        self.events: list[StepEvent] = []
        self.tokens: dict[int, list[int]] = {}
        self.finishes: dict[int, Finish] = {}
        self._waiting: asyncio.Queue[StepEvent] = asyncio.Queue()
        self._client = client
        self._following: asyncio.Future[None] | None = None

    async def hear(self) -> StepEvent:
        """The next event; StopAsyncIteration when the worker was stopped, WorkerDied when it ended by itself."""
        if self._following is None:
            self._following = asyncio.ensure_future(self._client.follow(self._waiting.put_nowait))
        heard = asyncio.ensure_future(self._waiting.get())
        await asyncio.wait({heard, self._following}, return_when=asyncio.FIRST_COMPLETED)
        if not heard.done():
            heard.cancel()
            self._following.result()
            raise StopAsyncIteration
        event = heard.result()
        self.events.append(event)
        for sequence_id, token in zip(event.sequence_ids, event.token_ids, strict=True):
            assert sequence_id not in self.finishes
            self.tokens.setdefault(sequence_id, []).append(token)
        for finish in event.finishes:
            assert finish.sequence_id not in self.finishes
            self.finishes[finish.sequence_id] = finish
        return event

    async def until_finished(self, *sequence_ids: int) -> Load:
        async with asyncio.timeout(SOON):
            while not self.finishes.keys() >= set(sequence_ids):
                await self.hear()
        return self.events[-1].load

    async def until_tokens(self, sequence_id: int, count: int) -> None:
        async with asyncio.timeout(SOON):
            while len(self.tokens.get(sequence_id, ())) < count:
                await self.hear()


@asynccontextmanager
async def started(**changes: object) -> AsyncIterator[tuple[WorkerClient, Ear, WorkerReady]]:
    client = WorkerClient()
    ready = await client.start(config(**changes), timeout_s=SOON)
    try:
        yield client, Ear(client), ready
    finally:
        await client.stop()
        assert gone(client.pid)


def submit(client: WorkerClient, token_ids: list[int], max_tokens: int = 5) -> int:
    return client.submit(token_ids, SamplingPlan(max_tokens=max_tokens), deadline=Deadline.after(60))


async def test_a_sequence_is_answered_to_its_last_token_and_leaves_the_cache_empty() -> None:
    async with started() as (client, ear, ready):
        sequence_id = submit(client, [5, 6, 7])
        load = await ear.until_finished(sequence_id)
        assert len(ear.tokens[sequence_id]) == 5
        finish = ear.finishes[sequence_id]
        assert (finish.reason, finish.problem, finish.prefill_chunks) == (FinishReason.LENGTH, None, 1)
        assert finish.queue_ms > 0
        assert (load.running, load.waiting, load.free_blocks) == (0, 0, ready.load.total_blocks)


async def test_a_ready_worker_says_what_it_is_and_how_fast_its_warm_up_was() -> None:
    async with started(
        simulate_itl_ms=5.0, simulate_prefill_tokens_per_s=10_000.0, block_size=8, kv_cache_memory_bytes=46_080 * 640
    ) as (_, _, ready):
        assert (ready.vocab_size, ready.eos_ids, ready.block_size) == (49_152, frozenset({2}), 8)
        assert (ready.load.total_blocks, ready.load.free_blocks) == (80, 80)
        assert ready.max_model_len == 640  # the model could do more, the cache cannot
        assert ready.load.itl_ms is not None
        assert ready.load.prefill_tokens_per_s is not None
        assert ready.load.itl_ms >= 5.0
        assert 0 < ready.load.prefill_tokens_per_s <= 10_000.0


@pytest.mark.parametrize(
    ("token_ids", "plan", "reason", "field"),
    [
        ([], SamplingPlan(max_tokens=1), ErrorReason.EMPTY_PROMPT, "token_ids"),
        ([1, 49_152], SamplingPlan(max_tokens=1), ErrorReason.TOKEN_OUT_OF_RANGE, "token_ids[1]"),
        ([1] * 64, SamplingPlan(max_tokens=1), ErrorReason.CONTEXT_EXCEEDED, "token_ids"),
        ([1], SamplingPlan(max_tokens=0), ErrorReason.INVALID_FIELD, "sampling.max_tokens"),
    ],
)
async def test_a_bad_submission_is_refused_by_field_and_the_next_one_is_answered(
    token_ids: list[int], plan: SamplingPlan, reason: ErrorReason, field: str
) -> None:
    async with started(max_model_len=64) as (client, ear, _):
        bad = client.submit(token_ids, plan, deadline=Deadline.after(60))
        good = submit(client, [1, 2])
        await ear.until_finished(bad, good)
        problem = ear.finishes[bad].problem
        assert problem is not None
        assert (ear.finishes[bad].reason, problem.reason, problem.field) == (FinishReason.ERROR, reason, field)
        assert len(ear.tokens[good]) == 5


async def test_an_answer_longer_than_the_context_is_cut_there() -> None:
    async with started(max_model_len=20) as (client, ear, _):
        sequence_id = submit(client, [1] * 12, max_tokens=1000)
        await ear.until_finished(sequence_id)
        assert (len(ear.tokens[sequence_id]), ear.finishes[sequence_id].reason) == (8, FinishReason.LENGTH)


async def test_a_sequence_larger_than_the_cache_is_refused() -> None:
    async with started(max_model_len=1000, kv_cache_memory_bytes=46_080 * 64) as (client, ear, _):
        sequence_id = submit(client, [1] * 60, max_tokens=10)
        await ear.until_finished(sequence_id)
        problem = ear.finishes[sequence_id].problem
        assert problem is not None
        assert problem.reason is ErrorReason.CACHE_EXCEEDED


async def test_an_abort_frees_the_blocks_with_the_next_event() -> None:
    async with started(simulate_itl_ms=5.0) as (client, ear, ready):
        sequence_id = submit(client, [1] * 100, max_tokens=5000)
        await ear.until_tokens(sequence_id, 3)
        client.abort(sequence_id)
        load = await ear.until_finished(sequence_id)
        problem = ear.finishes[sequence_id].problem
        assert problem is not None
        assert (ear.finishes[sequence_id].reason, problem.reason) == (FinishReason.CANCELLED, ErrorReason.CANCELLED)
        assert (load.running, load.free_blocks) == (0, ready.load.total_blocks)


async def test_a_deadline_ends_a_waiting_sequence_though_nothing_else_happens() -> None:
    async with started(fault="full_cache") as (client, ear, _):
        sequence_id = client.submit([1, 2], SamplingPlan(max_tokens=3), deadline=Deadline.after(0.2))
        await ear.until_finished(sequence_id)
        problem = ear.finishes[sequence_id].problem
        assert problem is not None
        assert problem.reason is ErrorReason.DEADLINE_EXCEEDED
        assert ear.finishes[sequence_id].queue_ms >= 200


async def test_a_queue_that_is_full_refuses_and_says_so() -> None:
    async with started(fault="full_cache", max_waiting=2) as (client, ear, _):
        *_, last = (submit(client, [1, 2]) for _ in range(3))
        load = await ear.until_finished(last)
        problem = ear.finishes[last].problem
        assert problem is not None
        assert (problem.reason, load.waiting, ear.events[-1].hold) == (ErrorReason.QUEUE_FULL, 2, Hold.BLOCKS)


async def test_a_tiny_cache_preempts_and_tells_but_answers_the_same() -> None:
    async with started() as (client, ear, _):
        free = [submit(client, [7, n, n], max_tokens=40) for n in range(6)]
        await ear.until_finished(*free)
        unpreempted = [ear.tokens[i] for i in free]
    async with started(kv_cache_memory_bytes=46_080 * 16 * 8) as (client, ear, _):
        tight = [submit(client, [7, n, n], max_tokens=40) for n in range(6)]
        await ear.until_finished(*tight)
        assert [ear.tokens[i] for i in tight] == unpreempted
        preemptions = sum(f.preemptions for f in ear.finishes.values())
        assert preemptions > 0
        assert preemptions == sum(e.preemptions for e in ear.events)


async def test_sixty_four_sequences_take_little_more_than_their_steps() -> None:
    async with started(max_num_seqs=64, kv_cache_memory_bytes=1 << 30) as (client, ear, _):
        began = time.monotonic()
        ids = [submit(client, [1, 2, n], max_tokens=200) for n in range(64)]
        await ear.until_finished(*ids)
        took_s = time.monotonic() - began
        assert all(len(ear.tokens[i]) == 200 for i in ids)
        # Batched, 200 steps of 0.3 ms here; one sequence at a time it would be 12,800 steps, and this bound's half.
        assert took_s < SOON


async def test_who_begins_to_follow_late_loses_nothing() -> None:
    async with started(max_num_seqs=64, kv_cache_memory_bytes=1 << 30) as (client, ear, _):
        ids = [submit(client, [1, 2, n], max_tokens=1500) for n in range(64)]
        spent = [0]

        def held_back() -> bool:
            before = spent[0]
            with open(f"/proc/{client.pid}/stat") as stat:
                fields = stat.read().rpartition(")")[2].split()
            spent[0] = int(fields[11]) + int(fields[12])
            return client._inbox._paused and fields[0] == "S" and spent[0] == before

        await eventually(held_back)
        client.abort(ids[0])
        await ear.until_finished(*ids)
        assert ear.finishes[ids[0]].reason is FinishReason.CANCELLED  # it had waited for us in mid-answer
        assert all(len(ear.tokens[i]) == 1500 for i in ids[1:])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"backend": BackendName.MODEL, "fault": "slow=2"}, "fault='slow=2' needs backend=simulated"),
        ({"fault": "slow=2,explode"}, "fault 'explode' is not one of: slow=FACTOR"),
        ({"fault": "die_after_tokens=soon"}, "fault 'die_after_tokens=soon' is not one of"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 32}, "max_num_seqs=64 must be from 1 to"),
        ({"max_itl_stretch": 0.9}, "max_itl_stretch=0.9 must be above 1, or 0 for no pacing"),
        ({"max_model_len": 9000}, "max_model_len=9000 is more than the 8192 tokens that model and bundle allow"),
        (
            {"max_model_len": 1024, "enable_chunked_prefill": False},
            "max_model_len=1024 is more than the 512 tokens that max_num_batched_tokens without chunks allows",
        ),
        ({"kv_cache_memory_bytes": 1000}, "kv_cache_memory_bytes=1000 is less than one block of 737280"),
        ({"simulate_prefill_tokens_per_s": 0.0}, "simulate_prefill_tokens_per_s=0.0 must be above 0"),
        ({"simulate_itl_ms": -1.0}, "simulate_itl_ms=-1.0 must be at least 0"),
        ({"max_waiting": 0}, "max_waiting and block_size must be at least 1"),
        ({"backend": BackendName.MODEL, "model": "/nowhere/model.gguf"}, "/nowhere/model.gguf"),
    ],
)
async def test_a_setting_that_cannot_be_is_a_start_error_in_the_workers_words(
    changes: dict[str, object], words: str
) -> None:
    client = WorkerClient()
    with pytest.raises(StartError, match=words.replace("(", r"\(")):
        await client.start(config(**changes), timeout_s=SOON)
    assert gone(client.pid)


async def test_without_chunks_the_context_is_what_one_step_holds() -> None:
    async with started(enable_chunked_prefill=False, max_num_batched_tokens=100) as (client, ear, ready):
        assert ready.max_model_len == 100
        sequence_id = submit(client, [1] * 99)
        await ear.until_finished(sequence_id)
        assert ear.finishes[sequence_id].prefill_chunks == 1


@pytest.mark.parametrize(("stretch", "chunks"), [(2.0, range(4, 1000)), (0.0, range(2, 3))])
async def test_beside_a_running_stream_a_long_prompt_is_cut_by_time_unless_that_is_off(
    stretch: float, chunks: range
) -> None:
    # A step of 512 tokens would take 256 ms, fifty times as long as the stream's own.
    slow: dict[str, object] = {"simulate_itl_ms": 5.0, "simulate_prefill_tokens_per_s": 2000.0}
    async with started(max_itl_stretch=stretch, **slow) as (client, ear, _):
        stream = submit(client, [1, 2, 3], max_tokens=5000)
        await ear.until_tokens(stream, 3)
        newcomer = submit(client, [7] * 1000, max_tokens=1)
        await ear.until_finished(newcomer)
        assert ear.finishes[newcomer].prefill_chunks in chunks
        client.abort(stream)
        await ear.until_finished(stream)


async def test_a_worker_that_is_not_ready_in_time_is_a_start_error_and_gone() -> None:
    client = WorkerClient()
    with pytest.raises(StartError, match=r"was not ready after 0\.3 s"):
        await client.start(config(simulate_warm_up_s=60.0), timeout_s=0.3)
    assert gone(client.pid)


async def test_a_start_that_is_cancelled_leaves_no_process() -> None:
    client = WorkerClient()
    starting = asyncio.create_task(client.start(config(simulate_warm_up_s=60.0), timeout_s=SOON))

    def spawned() -> bool:
        try:
            return client.pid > 0
        except RuntimeError:
            return False

    await eventually(spawned)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert gone(client.pid)


async def test_a_killed_worker_is_heard_of_at_once() -> None:
    async with started(simulate_itl_ms=5.0) as (client, ear, _):
        sequence_id = submit(client, [1], max_tokens=5000)
        await ear.until_tokens(sequence_id, 1)
        os.kill(client.pid, 9)
        with pytest.raises(WorkerDied, match=f"pid {client.pid}.*was killed by SIGKILL"):
            async with asyncio.timeout(SOON):
                while True:
                    await ear.hear()


async def test_an_exception_in_the_worker_reaches_the_shell_in_words() -> None:
    async with started() as (client, ear, _):
        assert client._transport is not None
        client._transport.write(encode(Configure(config=config())))  # what no shell does: the loop raises
        with pytest.raises(WorkerDied, match="TypeError: Configure is not for a running worker"):
            async with asyncio.timeout(SOON):
                await ear.hear()
        await eventually(lambda: gone(client.pid))


async def test_stopping_ends_the_events_and_may_be_repeated() -> None:
    client = WorkerClient()
    await client.start(config(simulate_itl_ms=5.0), timeout_s=SOON)
    sequence_id = submit(client, [1], max_tokens=5000)
    ear = Ear(client)
    await ear.until_tokens(sequence_id, 1)
    await client.stop()
    with pytest.raises(StopAsyncIteration):
        while True:
            await ear.hear()
    await client.stop()
    assert gone(client.pid)


async def test_a_worker_in_a_long_step_is_killed_after_the_grace() -> None:
    client = WorkerClient()
    # One step of 8,000 tokens takes 8 s; the warm-up's 256 take a quarter of a second.
    slow = config(max_num_batched_tokens=8192, simulate_prefill_tokens_per_s=1000.0, kv_cache_memory_bytes=1 << 30)
    await client.start(slow, timeout_s=SOON)
    submit(client, [1] * 8000, max_tokens=1)
    began = time.monotonic()
    await client.stop(grace_s=0.1)
    assert time.monotonic() - began < 4
    assert gone(client.pid)


async def test_ctrl_c_in_the_terminal_does_not_reach_the_worker() -> None:
    async with started() as (client, _, _):
        assert os.getpgid(client.pid) != os.getpgid(0)


def test_the_worker_process_needs_neither_grpc_nor_torch_nor_asyncio() -> None:
    code = "import headrace.engine.worker.__main__, sys; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=SOON)
    assert not {"grpc", "torch", "asyncio", "google.protobuf"} & set(loaded.stdout.split())
