"""The engine's gRPC shell, in this process, over a real worker process with the simulated backend."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest

from headrace.api.common.v1 import answer_pb2, sampling_pb2
from headrace.api.engine.v1 import engine_service_pb2 as pb
from headrace.api.engine.v1 import engine_service_pb2_grpc as rpc
from headrace.base.deadline import Deadline
from headrace.base.errors import DeadlinePassed, InvalidRequest, StaleEpoch, StartError, Unavailable
from headrace.engine.app import EngineApp
from headrace.engine.settings import BackendName, EngineSettings
from headrace.engine.worker.client import WorkerDied
from headrace.rpc.client import Peer

LENGTH, STOP = answer_pb2.FINISH_REASON_LENGTH, answer_pb2.FINISH_REASON_STOP
CANCELLED, ERROR = answer_pb2.FINISH_REASON_CANCELLED, answer_pb2.FINISH_REASON_ERROR


class Shell:
    """A running engine and a peer of it."""

    def __init__(self, app: EngineApp, peer: Peer) -> None:
        self.app = app
        self.peer = peer
        self.running: asyncio.Future[None]
        self.stub = rpc.EngineServiceStub(peer.channel)

    async def generate(self, deadline: Deadline | None = None, **fields: Any) -> list[pb.GenerateResponse]:
        request = pb.GenerateRequest(**fields)
        until = deadline or Deadline.after(20)
        async with self.peer.stream(self.stub.Generate, request, deadline=until) as events:
            return [event async for event in events]

    async def describe(self) -> pb.DescribeResponse:
        answer: pb.DescribeResponse = await self.peer.unary(
            self.stub.Describe, pb.DescribeRequest(), deadline=Deadline.after(5)
        )
        return answer


class Attached:
    """A gateway's end of one Attach stream: send what you like, read what comes."""

    def __init__(self) -> None:
        self.sending: asyncio.Queue[pb.AttachRequest | None] = asyncio.Queue()
        self.responses: AsyncIterator[pb.AttachResponse]

    async def requests(self) -> AsyncIterator[pb.AttachRequest]:
        while (request := await self.sending.get()) is not None:
            yield request

    def hello(self, epoch: int = 0) -> None:
        self.sending.put_nowait(pb.AttachRequest(hello=pb.Hello(gateway_id="g", epoch=epoch)))

    def submit(self, slot: int, ids: list[int], fields: dict[str, Any] | None = None, **sampling: Any) -> None:
        params = sampling_pb2.SamplingParams(**({"max_tokens": 5, "seed": 1} | sampling))
        submit = pb.Submit(
            slot=slot, request_id=f"r{slot}", attempt=1, token_ids=ids, sampling=params, **(fields or {})
        )
        self.sending.put_nowait(pb.AttachRequest(submit=submit))

    def cancel(self, slot: int) -> None:
        self.sending.put_nowait(pb.AttachRequest(cancel=pb.Cancel(slot=slot)))

    async def until_finished(self, *slots: int) -> tuple[dict[int, list[int]], dict[int, pb.Finish], list[pb.Step]]:
        tokens: dict[int, list[int]] = {slot: [] for slot in slots}
        finishes: dict[int, pb.Finish] = {}
        steps = []
        while set(finishes) < set(slots):
            step = (await asyncio.wait_for(anext(self.responses), 10)).step
            steps.append(step)
            for slot, token in zip(step.slots, step.token_ids, strict=True):
                tokens[slot].append(token)
            finishes |= {f.slot: f for f in step.finishes}
        return tokens, finishes, steps


async def start(**settings: Any) -> Shell:
    app = EngineApp(EngineSettings(backend=BackendName.SIMULATED, simulate_itl_ms=5, **settings))
    try:
        await app.start()
    except StartError:
        await app.drain()
        raise
    return Shell(app, Peer(app.address))


@pytest.fixture
async def shell() -> AsyncIterator[Shell]:
    made = await start(grace_s=5)
    made.running = asyncio.ensure_future(made.app.run())
    yield made
    made.running.cancel()
    await asyncio.wait({made.running})
    await made.peer.close()
    await made.app.drain()


@pytest.fixture
async def attached(shell: Shell) -> AsyncIterator[Attached]:
    end = Attached()
    async with shell.peer.stream(shell.stub.Attach, end.requests(), deadline=Deadline.never()) as responses:
        end.responses = responses
        end.hello()
        welcome = (await anext(responses)).welcome
        assert (welcome.engine_id, welcome.vocab_size) == ("engine-0", 49_152)
        yield end


