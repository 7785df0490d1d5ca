"""A router and an engine that cost next to nothing, for measuring the gateway between them: one process.

    python tests/bench/gateway_neighbours.py BUNDLE_DIGEST VOCABULARY

It prints its address as one line of JSON, then obeys lines on stdin: each is the time between two steps, in
seconds. A step has one token for each open slot; the first token of a sequence leaves at once, in a step of its own.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import grpc

from headrace.api.common.v1 import answer_pb2
from headrace.api.engine.v1 import engine_service_pb2 as engine_pb2
from headrace.api.engine.v1 import engine_service_pb2_grpc as engine_grpc
from headrace.api.routing.v1 import routing_service_pb2 as routing_pb2
from headrace.api.routing.v1 import routing_service_pb2_grpc as routing_grpc

ENGINE_ID, EPOCH = "costless", 1
FIRST_TOKEN, TOKENS = 1000, 97
"""Which tokens are said: these many in turn, each a word or so."""


@dataclass(slots=True)
class Pace:
    """How fast the engine is; may change while it runs."""

    period_s: float = 0.0256


@dataclass(slots=True)
class Sequence:
    """One open slot."""

    left: int
    next_token: int = 0

    def token(self) -> int:
        """Its next one."""
        self.left -= 1
        self.next_token = (self.next_token + 1) % TOKENS
        return FIRST_TOKEN + self.next_token


@dataclass(slots=True)
class Stream:
    """One gateway's Attach stream."""

    open: dict[int, Sequence] = field(default_factory=dict)
    outgoing: asyncio.Queue[engine_pb2.Step] = field(default_factory=lambda: asyncio.Queue(64))

    async def say(self, slots: list[int]) -> None:
        """One step with a token of each of these slots."""
        said = [(slot, self.open[slot]) for slot in slots if slot in self.open]
        if not said:
            return
        tokens = [sequence.token() for _, sequence in said]
        over = [slot for slot, sequence in said if not sequence.left]
        for slot in over:
            del self.open[slot]
        await self.send([slot for slot, _ in said], tokens, over, answer_pb2.FINISH_REASON_LENGTH)

    async def send(self, slots: list[int], tokens: list[int], over: list[int], reason: Any) -> None:
        """Send a step."""
        finishes = [engine_pb2.Finish(slot=slot, reason=reason, queue_ms=1.0, prefill_ms=1.0) for slot in over]
        await self.outgoing.put(engine_pb2.Step(slots=slots, token_ids=tokens, finishes=finishes))


class Engine(engine_grpc.EngineServiceServicer):
    """Says one token a step to everybody, as many as were asked for."""

    def __init__(self, bundle_digest: str, vocabulary: int, pace: Pace) -> None:
        self._welcome = engine_pb2.Welcome(
            engine_id=ENGINE_ID, epoch=EPOCH, bundle_digest=bundle_digest, vocab_size=vocabulary
        )
        self._pace = pace

    async def Attach(
        self, requests: AsyncIterator[engine_pb2.AttachRequest], context: Any
    ) -> AsyncIterator[engine_pb2.AttachResponse]:
        """Serve one gateway."""
        stream = Stream()
        await anext(aiter(requests))
        tasks = [asyncio.create_task(self._read(requests, stream)), asyncio.create_task(self._steps(stream))]
        try:
            yield engine_pb2.AttachResponse(welcome=self._welcome)
            for number in count(1):
                step = await stream.outgoing.get()
                step.step = number
                yield engine_pb2.AttachResponse(step=step)
        finally:
            for task in tasks:
                task.cancel()

    async def _read(self, requests: AsyncIterator[engine_pb2.AttachRequest], stream: Stream) -> None:
        async for request in requests:
            if request.HasField("submit"):
                submit = request.submit
                stream.open[submit.slot] = Sequence(left=submit.sampling.max_tokens)
                await stream.say([submit.slot])
            elif stream.open.pop(request.cancel.slot, None):
                await stream.send([], [], [request.cancel.slot], answer_pb2.FINISH_REASON_CANCELLED)

    async def _steps(self, stream: Stream) -> None:
        clock = asyncio.get_running_loop().time
        due = clock()
        while True:
            due = max(due + self._pace.period_s, clock() - 0.1)  # a stall is not caught up with a burst
            await asyncio.sleep(max(0.0, due - clock()))
            await stream.say(list(stream.open))


class Router(routing_grpc.RoutingServiceServicer):
    """Always the one engine."""

    def __init__(self) -> None:
        self.engine = routing_pb2.PlaceResponse(engine_id=ENGINE_ID, epoch=EPOCH)

    async def Place(self, request: Any, context: Any) -> routing_pb2.PlaceResponse:
        """Place."""
        return self.engine

    async def Release(self, request: Any, context: Any) -> routing_pb2.ReleaseResponse:
        """Release."""
        return routing_pb2.ReleaseResponse()


async def main(bundle_digest: str, vocabulary: int) -> None:
    """Serve until stdin ends."""
    pace, router = Pace(), Router()
    server = grpc.aio.server()
    engine_grpc.add_EngineServiceServicer_to_server(Engine(bundle_digest, vocabulary, pace), server)
    routing_grpc.add_RoutingServiceServicer_to_server(router, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    router.engine.address = address
    await server.start()
    print(json.dumps({"address": address}), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        pace.period_s = float(line)
    await server.stop(0)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
