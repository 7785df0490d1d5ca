"""The load on a gateway, as a process of its own: one measurement, told as one line of JSON.

    python tests/bench/gateway_client.py '{"do": "streams", …}'

Messages are looked into no further than the measurement needs: the client shares its core with the engine.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import sys
import time
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import grpc
import psutil

from headrace.api.common.v1.sampling_pb2 import SamplingParams
from headrace.api.engine.v1 import engine_service_pb2 as engine_pb2
from headrace.api.engine.v1.engine_service_pb2_grpc import EngineServiceStub
from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.api.inference.v1.inference_service_pb2_grpc import InferenceServiceStub

PROMPT = list(range(1000, 1016))


@dataclass(slots=True)
class Tally:
    """What one stream heard, and when."""

    tokens: int = 0
    messages: int = 0
    arrived_at: array[float] = field(default_factory=lambda: array("d"))

    def note(self, tokens: int) -> None:
        """A message with so many tokens."""
        self.tokens += tokens
        self.messages += 1
        self.arrived_at.append(time.perf_counter())


@dataclass(frozen=True, slots=True)
class Target:
    """Where a gateway listens, and the key to it."""

    address: str
    http_port: int
    key: str
    model: str

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What goes with every call."""
        return (("authorization", f"Bearer {self.key}"),)

    def request(self, prompt: Sequence[int], tokens: int) -> pb.GenerateRequest:
        """Ask for exactly so many."""
        sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
        return pb.GenerateRequest(model=self.model, token_ids=pb.TokenIds(ids=prompt), sampling=sampling)


async def grpc_stream(channel: grpc.aio.Channel, target: Target, tokens: int, tally: Tally) -> None:
    """One Generate call to its end."""
    call: Any = InferenceServiceStub(channel).Generate(
        target.request(PROMPT, tokens), metadata=target.metadata, timeout=600
    )
    try:
        while (event := await call.read()) is not grpc.aio.EOF:
            if said := len(event.delta.token_ids):
                tally.note(said)
        if (code := await call.code()) is not grpc.StatusCode.OK:
            raise RuntimeError(f"{code}: {await call.details()}")
    finally:
        call.cancel()


