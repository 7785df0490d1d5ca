"""A frozen worker behind a shell that lives: SIGSTOP of a real one."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from headrace.api.common.v1 import answer_pb2, sampling_pb2
from headrace.api.engine.v1 import engine_service_pb2 as pb
from headrace.api.engine.v1 import engine_service_pb2_grpc as rpc
from headrace.base.deadline import Deadline
from headrace.base.errors import Unavailable
from headrace.engine.app import EngineApp
from headrace.engine.settings import EngineSettings
from headrace.engine.worker.client import WorkerDied
from headrace.engine.worker.config import BackendName
from headrace.rpc.client import Peer
from headrace.testkit.eventually import eventually


class Replica:
    """A running engine with one gateway attached."""

    def __init__(self, app: EngineApp, peer: Peer, running: asyncio.Future[None]) -> None:
        self.app, self.peer, self.running = app, peer, running
        self.stub = rpc.EngineServiceStub(peer.channel)
        self.sending: asyncio.Queue[pb.AttachRequest] = asyncio.Queue()
        self.tokens: dict[int, list[int]] = {}
        self.finishes: dict[int, pb.Finish] = {}

    async def requests(self) -> AsyncIterator[pb.AttachRequest]:
        yield pb.AttachRequest(hello=pb.Hello(gateway_id="g"))
        while True:
            yield await self.sending.get()

    def submit(self, slot: int, token_ids: list[int], max_tokens: int = 5) -> None:
        sampling = sampling_pb2.SamplingParams(max_tokens=max_tokens, seed=1)
        submit = pb.Submit(slot=slot, request_id="r", attempt=1, token_ids=token_ids, sampling=sampling)
        self.sending.put_nowait(pb.AttachRequest(submit=submit))

    async def listen(self, responses: AsyncIterator[pb.AttachResponse]) -> None:
        async for response in responses:
            for slot, token in zip(response.step.slots, response.step.token_ids, strict=True):
                self.tokens.setdefault(slot, []).append(token)
            self.finishes |= {finish.slot: finish for finish in response.step.finishes}

    async def phase(self) -> pb.Phase.ValueType:
        answer: pb.DescribeResponse = await self.peer.unary(
            self.stub.Describe, pb.DescribeRequest(), deadline=Deadline.after(5)
        )
        return answer.heartbeat.phase

    async def until_phase(self, phase: pb.Phase.ValueType) -> None:
        async def reached() -> bool:
            return await self.phase() == phase

        await eventually(reached, within_s=15)

    def freeze(self) -> None:
        os.kill(self.app.worker_pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.app.worker_pid, signal.SIGCONT)


@asynccontextmanager
async def replica(**settings: Any) -> AsyncIterator[Replica]:
    values = {"simulate_itl_ms": 5, "worker_stall_s": 1.0, "worker_lost_s": 60.0, "grace_s": 0.2} | settings
    app = EngineApp(EngineSettings(backend=BackendName.SIMULATED, **values))
    await app.start()
    running = asyncio.ensure_future(app.run())
    try:
        async with Peer(app.address) as peer:
            made = Replica(app, peer, running)
            stream = peer.stream(made.stub.Attach, made.requests(), deadline=Deadline.never())
            async with stream as responses:
                await anext(responses)
                listening = asyncio.ensure_future(made.listen(responses))
                yield made
                listening.cancel()
                await asyncio.wait({listening})
    finally:
        running.cancel()
        await asyncio.wait({running})
        await app.drain()


async def test_who_has_no_token_yet_is_given_up_when_the_worker_freezes_and_served_again_after_it() -> None:
    async with replica() as engine:
        engine.freeze()
        engine.submit(1, [5, 6, 7])
        await eventually(lambda: 1 in engine.finishes, within_s=15)
        refused = engine.finishes[1]
        assert (refused.reason, refused.error_reason, refused.error_field) == (
            answer_pb2.FINISH_REASON_ERROR,
            "WORKER_STALLED",
            "",
        )
        assert await engine.phase() == pb.PHASE_WARMING
        engine.submit(2, [5, 6, 7])
        await eventually(lambda: 2 in engine.finishes, within_s=5)
        assert engine.finishes[2].error_reason == "WORKER_STALLED"
        request = pb.GenerateRequest(prompt="x", sampling=sampling_pb2.SamplingParams(max_tokens=2))
        with pytest.raises(Unavailable) as unavailable:
            async with engine.peer.stream(engine.stub.Generate, request, deadline=Deadline.after(5)) as events:
                await anext(events)
        assert unavailable.value.reason == "WORKER_STALLED"
        assert engine.tokens == {}

        engine.thaw()
        await engine.until_phase(pb.PHASE_READY)
        engine.submit(1, [5, 6, 7])  # the slot is free, and what the old sequence may still say is dropped
        del engine.finishes[1]
        await eventually(lambda: 1 in engine.finishes, within_s=5)
        assert engine.finishes[1].reason == answer_pb2.FINISH_REASON_LENGTH
        assert len(engine.tokens[1]) == 5


async def test_an_answer_under_way_goes_on_when_the_worker_does() -> None:
    async with replica() as engine:
        engine.submit(1, [5, 6, 7], max_tokens=400)
        await eventually(lambda: 1 in engine.tokens, within_s=5)
        engine.freeze()
        await engine.until_phase(pb.PHASE_WARMING)
        assert 1 not in engine.finishes
        engine.thaw()
        await eventually(lambda: 1 in engine.finishes, within_s=15)
        assert len(engine.tokens[1]) == 400


async def test_an_idle_worker_that_freezes_is_noticed_without_any_work() -> None:
    async with replica() as engine:
        engine.freeze()
        await engine.until_phase(pb.PHASE_WARMING)


async def test_a_prompt_of_one_long_step_is_no_stall() -> None:
    # 3,000 tokens at 1,000 a second: silent for three times as long as a stall.
    async with replica(simulate_prefill_tokens_per_s=1000, max_num_batched_tokens=4096, worker_lost_s=1.0) as engine:
        engine.submit(1, [5] * 3000, max_tokens=1)
        seen = set()
        while 1 not in engine.finishes:
            seen.add(await engine.phase())
            await asyncio.sleep(0.02)
        assert seen == {pb.PHASE_READY}
        assert engine.finishes[1].reason == answer_pb2.FINISH_REASON_LENGTH
        assert engine.finishes[1].prefill_ms > 2900


async def test_a_worker_that_stays_silent_is_ended_and_its_shell_with_it() -> None:
    async with replica(worker_lost_s=2.0) as engine:
        engine.submit(1, [5, 6, 7], max_tokens=4000)
        await eventually(lambda: 1 in engine.tokens, within_s=5)
        pid = engine.app.worker_pid
        engine.freeze()
        with pytest.raises(WorkerDied, match=rf"pid {pid}\) (was silent for|was killed by SIGKILL)"):
            async with asyncio.timeout(15):
                await engine.running
