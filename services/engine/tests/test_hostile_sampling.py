"""What has killed other engines: each is refused by its field or served, and neighbours and the next request go on."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from typing import Any

import pytest

from headrace.api.common.v1 import answer_pb2
from headrace.api.common.v1.sampling_pb2 import Choices, Constraint, LogitBias, SamplingParams
from headrace.api.engine.v1 import engine_service_pb2 as pb
from headrace.api.engine.v1 import engine_service_pb2_grpc as rpc
from headrace.base.deadline import Deadline
from headrace.base.errors import InvalidRequest
from headrace.bundle.shipped import shipped_model_path
from headrace.engine.app import EngineApp
from headrace.engine.settings import BackendName, EngineSettings
from headrace.rpc.client import Peer
from headrace.text.tokenizer import load_tokenizer

LENGTH, STOP, ERROR = (answer_pb2.FinishReason.Value(f"FINISH_REASON_{n}") for n in ("LENGTH", "STOP", "ERROR"))
VOCAB = 49_152


@pytest.fixture
async def engine() -> AsyncIterator[tuple[Peer, rpc.EngineServiceStub]]:
    """The simulated backend behind the real shell, worker process and scheduler."""
    app = EngineApp(EngineSettings(backend=BackendName.SIMULATED, simulate_itl_ms=2))
    await app.start()
    running = asyncio.ensure_future(app.run())
    peer = Peer(app.address)
    yield peer, rpc.EngineServiceStub(peer.channel)
    running.cancel()
    await asyncio.wait({running})
    await peer.close()
    await app.drain()


async def generate(engine: Any, *, prompt: str = "Hello", **sampling: Any) -> list[pb.GenerateResponse]:
    peer, stub = engine
    request = pb.GenerateRequest(prompt=prompt, sampling=SamplingParams(**({"max_tokens": 12} | sampling)))
    async with peer.stream(stub.Generate, request, deadline=Deadline.after(20)) as events:
        return [event async for event in events]


def texts(events: list[pb.GenerateResponse]) -> dict[int, str]:
    found: dict[int, str] = {}
    for event in events:
        if event.HasField("delta"):
            found[event.delta.index] = found.get(event.delta.index, "") + event.delta.text
    return found


HOSTILE = [
    ({"logit_bias": [LogitBias(token_id=5), LogitBias(token_id=VOCAB, bias=5.0)]}, "sampling.logit_bias[1].token_id"),
    ({"logit_bias": [LogitBias(token_id=5, bias=math.nan)]}, "sampling.logit_bias[0].bias"),
    ({"logit_bias": [LogitBias(token_id=5)] * 2}, "sampling.logit_bias[1].token_id"),
    ({"stop_token_ids": [1, 2**32 - 1], "min_tokens": 5}, "sampling.stop_token_ids[1]"),
    ({"allowed_token_ids": [VOCAB]}, "sampling.allowed_token_ids[0]"),
    ({"allowed_token_ids": [7], "banned_token_ids": [7]}, "sampling.allowed_token_ids"),
    ({"top_p": 0.0}, "sampling.top_p"),
    ({"top_p": math.nan}, "sampling.top_p"),
    ({"temperature": math.inf}, "sampling.temperature"),
    ({"repetition_penalty": 0.0}, "sampling.repetition_penalty"),
    ({"min_tokens": 13}, "sampling.min_tokens"),
    ({"n": 0}, "sampling.n"),
    ({"n": 2**32 - 1}, "sampling.n"),
    ({"logprobs": 21}, "sampling.logprobs"),
    ({"prompt_logprobs": 2**32 - 1}, "sampling.prompt_logprobs"),
    ({"constraint": Constraint()}, "sampling.constraint"),
    ({"constraint": Constraint(choice=Choices(texts=[""]))}, "sampling.constraint.choice.texts[0]"),
]


async def test_what_kills_other_engines_is_refused_by_its_field_and_the_next_request_is_answered(engine: Any) -> None:
    """vllm#16529, #6866, sglang#7670 (bias), vllm#54195 (stop ids), Megatron-LM#6993 (top_p 0)."""
    before = texts(await generate(engine))
    for sampling, field in HOSTILE:
        with pytest.raises(InvalidRequest) as refused:
            await generate(engine, **sampling)
        assert refused.value.field == field
    assert texts(await generate(engine)) == before


