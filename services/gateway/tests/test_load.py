"""Many answers at once: none starves, none is lost, a client that reads nothing harms nobody, and nothing is left."""

from __future__ import annotations

import asyncio
import gc
import random
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

import psutil
import pytest

from headrace.api.common.v1 import answer_pb2
from headrace.api.engine.v1 import engine_service_pb2 as engine_pb2
from headrace.api.inference.v1 import inference_service_pb2 as inference_pb2
from headrace.base.errors import ReaderStalled
from headrace.gateway.queue import WAITING
from headrace.rpc.client import Peer

KEY = "hr_" + "k" * 43


class Rounds:
    """An engine's script: a token of every sequence in one step, the next when all clients have heard it."""

    def __init__(self, sequences: int, rounds: int) -> None:
        self.sequences = sequences
        self.rounds = rounds
        self.heard = 0
        self._slots: list[int] = []
        self._news = asyncio.Event()

    def hear(self, tokens: int) -> None:
        """A client heard so many."""
        self.heard += tokens
        self._news.set()

    async def __call__(self, engine: Any, stream: Any, submit: engine_pb2.Submit) -> None:
        self._slots.append(submit.slot)
        if len(self._slots) < self.sequences:
            return
        for number in range(1, self.rounds + 1):
            over = [stream.finish(slot, "LENGTH") for slot in self._slots] if number == self.rounds else []
            stream.step({slot: 65 + slot % 26 for slot in self._slots}, *over)
            while self.heard < number * self.sequences:
                self._news.clear()
                await self._news.wait()


async def follow(client: Any, rounds: Rounds) -> Any:
    """One client: hears its answer to the end."""
    heard = None
    async with client.stream(max_tokens=rounds.rounds) as events:
        async for event in events:
            rounds.hear(len(event.delta.token_ids))
            heard = event
    return heard.finished


async def test_of_300_streams_at_once_none_starves_and_each_ends_exactly(world: Any) -> None:
    rounds = Rounds(sequences=300, rounds=8)
    await world.engine("e-1", rounds)
    client = await world.gateway()

    ends = await asyncio.gather(*(follow(client, rounds) for _ in range(300)))

    assert [end.usage.completion_tokens for end in ends] == [8] * 300
    assert rounds.heard == 300 * 8


def likelihoods(slot: int, token: int, tokens: int) -> Sequence[engine_pb2.SlotLogprobs]:
    """What makes a token 120 bytes long."""
    one = answer_pb2.TokenLogprob(token_id=token, logprob=-1.0, rank=1)
    return [engine_pb2.SlotLogprobs(slot=slot, logprobs=answer_pb2.TokenLogprobs(token=one, top=[one] * 10))] * tokens


async def test_a_client_that_reads_nothing_is_cut_and_holds_little_while_20_others_go_on(
    world: Any, eventually: Any, make_client: Callable[[Peer], Any]
) -> None:
    others, flooded = Rounds(sequences=20, rounds=40), 0

    async def script(engine: Any, stream: Any, submit: engine_pb2.Submit) -> None:
        nonlocal flooded
        if not submit.sampling.HasField("logprobs"):
            await others(engine, stream, submit)
            return
        entries = likelihoods(submit.slot, 65, 250)
        while submit.slot not in engine.cancels and flooded < 100 * 250:
            stream.raw(stream.steps + 1, [submit.slot] * 250, [65] * 250, (), entries)
            stream.steps += 1
            flooded += 250
            await asyncio.sleep(0.01)

    engine = await world.engine("e-1", script)
    client = await world.gateway(stalled_reader_s=1.0)
    async with AsyncExitStack() as stack:
        deaf = make_client(await stack.enter_async_context(Peer(world.app.address)))
        events = await stack.enter_async_context(deaf.stream(max_tokens=30_000, logprobs=10))
        await anext(events)

        ends = await asyncio.gather(*(follow(client, others) for _ in range(20)))
        await eventually(lambda: len(engine.cancels) == 1)
        taken = 0
        with pytest.raises(ReaderStalled):
            async for event in events:
                taken += len(event.delta.token_ids)

    assert [end.usage.completion_tokens for end in ends] == [40] * 20
    assert taken < flooded / 2, "what nobody reads must not pile up in the transport"
    await eventually(lambda: world.app._pool.open_slots == 0)


async def test_3000_requests_of_which_a_fifth_is_left_leave_nothing_behind(
    world: Any, eventually: Any, gauges: Callable[[], dict[str, float]]
) -> None:
    chance = random.Random(7)
    engine = await world.engine("e-1", four_tokens)
    client = await world.gateway()
    await client.generate()
    own = psutil.Process()
    tasks = len(asyncio.all_tasks())
    numbers = iter(range(3000))
    left = 0

    async def worker() -> None:
        nonlocal left
        for number in numbers:
            if number == 1000:
                forget(engine, world.router)
                memory.append(own.memory_info().rss)
            until = chance.randrange(6) if chance.random() < 0.2 else 99
            heard = 0
            async with client.stream() as events:
                async for _ in events:
                    heard += 1
                    if heard >= until:
                        left += 1
                        break

    memory: list[int] = []
    await asyncio.gather(*(worker() for _ in range(30)))
    forget(engine, world.router)
    memory.append(own.memory_info().rss)

    assert left > 300
    await eventually(lambda: gauges() == {"in_flight": 0, "open_slots": 0, "connections": 1})
    await eventually(lambda: len(asyncio.all_tasks()) <= tasks)
    await eventually(lambda: world.app._ledger._store.table.free == world.app._ledger._settings.slots)
    assert sum(sample.value for sample in WAITING.collect()[0].samples) == 0
    assert memory[1] - memory[0] < 20e6


async def four_tokens(engine: Any, stream: Any, submit: engine_pb2.Submit) -> None:
    """Say four tokens, unless it is cancelled before."""
    for token in b"abc":
        stream.step({submit.slot: token})
        await asyncio.sleep(0)
        if stream.open.get(submit.slot) is not submit:
            return
    stream.step({submit.slot: 100}, stream.finish(submit.slot, "STOP"))


def forget(engine: Any, router: Any) -> None:
    """Drop what the test's own neighbours remember."""
    for kept in (engine.submits, engine.cancels, router.asked, router.released, router.reports):
        kept.clear()
    gc.collect()


async def test_1500_calls_that_arrive_while_the_gateway_is_busy_are_all_taken(world: Any) -> None:
    client = await world.gateway()
    metadata = (("authorization", f"Bearer {KEY}"),)

    # Nothing here yields before all of them are on their way: they wait in the transport, as they do for a busy loop.
    calls = [client.stub.ListModels(inference_pb2.ListModelsRequest(), metadata=metadata) for _ in range(1500)]
    time.sleep(0.5)  # noqa: ASYNC251  it is the loop that must not run
    answers = await asyncio.gather(*calls, return_exceptions=True)

    assert [type(answer).__name__ for answer in answers] == ["ListModelsResponse"] * 1500
