"""A deployment of one replica: nobody can take over, so its answers wait until it is back."""

from __future__ import annotations

import asyncio
import os
import signal

from headrace.api.common.v1 import sampling_pb2
from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.cli.intent import Wanted
from headrace.testkit.cluster import DEPLOYMENT, Answer, Client, Cluster
from headrace.testkit.eventually import eventually

REPLICA = f"{DEPLOYMENT}-1"
TOKENS = 120


async def one_replica(cluster: Cluster) -> int:
    """A whole stack whose controller runs one simulated replica; the pid of that."""
    settings = {"simulate_itl_ms": "20"}
    wanted = Wanted(deployment=DEPLOYMENT, backend="simulated", replicas=1, engine_settings=settings)
    await cluster.start_stores(wanted)
    for kind in ("router", "controller", "gateway"):
        cluster.start_service(kind)
    await cluster.until_serving("router", "controller", "gateway")
    return (await cluster.until_ready(REPLICA))[REPLICA].pid


async def follow(client: Client, answer: Answer, text: str) -> Answer:
    """Take an answer's events into `answer` as they come."""
    request = pb.GenerateRequest(model=DEPLOYMENT, text=text, sampling=sampling_pb2.SamplingParams(max_tokens=TOKENS))
    async with client.stream(request) as events:
        async for event in events:
            answer.take(event)
    return answer


async def test_answers_go_on_unchanged_once_the_controller_has_started_their_killed_engine_again(
    cluster: Cluster,
) -> None:
    pid = await one_replica(cluster)
    texts = [f"tell me about {n}" for n in range(4)]
    async with cluster.client() as client:
        so_far = [Answer() for _ in texts]
        running = [asyncio.create_task(follow(client, a, text)) for a, text in zip(so_far, texts, strict=True)]
        await eventually(lambda: all(len(answer.token_ids) >= 5 for answer in so_far))
        os.kill(pid, signal.SIGKILL)
        broken = await asyncio.gather(*running)
        unbroken = await asyncio.gather(
            *(client.generate(text=text, sampling={"max_tokens": TOKENS}) for text in texts)
        )
    assert [answer.end.attempts for answer in broken] == [2] * len(texts)
    assert {answer.end.engine_id for answer in broken} == {REPLICA}
    for one, whole in zip(broken, unbroken, strict=True):
        assert (one.token_ids, one.text) == (whole.token_ids, whole.text)
        assert len(one.token_ids) == TOKENS