async def test_steps_are_columns_counted_without_gaps_and_finishes_close_slots(attached: Attached) -> None:
    attached.submit(7, [1, 2, 3])
    attached.submit(9, [4, 5], max_tokens=3)
    tokens, finishes, steps = await attached.until_finished(7, 9)
    assert {slot: len(ids) for slot, ids in tokens.items()} == {7: 5, 9: 3}
    assert [s.step for s in steps] == list(range(1, len(steps) + 1))
    assert {f.reason for f in finishes.values()} == {LENGTH}
    assert {slot: len(f.later_ms) for slot, f in finishes.items()} == {7: 4, 9: 2}
    assert any(len(s.slots) == 2 for s in steps), "sequences of one step share a message"
    attached.submit(7, [1, 2, 3])
    again, _, _ = await attached.until_finished(7)
    assert again[7] == tokens[7]


async def test_a_cancel_is_confirmed_by_a_finish_record(attached: Attached, shell: Shell) -> None:
    attached.submit(1, [1, 2, 3], max_tokens=4000)
    await anext(attached.responses)
    attached.cancel(1)
    _, finishes, _ = await attached.until_finished(1)
    assert finishes[1].reason == CANCELLED
    load = (await shell.describe()).heartbeat
    assert (load.running, load.waiting, load.free_blocks) == (0, 0, load.total_blocks)
    attached.cancel(1)  # a cancel that crosses the finish is no error
    attached.submit(1, [1], max_tokens=1)
    assert (await attached.until_finished(1))[1][1].reason == LENGTH


@pytest.mark.parametrize(
    ("ids", "sampling", "reason", "field"),
    [
        ([], {}, "EMPTY_PROMPT", "token_ids"),
        ([1, 50_000], {}, "TOKEN_OUT_OF_RANGE", "token_ids[1]"),
        ([1] * 9_000, {}, "CONTEXT_EXCEEDED", "token_ids"),
        ([1], {"top_p": 0.0}, "INVALID_FIELD", "sampling.top_p"),
    ],
)
async def test_a_bad_submission_finishes_with_its_field_and_the_stream_goes_on(
    attached: Attached, ids: list[int], sampling: dict[str, Any], reason: str, field: str
) -> None:
    attached.submit(3, ids, **sampling)
    _, finishes, _ = await attached.until_finished(3)
    assert (finishes[3].reason, finishes[3].error_reason, finishes[3].error_field) == (ERROR, reason, field)
    attached.submit(3, [1, 2], max_tokens=2)
    tokens, _, _ = await attached.until_finished(3)
    assert len(tokens[3]) == 2


async def test_a_slot_in_use_is_refused_by_field(attached: Attached) -> None:
    attached.submit(1, [1], max_tokens=4000)
    attached.submit(1, [2])
    with pytest.raises(InvalidRequest) as invalid:
        await attached.until_finished(1)
    assert invalid.value.field == "submit.slot"


async def test_a_gateway_that_leaves_takes_its_sequences_along(shell: Shell) -> None:
    end = Attached()
    async with shell.peer.stream(shell.stub.Attach, end.requests(), deadline=Deadline.never()) as responses:
        end.hello()
        end.submit(1, [1], max_tokens=4000)
        end.submit(2, [2], max_tokens=4000)
        await anext(responses)
        await anext(responses)
    for _ in range(200):
        load = (await shell.describe()).heartbeat
        if load.running == load.waiting == 0 and load.free_blocks == load.total_blocks:
            break
        await asyncio.sleep(0.01)
    else:
        raise AssertionError(f"still busy: {load}")


async def test_hello_must_come_first_and_name_this_epoch(shell: Shell) -> None:
    for epoch, error in ((12345, StaleEpoch), (None, InvalidRequest)):
        end = Attached()
        async with shell.peer.stream(shell.stub.Attach, end.requests(), deadline=Deadline.never()) as responses:
            if epoch is None:
                end.submit(1, [1])
            else:
                end.hello(epoch)
            with pytest.raises(error):
                await anext(responses)


async def test_several_answers_take_a_slot_each_and_end_each(attached: Attached) -> None:
    attached.submit(10, [1, 2, 3], n=3, temperature=1.0)
    tokens, finishes, _ = await attached.until_finished(10, 11, 12)
    assert {slot: (len(ids), finishes[slot].reason) for slot, ids in tokens.items()} == dict.fromkeys(
        (10, 11, 12), (5, LENGTH)
    )
    assert len({tuple(ids) for ids in tokens.values()}) == 3
    attached.submit(20, [1, 2, 3], temperature=1.0, seed=2)
    assert (await attached.until_finished(20))[0][20] == tokens[11], "answer i is the one that seed + i gives alone"
    attached.submit(30, [1, 2, 3], n=3, max_tokens=4000)
    for slot in (31, 30, 32):
        attached.cancel(slot)
    _, finishes, _ = await attached.until_finished(30, 31, 32)
    assert {finish.reason for finish in finishes.values()} == {CANCELLED}