async def test_on_a_stream_only_the_bad_submission_ends_and_its_neighbour_says_what_it_says_alone(engine: Any) -> None:
    peer, stub = engine

    async def requests() -> AsyncIterator[pb.AttachRequest]:
        yield pb.AttachRequest(hello=pb.Hello(gateway_id="g"))
        good = SamplingParams(max_tokens=30, seed=1)
        for slot in (1, 2):
            yield pb.AttachRequest(submit=pb.Submit(slot=slot, token_ids=[5, 6], sampling=good))
            if slot == 1:
                for at, (sampling, _) in enumerate(HOSTILE):
                    bad = SamplingParams(**({"max_tokens": 12, "seed": 1} | sampling))
                    yield pb.AttachRequest(submit=pb.Submit(slot=100 + 20 * at, token_ids=[5, 6], sampling=bad))
        await asyncio.Event().wait()  # a gateway that stops sending takes its sequences along

    tokens: dict[int, list[int]] = {1: [], 2: []}
    finishes: dict[int, pb.Finish] = {}
    async with peer.stream(stub.Attach, requests(), deadline=Deadline.after(20)) as responses:
        async for response in responses:
            for slot, token in zip(response.step.slots, response.step.token_ids, strict=True):
                tokens[slot].append(token)
            finishes |= {finish.slot: finish for finish in response.step.finishes}
            if len({1, 2} & set(finishes)) == 2:
                break

    assert tokens[1] == tokens[2]
    assert [finishes[slot].reason for slot in (1, 2)] == [LENGTH, LENGTH]
    for at, (_, field) in enumerate(HOSTILE):
        finish = finishes[100 + 20 * at]
        assert (finish.reason, finish.error_field) == (ERROR, field)


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1e-6, "top_k": 2**32 - 1, "top_p": 1.0},
        {"temperature": 2.0, "min_p": 1.0, "repetition_penalty": 1e-30, "logprobs": 20, "prompt_logprobs": 20},
        {"stop_token_ids": [2] * 64, "logit_bias": [LogitBias(token_id=n, bias=100.0) for n in range(1024)]},
        {"allowed_token_ids": [338] * 65_536, "banned_token_ids": [3] * 65_536, "min_tokens": 12},
        {"seed": 2**64 - 1, "n": 16, "temperature": 1.0},
    ],
)
async def test_the_edges_of_what_is_allowed_are_answered(engine: Any, sampling: Any) -> None:
    finished = (await generate(engine, **sampling))[-1].finished
    assert {choice.finish_reason for choice in finished.choices} <= {LENGTH, STOP}
    assert len(finished.choices) == sampling.get("n", 1)
    assert all(math.isfinite(one.logprob) for entry in finished.prompt_logprobs for one in (entry.token, *entry.top))


async def test_generate_gives_n_answers_with_their_own_seeds_and_ends(engine: Any) -> None:
    events = await generate(engine, n=3, seed=20, temperature=1.0, max_tokens=9)
    alone = [texts(await generate(engine, seed=20 + i, temperature=1.0, max_tokens=9))[0] for i in range(3)]

    assert texts(events) == dict(enumerate(alone))
    assert len(set(alone)) == 3
    finished = events[-1].finished
    assert [(c.index, c.finish_reason, c.completion_tokens) for c in finished.choices] == [
        (i, LENGTH, 9) for i in range(3)
    ]
    assert (finished.usage.prompt_tokens, finished.usage.completion_tokens) == (events[0].started.prompt_tokens, 27)


async def test_generate_stops_each_answer_at_its_own_stop_text_after_min_tokens(engine: Any) -> None:
    whole = texts(await generate(engine, n=2, seed=20, temperature=1.0))
    stop = whole[0].split()[3]
    assert stop not in whole[1]

    events = await generate(engine, n=2, seed=20, temperature=1.0, stop=[stop])
    late = await generate(engine, n=2, seed=20, temperature=1.0, stop=[stop], min_tokens=12)

    assert texts(events) == {0: whole[0][: whole[0].index(stop)], 1: whole[1]}
    assert [choice.finish_reason for choice in events[-1].finished.choices] == [STOP, LENGTH]
    assert texts(late) == whole


async def test_generate_reports_log_probabilities_of_tokens_and_prompt(engine: Any) -> None:
    events = await generate(engine, prompt="one two three", n=2, logprobs=2, prompt_logprobs=1)

    deltas = [event.delta for event in events if event.delta.token_ids]
    assert [entry.token.token_id for d in deltas for entry in d.logprobs] == [t for d in deltas for t in d.token_ids]
    prompt = events[-1].finished.prompt_logprobs
    assert len(prompt) == events[0].started.prompt_tokens - 1
    plain = await generate(engine, prompt="one two three")
    assert not any(event.delta.logprobs for event in plain)
    assert not plain[-1].finished.prompt_logprobs


async def test_a_prompt_of_token_ids_gets_the_answer_of_its_text(engine: Any) -> None:
    peer, stub = engine
    ids = load_tokenizer(shipped_model_path()).encode("Hello there")
    request = pb.GenerateRequest(token_ids=ids, sampling=SamplingParams(max_tokens=12))
    async with peer.stream(stub.Generate, request, deadline=Deadline.after(20)) as events:
        by_ids = [event async for event in events]
    assert texts(by_ids) == texts(await generate(engine, prompt="Hello there"))
    assert by_ids[0].started.prompt_tokens == len(ids)


@pytest.mark.parametrize(
    ("prompt", "why"),
    [
        ({"token_ids": [5, VOCAB]}, "prompt"),
        ({"token_ids": [5], "prompt": "Hello"}, "prompt"),
        ({}, "prompt"),
    ],
)
async def test_a_prompt_of_no_use_is_refused_by_its_field(engine: Any, prompt: dict[str, Any], why: str) -> None:
    peer, stub = engine
    request = pb.GenerateRequest(**prompt, sampling=SamplingParams(max_tokens=12))
    with pytest.raises(InvalidRequest) as refused:
        async with peer.stream(stub.Generate, request, deadline=Deadline.after(20)) as events:
            _ = [event async for event in events]
    assert refused.value.field == why
