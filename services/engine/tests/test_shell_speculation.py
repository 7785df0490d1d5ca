"""Several tokens of one answer in one step, on their way out: over Attach and over Generate, from a real worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from prometheus_client import REGISTRY

from headrace.api.common.v1 import sampling_pb2
from headrace.api.engine.v1 import engine_service_pb2 as pb
from headrace.api.engine.v1 import engine_service_pb2_grpc as rpc
from headrace.base.deadline import Deadline
from headrace.base.errors import StartError
from headrace.engine.app import EngineApp
from headrace.engine.settings import EngineSettings
from headrace.engine.worker.config import BackendName, SpeculativeMethod
from headrace.rpc.client import Peer

REPEATED = [338, 351, 429, 451] * 4
ECHO: dict[str, Any] = {"backend": BackendName.SIMULATED, "simulate_itl_ms": 1, "simulate_echo_tokens": 4}
GUESSING: dict[str, Any] = ECHO | {"speculative_method": SpeculativeMethod.NGRAM}


@asynccontextmanager
async def engine(settings: dict[str, Any]) -> AsyncIterator[tuple[Peer, rpc.EngineServiceStub]]:
    app = EngineApp(EngineSettings(**settings))
    await app.start()
    running = asyncio.ensure_future(app.run())
    async with Peer(app.address) as peer:
        yield peer, rpc.EngineServiceStub(peer.channel)
        running.cancel()
        await asyncio.wait({running})
        await app.drain()


async def attached(settings: dict[str, Any], **sampling: Any) -> list[pb.Step]:
    """The steps of one answer to REPEATED, the last one with its finish."""
    params = sampling_pb2.SamplingParams(max_tokens=40, seed=3, **sampling)

    async def requests() -> AsyncIterator[pb.AttachRequest]:
        yield pb.AttachRequest(hello=pb.Hello(gateway_id="g"))
        yield pb.AttachRequest(submit=pb.Submit(slot=7, request_id="r", attempt=1, token_ids=REPEATED, sampling=params))
        await asyncio.Event().wait()

    async with (
        engine(settings) as (peer, stub),
        peer.stream(stub.Attach, requests(), deadline=Deadline.after(20)) as responses,
    ):
        await anext(responses)
        steps = []
        while not (steps and steps[-1].finishes):
            steps.append((await anext(responses)).step)
    return steps


def accepted() -> float:
    return REGISTRY.get_sample_value("headrace_engine_accepted_tokens_total") or 0.0


async def test_a_slot_comes_once_for_each_of_its_tokens_and_the_finish_after_the_last() -> None:
    plain, before = await attached(ECHO, logprobs=1), accepted()
    guessed = await attached(GUESSING, logprobs=1)
    tokens = [token for step in guessed for token in step.token_ids]
    assert tokens == [token for step in plain for token in step.token_ids]
    assert len(guessed) < 0.7 * len(plain)
    assert {slot for step in guessed for slot in step.slots} == {7}
    assert accepted() - before == len(tokens) - len([step for step in guessed if step.slots])
    said = [entry.logprobs for step in guessed for entry in step.logprobs]
    assert [entry.token.token_id for entry in said] == tokens
    assert said == [entry.logprobs for step in plain for entry in step.logprobs]
    assert len(guessed[-1].finishes[0].later_ms) == 39


async def test_generate_gives_every_token_its_own_log_probabilities() -> None:
    texts = []
    for settings in (ECHO, GUESSING):
        async with engine(settings) as (peer, stub):
            sampling = sampling_pb2.SamplingParams(max_tokens=40, seed=3, logprobs=0)
            request = pb.GenerateRequest(prompt=" that with from this" * 4, sampling=sampling)
            async with peer.stream(stub.Generate, request, deadline=Deadline.after(20)) as events:
                deltas = [event.delta async for event in events if event.HasField("delta")]
        for delta in deltas:
            assert [entry.token.token_id for entry in delta.logprobs] == list(delta.token_ids)
        texts.append("".join(delta.text for delta in deltas))
    assert texts[0] == texts[1]


async def test_n_gram_sizes_that_cannot_be_are_refused_at_start() -> None:
    app = EngineApp(EngineSettings(**GUESSING, prompt_lookup_min=5, prompt_lookup_max=3))
    with pytest.raises(StartError, match="prompt_lookup_min=5 must be from 1 to prompt_lookup_max=3"):
        await app.start()
    await app.drain()