@pytest.mark.parametrize(
    ("sampling", "fields", "field"),
    [
        ({"n": 17}, {}, "sampling.n"),
        ({"n": 2, "logit_bias": [{"token_id": 3}, {"token_id": 3}]}, {}, "sampling.logit_bias[1].token_id"),
        ({}, {"emitted_tokens": 3}, "emitted_tokens"),
        ({"n": 2, "temperature": 9.0}, {}, "sampling.temperature"),
    ],
)
async def test_a_bad_family_is_refused_slot_by_slot_and_the_stream_goes_on(
    attached: Attached, sampling: dict[str, Any], fields: dict[str, Any], field: str
) -> None:
    attached.submit(1, [5, 6], fields, **sampling)
    slots = range(1, 1 + min(sampling.get("n", 1), 16))
    _, finishes, _ = await attached.until_finished(*slots)
    assert {(f.reason, f.error_reason, f.error_field) for f in finishes.values()} == {(ERROR, "INVALID_FIELD", field)}
    attached.submit(1, [5, 6])
    assert (await attached.until_finished(1))[1][1].reason == LENGTH


async def test_log_probabilities_come_with_the_step_and_those_of_the_prompt_at_the_end(attached: Attached) -> None:
    attached.submit(1, [5, 6, 7], logprobs=2, prompt_logprobs=0)
    attached.submit(2, [5, 6, 7])
    tokens, finishes, steps = await attached.until_finished(1, 2)
    said = [entry for step in steps for entry in step.logprobs]
    assert [(entry.slot, entry.logprobs.token.token_id) for entry in said] == [(1, token) for token in tokens[1]]
    assert {len(entry.logprobs.top) for entry in said} == {2}
    assert [entry.token.token_id for entry in finishes[1].prompt_logprobs] == [6, 7]
    assert list(finishes[2].prompt_logprobs) == []


async def test_cached_tokens_are_counted_within_a_tenant_only(attached: Attached) -> None:
    prompt = list(range(100, 150))
    for slot, tenant, cached in ((1, "a", 0), (2, "a", 48), (3, "b", 0)):
        attached.submit(slot, prompt, {"isolation_domain": tenant, "priority": pb.PRIORITY_BATCH})
        _, finishes, _ = await attached.until_finished(slot)
        assert finishes[slot].cached_tokens == cached


async def test_cache_events_begin_with_a_snapshot_and_follow_without_gaps(attached: Attached, shell: Shell) -> None:
    attached.submit(1, list(range(100, 150)))
    await attached.until_finished(1)
    request = pb.SubscribeCacheEventsRequest()
    async with shell.peer.stream(shell.stub.SubscribeCacheEvents, request, deadline=Deadline.after(10)) as changes:
        snapshot = await anext(changes)
        assert [len(block_hash) for block_hash in snapshot.snapshot.block_hashes] == [16] * 3
        attached.submit(1, list(range(100, 140)), {"isolation_domain": "other"})
        await attached.until_finished(1)
        stored = await anext(changes)
    assert (stored.epoch, stored.sequence) == (snapshot.epoch, snapshot.sequence + 1)
    assert not set(stored.stored.block_hashes) & set(snapshot.snapshot.block_hashes)
    request = pb.SubscribeCacheEventsRequest(epoch=snapshot.epoch, sequence=snapshot.sequence)
    async with shell.peer.stream(shell.stub.SubscribeCacheEvents, request, deadline=Deadline.after(10)) as changes:
        assert await anext(changes) == stored
    beat = (await shell.describe()).heartbeat
    assert (beat.cached_blocks, beat.pressure, beat.free_blocks) == (5, 0.0, beat.total_blocks)


async def test_generate_streams_text_and_stops_before_a_stop_text(shell: Shell) -> None:
    events = await shell.generate(prompt="Hello", sampling=sampling_pb2.SamplingParams(max_tokens=30))
    assert events[0].WhichOneof("event") == "started"
    text = "".join(e.delta.text for e in events)
    end = events[-1].finished
    assert (end.finish_reason, end.usage.completion_tokens, len(end.timings.inter_token_ms)) == (LENGTH, 30, 29)
    stop = text.split()[4]
    cut = await shell.generate(prompt="Hello", sampling=sampling_pb2.SamplingParams(max_tokens=30, stop=[stop], seed=0))
    assert "".join(e.delta.text for e in cut) == text[: text.index(stop)]
    assert cut[-1].finished.finish_reason == STOP
    chat = await shell.generate(messages=[pb.Message(role="user", content="Hello")], sampling={"max_tokens": 3})
    assert chat[0].started.prompt_tokens > events[0].started.prompt_tokens