async def sse_stream(_: grpc.aio.Channel, target: Target, tokens: int, tally: Tally) -> None:
    """One streamed completion; a chunk counts as a token (merged ones are told by the gateway's own count)."""
    body = json.dumps(
        {"model": target.model, "prompt": PROMPT, "max_tokens": tokens, "stream": True, "ignore_eos": True}
    ).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {target.key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", target.http_port)
    try:
        writer.write(head.encode() + body)
        status = await reader.readline()
        if b" 200 " not in status:
            raise RuntimeError(f"{status!r}: {(await reader.read(500))!r}")
        while piece := await reader.read(65536):
            if chunks := piece.count(b'"text":"'):
                tally.note(chunks)
            if b"[DONE]" in piece:
                return
    finally:
        writer.close()


STREAMS: dict[str, Callable[..., Any]] = {"grpc": grpc_stream, "sse": sse_stream}


async def streams(
    target: Target, *, protocol: str, count: int, seconds: float, most_tokens: int, gateway_pid: int
) -> dict[str, float]:
    """Tokens per second of `count` streams that all run, over `seconds`, and what they cost the gateway."""
    tallies = [Tally() for _ in range(count)]
    gateway, own = psutil.Process(gateway_pid), psutil.Process()
    async with grpc.aio.insecure_channel(target.address) as channel:
        follow = STREAMS[protocol]
        tasks = [asyncio.create_task(follow(channel, target, most_tokens, tally)) for tally in tallies]
        try:
            while not all(tally.tokens > 1 for tally in tallies):
                await asyncio.sleep(0.05)
                for task in tasks:
                    if task.done():
                        task.result()
            await asyncio.sleep(0.5)
            before, began = [(t.tokens, t.messages) for t in tallies], time.perf_counter()
            cpu, own_cpu = _cpu_s(gateway), _cpu_s(own)
            await asyncio.sleep(seconds)
            took, cpu, own_cpu = time.perf_counter() - began, _cpu_s(gateway) - cpu, _cpu_s(own) - own_cpu
            ended = sum(task.done() for task in tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    tokens = sum(t.tokens - had for t, (had, _) in zip(tallies, before, strict=True))
    messages = sum(t.messages - had for t, (_, had) in zip(tallies, before, strict=True))
    gaps = [
        [later - earlier for earlier, later in pairwise(t.arrived_at) if began <= later <= began + took]
        for t in tallies
    ]
    starved = sum(not gap for gap in gaps)
    every = sorted(gap for each in gaps for gap in each)
    return {
        "tokens_per_s": tokens / took,
        "tokens_per_message": tokens / max(1, messages),
        "gateway_cores": cpu / took,
        "gateway_us_per_token": 1e6 * cpu / tokens,
        "tokens_per_core_second": tokens / cpu,
        "client_cores": own_cpu / took,
        "gap_p50_ms": 1e3 * every[len(every) // 2],
        "gap_p99_ms": 1e3 * every[int(0.99 * len(every))],
        "gap_max_ms": 1e3 * every[-1],
        "starved": starved,
        "ended_early": ended,
    }


async def first_tokens(target: Target, *, engine: str, calls: int, text: str) -> dict[str, float]:
    """Time to the first token, of one call at a time: of the engine itself, of 1,000 token ids, of a text."""
    request = target.request([1000 + n % 90 for n in range(1000)], 2)
    as_text = pb.GenerateRequest(model=target.model, text=text, sampling=request.sampling)
    async with grpc.aio.insecure_channel(target.address) as channel, grpc.aio.insecure_channel(engine) as direct:
        own = [await pause() or each async for each in _engine_alone(direct, request, calls)]
        through, texts = [], []
        for _ in range(calls):  # alternately, so that a busy machine harms both alike
            through.append(await _first(channel, target, request))
            texts.append(await _first(channel, target, as_text))
            await pause()
    warm = [sorted(each[len(each) // 10 :]) for each in (own, through, texts)]
    median, fast = ([1e3 * each[int(share * len(each))] for each in warm] for share in (0.5, 0.1))
    return {
        "engine_ttft_ms": median[0],
        "gateway_ttft_ms": median[1],
        "added_ttft_ms": median[1] - median[0],
        "added_ttft_p10_ms": fast[1] - fast[0],  # what a busy machine hides
        "tokenization_ms": median[2] - median[1],
    }


async def pause() -> None:
    """What keeps one call's end out of the next one's time."""
    await asyncio.sleep(0.005)


async def _first(channel: grpc.aio.Channel, target: Target, request: pb.GenerateRequest) -> float:
    began = time.perf_counter()
    call: Any = InferenceServiceStub(channel).Generate(request, metadata=target.metadata, timeout=60)
    try:
        while (event := await call.read()) is not grpc.aio.EOF:
            if event.HasField("delta"):
                return time.perf_counter() - began
        raise RuntimeError(str(await call.details()))
    finally:
        call.cancel()


async def _engine_alone(channel: grpc.aio.Channel, like: pb.GenerateRequest, calls: int) -> AsyncIterator[float]:
    """From a submission to its first token, on an Attach stream of our own."""
    call: Any = EngineServiceStub(channel).Attach()
    await call.write(engine_pb2.AttachRequest(hello=engine_pb2.Hello(gateway_id="bench")))
    await call.read()
    for slot in range(1, calls + 1):
        submit = engine_pb2.Submit(slot=slot, token_ids=like.token_ids.ids, sampling=SamplingParams(max_tokens=1))
        began = time.perf_counter()
        await call.write(engine_pb2.AttachRequest(submit=submit))
        await call.read()
        yield time.perf_counter() - began
    call.cancel()


async def engine_speed(target: Target, *, engine: str, count: int, seconds: float) -> dict[str, float]:
    """Tokens per second that the engine sends to a client that does nothing with them."""
    async with grpc.aio.insecure_channel(engine) as channel:
        call: Any = EngineServiceStub(channel).Attach()
        await call.write(engine_pb2.AttachRequest(hello=engine_pb2.Hello(gateway_id="bench")))
        for slot in range(1, count + 1):
            submit = engine_pb2.Submit(slot=slot, sampling=SamplingParams(max_tokens=10**7))
            await call.write(engine_pb2.AttachRequest(submit=submit))
        tokens, began = 0, time.perf_counter()
        while time.perf_counter() < began + seconds:
            tokens += len((await call.read()).step.slots)
        call.cancel()
        return {"tokens_per_s": tokens / (time.perf_counter() - began)}


async def requests(
    target: Target, *, count: int, concurrency: int, tokens: int, disconnects: float, gateway_pid: int, warm_up: int
) -> dict[str, Any]:
    """Short answers, some left at a random point; the gateway's memory on the way."""
    chance, gateway = random.Random(0), psutil.Process(gateway_pid)
    numbers = iter(range(count))
    memory: list[tuple[int, float]] = []
    left, answered = 0, 0
    cpu = 0.0

    async def worker(channel: grpc.aio.Channel) -> None:
        nonlocal left, answered, cpu
        generate: Any = InferenceServiceStub(channel).Generate
        for number in numbers:
            if number == warm_up:
                cpu = _cpu_s(gateway)
            if number % max(1, count // 40) == 0:
                memory.append((number, gateway.memory_info().rss / 1e6))
            call = generate(target.request(PROMPT, tokens), metadata=target.metadata, timeout=60)
            until = chance.randrange(tokens + 1) if chance.random() < disconnects else None
            heard = 0
            try:
                while until is None or heard < until:
                    if await call.read() is grpc.aio.EOF:
                        answered += await call.code() is grpc.StatusCode.OK
                        break
                    heard += 1
                else:
                    left += 1
            finally:
                call.cancel()

    began = time.perf_counter()
    async with grpc.aio.insecure_channel(target.address) as channel:
        await asyncio.gather(*(worker(channel) for _ in range(concurrency)))
    took = time.perf_counter() - began
    memory.append((count, gateway.memory_info().rss / 1e6))
    after = [mb for number, mb in memory if number >= warm_up]
    return {
        "requests": count,
        "answered": answered,
        "left": left,
        "failed": count - answered - left,
        "requests_per_s": count / took,
        "gateway_us_per_request": 1e6 * (_cpu_s(gateway) - cpu) / (count - warm_up),
        "rss_mb": [round(mb, 1) for _, mb in sorted(memory)],
        "rss_growth_mb": statistics.median(after[-3:]) - statistics.median(after[:3]),
    }


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


DO: dict[str, Callable[..., Any]] = {
    "streams": streams,
    "first_tokens": first_tokens,
    "engine_speed": engine_speed,
    "requests": requests,
}


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    done = asyncio.run(DO[asked.pop("do")](Target(**asked.pop("target")), **asked))
    print(json.dumps(done))
