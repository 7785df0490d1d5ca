"""OpenAI's client against all real processes: simulated engines for the protocol, the shipped model for the content."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from openai import AsyncOpenAI
from pydantic import BaseModel, Field

from headrace.testkit.cluster import DEPLOYMENT, Cluster
from headrace.testkit.command import Up
from headrace.testkit.eventually import eventually

ASKED: list[Any] = [{"role": "user", "content": "Why is the sky blue?"}]


class Person(BaseModel):
    name: str = Field(max_length=12)
    mood: Literal["calm", "cross"]


@asynccontextmanager
async def openai_client(cluster: Cluster, **options: Any) -> AsyncIterator[AsyncOpenAI]:
    """The official client with its own retries off, so that every failure shows."""
    given = {"api_key": cluster.api_key, "max_retries": 0, "timeout": 60.0} | options
    async with AsyncOpenAI(base_url=f"http://{cluster.http_addresses['gateway']}/v1", **given) as client:
        yield client


async def test_http_and_grpc_give_the_same_answer_and_leave_nothing_behind(fleet: Cluster) -> None:
    fleet.start_engine("a", simulate_itl_ms=1)
    await fleet.until_ready("a")
    wanted: dict[str, Any] = {"max_tokens": 40, "temperature": 0.8, "seed": 11}

    async with openai_client(fleet) as client, fleet.client() as grpc_client:
        whole = await client.chat.completions.create(model=DEPLOYMENT, messages=ASKED, **wanted)
        stream = await client.chat.completions.create(model=DEPLOYMENT, messages=ASKED, stream=True, **wanted)
        chunks = [chunk async for chunk in stream]
        same = await grpc_client.chat(messages=[("user", ASKED[0]["content"])], sampling=wanted)

        assert whole.choices[0].message.content == same.text
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == same.text
        assert whole.usage is not None
        assert whole.usage.completion_tokens == same.end.usage.completion_tokens == 40
        assert len(chunks) > 10, "the answer streams, it does not come at once"

        endless = await client.chat.completions.create(
            model=DEPLOYMENT, messages=ASKED, stream=True, max_tokens=2000, extra_body={"ignore_eos": True}
        )
        for _ in range(5):
            await anext(endless)
        await endless.close()
        await eventually(lambda: fleet.metric("gateway", "headrace_gateway_requests_in_flight") == 0)
        cancelled = 'headrace_gateway_requests_total{.*outcome="CANCELLED".*}'
        await eventually(lambda: fleet.metric("gateway", cancelled) == 1)
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="nothing", messages=ASKED)


async def test_an_engine_that_is_killed_costs_the_http_client_a_pause(fleet: Cluster) -> None:
    fleet.start_engine("a", simulate_itl_ms=10)
    fleet.start_engine("b", simulate_itl_ms=10)
    beats = await fleet.until_ready("a", "b")
    wanted: dict[str, Any] = {"max_tokens": 150, "temperature": 0.7, "seed": 3, "extra_body": {"ignore_eos": True}}

    async with openai_client(fleet) as client:
        expected = await client.completions.create(model=DEPLOYMENT, prompt="Once", **wanted)
        options: Any = {"include_usage": True}
        stream = await client.completions.create(
            model=DEPLOYMENT, prompt="Once", stream=True, stream_options=options, **wanted
        )
        chunks = [await anext(stream) for _ in range(10)]
        busy = await eventually(lambda: _busy(fleet, tuple(beats)))
        fleet.children[busy].kill()
        chunks += [chunk async for chunk in stream]

    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == expected.choices[0].text
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 150


def _busy(cluster: Cluster, engines: tuple[str, ...]) -> str:
    """The engine that runs a sequence now."""
    running = {name: cluster.metric(name, "headrace_engine_running") for name in engines}
    return next((name for name, count in running.items() if count), "")


@pytest.mark.timeout(240)
async def test_the_shipped_model_answers_openais_client_in_the_shape_it_asks_for(fleet: Cluster) -> None:
    fleet.start_engine("real", backend="model")
    await fleet.until_ready("real", within_s=120)

    async with openai_client(fleet) as client:
        # Prose may be cut anywhere, characters may not: the streamed text is the whole one.
        texts: Any = {"model": DEPLOYMENT, "max_tokens": 24, "temperature": 0}
        messages: Any = [{"role": "user", "content": "Write 你好 and three emoji."}]
        whole = await client.chat.completions.create(messages=messages, **texts)
        stream = await client.chat.completions.create(messages=messages, stream=True, **texts)
        streamed = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert streamed == whole.choices[0].message.content

        invented = await client.chat.completions.parse(
            model=DEPLOYMENT,
            messages=[{"role": "user", "content": "Invent a person. Answer in JSON."}],
            response_format=Person,
            max_tokens=120,
            temperature=0,
        )
        assert isinstance(invented.choices[0].message.parsed, Person)

        likely = await client.chat.completions.create(
            messages=ASKED, logprobs=True, top_logprobs=3, n=2, seed=1, **texts
        )
        for choice in likely.choices:
            assert choice.logprobs is not None
            assert choice.logprobs.content is not None
            spelled = b"".join(bytes(entry.bytes or []) for entry in choice.logprobs.content)
            assert spelled.decode() == choice.message.content
            assert all(len(entry.top_logprobs) == 3 for entry in choice.logprobs.content)


async def test_the_openai_client_in_threads_works_beside_32_others(fleet: Cluster) -> None:
    fleet.start_engine("a", simulate_itl_ms=1)
    await fleet.until_ready("a")

    async with openai_client(fleet) as client:

        async def one(seed: int) -> str:
            stream = await client.chat.completions.create(
                model=DEPLOYMENT, messages=ASKED, stream=True, max_tokens=30, seed=seed
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])

        answers = await asyncio.gather(*(one(n % 4) for n in range(32)))
    assert len(set(answers)) == 4, "equal seeds give equal answers, whoever else is served"

    def blocking() -> str:
        with openai.OpenAI(
            base_url=f"http://{fleet.http_addresses['gateway']}/v1", api_key=fleet.api_key, max_retries=0
        ) as plain:
            return plain.completions.create(model=DEPLOYMENT, prompt="x", max_tokens=3).choices[0].text

    assert await asyncio.to_thread(blocking)


async def test_headrace_up_says_where_openais_clients_find_it(tmp_path: Path) -> None:
    up = Up(tmp_path / "home", "--backend", "simulated")
    try:
        await up.until("API key: in")
        base = re.search(r"HTTP: (http://[0-9.:]+/v1) ", up.text)
        assert base is not None
        key = up.home.key_file.read_text().strip()
        async with AsyncOpenAI(base_url=base[1], api_key=key, max_retries=0, timeout=60) as client:
            (model,) = [model.id async for model in client.models.list()]
            answer = await client.completions.create(model=model, prompt="Once upon", max_tokens=3)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 3
        up.process.terminate()
        assert await up.ended() == 0
    finally:
        up.close()