async def test_generate_refuses_by_field_and_honours_deadlines(shell: Shell) -> None:
    for fields, field in (
        ({}, "prompt"),
        ({"prompt": "x", "messages": [{"role": "user", "content": "y"}]}, "prompt"),
        ({"prompt": "word " * 9_000}, "prompt"),
        ({"prompt": "x", "sampling": {"temperature": 3}}, "sampling.temperature"),
        ({"prompt": "x", "sampling": {"stop": [""]}}, "sampling.stop[0]"),
    ):
        with pytest.raises(InvalidRequest) as invalid:
            await shell.generate(**fields)
        assert invalid.value.field == field
    with pytest.raises(DeadlinePassed):
        await shell.generate(Deadline.after(0.3), prompt="x", sampling={"max_tokens": 4000})
    assert (await shell.generate(prompt="x", sampling={"max_tokens": 2}))[-1].finished.usage.completion_tokens == 2


async def test_describe_tells_settings_and_no_secret() -> None:
    shell = await start(redis_url="redis://:hunter2@127.0.0.1:9/0", prefix_cache_key="5ec7e7" * 8)
    try:
        answer = await shell.describe()
        assert answer.settings["max_num_seqs"] == "32"
        assert "hunter2" not in str(answer)
        assert "5ec7e7" not in str(answer)
        assert answer.heartbeat.phase == pb.PHASE_READY
        assert answer.heartbeat.prefill_tokens_per_s > 0
        assert answer.heartbeat.itl_ms > 0
    finally:
        await shell.peer.close()
        await shell.app.drain()


async def test_a_draining_engine_finishes_and_refuses(shell: Shell) -> None:
    end = Attached()
    async with shell.peer.stream(shell.stub.Attach, end.requests(), deadline=Deadline.never()) as responses:
        end.responses = responses
        end.hello()
        await anext(responses)
        end.submit(1, [1], max_tokens=40)
        await anext(responses)
        draining = asyncio.ensure_future(shell.app.drain())
        await asyncio.sleep(0)
        end.submit(2, [2])
        tokens, finishes, _ = await end.until_finished(1, 2)
        assert (finishes[2].reason, finishes[2].error_reason) == (ERROR, "DRAINING")
        assert finishes[1].reason == LENGTH
        assert len(tokens[1]) >= 38
        await draining
        assert [r async for r in responses] == [], "the stream ends by itself, after the last finish"


async def test_the_workers_death_ends_the_process(shell: Shell) -> None:
    os.kill(shell.app.worker_pid, signal.SIGKILL)
    with pytest.raises(WorkerDied):
        await asyncio.wait_for(shell.running, 5)


async def test_what_cannot_start_says_why_in_one_line() -> None:
    for settings, words in (
        ({"model": "/no/such/model.gguf"}, "/no/such/model.gguf"),
        ({"bundle": "/no/such/bundle.json"}, "bundle.json"),
        ({"address": "127.0.0.1:99999"}, "host:port"),
        ({"kv_cache_memory_bytes": 1}, "kv_cache_memory_bytes"),
        ({"fault": "explode"}, "explode"),
        ({"prefix_cache_key": "secret"}, "prefix_cache_key: a prefix key is written as 32 to 128 hexadecimal digits"),
    ):
        with pytest.raises(StartError, match=words) as refused:
            await start(**settings)
        assert "\n" not in str(refused.value)


async def test_calls_before_warm_up_are_unavailable_with_a_hint() -> None:
    app = EngineApp(EngineSettings(backend=BackendName.SIMULATED, simulate_warm_up_s=1.0))
    starting = asyncio.ensure_future(app.start())
    while not app.address:
        await asyncio.sleep(0.01)
    async with Peer(app.address) as peer:
        shell = Shell(app, peer)
        assert (await shell.describe()).heartbeat.phase == pb.PHASE_WARMING
        with pytest.raises(Unavailable) as early:
            await shell.generate(prompt="x")
        assert (early.value.reason, early.value.retry_after_s) == ("WARMING", 1.0)
        await starting
        running = asyncio.ensure_future(app.run())
        assert len(await shell.generate(prompt="x", sampling={"max_tokens": 2})) >= 3
        running.cancel()
        await asyncio.wait({running})
    await app.drain()
