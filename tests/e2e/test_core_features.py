"""The engine's core through the whole suite: several answers, log-probabilities, shapes, shared prefixes, tenants."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from typing import Any

import pytest

from headrace.api.common.v1 import answer_pb2, sampling_pb2
from headrace.api.engine.v1 import engine_service_pb2 as engine_pb
from headrace.api.engine.v1 import engine_service_pb2_grpc as engine_grpc
from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.base.deadline import Deadline
from headrace.base.errors import InvalidRequest
from headrace.bundle.intent import new_api_key
from headrace.cli.intent import etcd_client, grant_key
from headrace.rpc.client import Peer
from headrace.testkit.cluster import DEPLOYMENT, Client, Cluster

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


async def collect(client: Client, **fields: Any) -> tuple[dict[int, list[int]], list[Any], answer_pb2.AnswerFinished]:
    """Tokens by answer index, all log-probabilities of answer 0, and the finish record."""
    sampling = sampling_pb2.SamplingParams(**fields.pop("sampling"))
    tokens: dict[int, list[int]] = defaultdict(list)
    logprobs: list[Any] = []
    finished = answer_pb2.AnswerFinished()
    request = pb.GenerateRequest(model=DEPLOYMENT, sampling=sampling, **fields)
    async with client.stream(request) as events:
        async for event in events:
            if event.WhichOneof("event") == "delta":
                tokens[event.delta.index] += event.delta.token_ids
                if event.delta.index == 0:
                    logprobs += event.delta.logprobs
            elif event.WhichOneof("event") == "finished":
                finished = event.finished
    return tokens, logprobs, finished


async def test_several_answers_have_their_own_seeds_ends_and_usage(fleet: Cluster) -> None:
    fleet.start_engine("a", simulate_itl_ms=1)
    await fleet.until_ready("a")
    async with fleet.client() as client:
        sampling = {"max_tokens": 12, "n": 3, "temperature": 1.0, "seed": 5}
        tokens, _, finished = await collect(client, text="three ways", sampling=sampling)
        assert {index: len(ids) for index, ids in tokens.items()} == {0: 12, 1: 12, 2: 12}
        assert len({tuple(ids) for ids in tokens.values()}) == 3
        assert [(c.index, c.completion_tokens) for c in finished.choices] == [(0, 12), (1, 12), (2, 12)]
        assert finished.usage.completion_tokens == 36
        second, _, _ = await collect(client, text="three ways", sampling=sampling | {"n": 1, "seed": 6})
        assert second[0] == tokens[1], "answer i uses seed + i"


async def test_a_repeated_prefix_is_cached_for_its_tenant_and_nobody_else(fleet: Cluster) -> None:
    fleet.start_engine("a", simulate_itl_ms=1)
    beats = await fleet.until_ready("a")
    other = new_api_key()
    async with etcd_client([fleet.etcd.endpoint]) as etcd:
        await grant_key(etcd, other, tenant="others", name="others")
    prompt = "a system prompt that everybody sends. " * 20
    async with fleet.client() as mine, fleet.client(api_key=other) as theirs:
        cold = await mine.generate(text=prompt, sampling={"max_tokens": 4})
        warm = await mine.generate(text=prompt, sampling={"max_tokens": 4})

        async def known() -> answer_pb2.Usage | None:
            try:
                return (await theirs.generate(text=prompt, sampling={"max_tokens": 4})).end.usage
            except Exception as error:  # the key's watch event may still be on its way
                if type(error).__name__ != "Unauthenticated":
                    raise
                return None

        from headrace.testkit.eventually import eventually

        foreign = await eventually(known)
    assert cold.end.usage.cached_tokens == 0
    assert warm.end.usage.cached_tokens >= 16
    assert warm.token_ids == cold.token_ids
    assert foreign.cached_tokens == 0, "another tenant cannot tell that the prompt was sent before"

    async with Peer(beats["a"].address) as engine:
        stub = engine_grpc.EngineServiceStub(engine.channel)
        request = engine_pb.SubscribeCacheEventsRequest()
        async with engine.stream(stub.SubscribeCacheEvents, request, deadline=Deadline.after(10)) as events:
            first = await anext(events)
    assert first.epoch == beats["a"].epoch
    assert len(first.snapshot.block_hashes) >= 2 * (warm.end.usage.cached_tokens // 16)
    assert all(len(h) == 16 for h in first.snapshot.block_hashes)


@pytest.mark.timeout(240)
async def test_the_real_model_gives_logprobs_and_keeps_to_shapes(fleet: Cluster) -> None:
    fleet.start_engine("real", backend="model")
    await fleet.until_ready("real", within_s=120)
    async with fleet.client() as client:
        sampling: dict[str, Any] = {"max_tokens": 6, "logprobs": 3, "prompt_logprobs": 1}
        tokens, logprobs, finished = await collect(client, text="The capital of France is", sampling=sampling)
        assert [entry.token.token_id for entry in logprobs] == tokens[0]
        for entry in logprobs:
            assert entry.token.rank == 1, "greedy takes the likeliest"
            assert len(entry.top) == 3
            assert math.isclose(entry.top[0].logprob, entry.token.logprob, abs_tol=1e-5)
            assert sum(math.exp(t.logprob) for t in entry.top) <= 1.0001
        assert len(finished.prompt_logprobs) == finished.usage.prompt_tokens - 1

        shape = sampling_pb2.Constraint(json_schema=json.dumps(SCHEMA))
        for seed in range(3):
            answer = await client.chat(
                messages=[("user", "Invent a person. Answer in JSON.")],
                sampling={"max_tokens": 80, "temperature": 1.0, "seed": seed, "constraint": shape},
            )
            person = json.loads(answer.text)
            assert set(person) == {"name", "age"}
            assert 0 <= person["age"] <= 99
            assert answer.end.finish_reason == answer_pb2.FINISH_REASON_STOP
        choice = sampling_pb2.Constraint(choice=sampling_pb2.Choices(texts=["yes", "no"]))
        answer = await client.chat(
            messages=[("user", "Is water wet?")], sampling={"max_tokens": 20, "constraint": choice}
        )
        assert answer.text in ("yes", "no")
        for bad, field in (
            (sampling_pb2.Constraint(json_schema="{not json"), "json_schema"),
            (sampling_pb2.Constraint(regex="(unclosed"), "regex"),
        ):
            with pytest.raises(InvalidRequest) as invalid:
                await client.generate(text="x", sampling={"max_tokens": 5, "constraint": bad})
            assert invalid.value.field == f"sampling.constraint.{field}"
        after = await client.generate(text="still here", sampling={"max_tokens": 2})
        assert len(after.token_ids) == 2
