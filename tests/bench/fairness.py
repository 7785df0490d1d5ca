"""A quiet tenant's time to first token, alone and beside a noisy one: ``python tests/bench/fairness.py``

One engine with simulated computing, whose steps lengthen with its batch; all other processes are real. Three conditions
take turns, with the same arrivals of the quiet tenant in each:

alone   nobody else asks.
full    the batch is as large as beside the noisy tenant, in an engine with twice the seats: nobody waits for one. What
        is lost here is lost to longer steps and to a busy machine, and no queue can win it back.
beside  the noisy tenant sends ten times the quiet one's requests (``--noise rate``), or ten times as many as the engine
        could serve (``--noise capacity``), whether or not it gets answers.

Arrivals are Poisson, seeded by round. Printed are ranks over all rounds, the range of the rounds' p99, and where the
time went by the requests' own traces.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from headrace.api.control.v1.intent_pb2 import Deployment, Saturation
from headrace.api.telemetry.v1 import telemetry_service_pb2 as telemetry_pb
from headrace.api.telemetry.v1 import telemetry_service_pb2_grpc as telemetry_grpc
from headrace.base.deadline import Deadline
from headrace.base.errors import Exhausted
from headrace.bundle import intent, keys
from headrace.coord.etcd.client import EtcdClient
from headrace.rpc.client import Peer
from headrace.testkit.books import tenant_key
from headrace.testkit.cluster import DEPLOYMENT, Answer, Client, Cluster

_LONGER_PER_DECODE = 0.02  # as headrace.engine.simulated.timing has it
_TRACES_AFTER_S = 3.0  # spans travel once a second
_UNTIL_FULL = 1.5  # lives of an answer until noise has filled the engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """An engine, and what is asked of it: `quiet` requests a second, and `times` as many of something by the noisy one.

    Answers have `tokens` on average, evenly from 1 - `spread` to 1 + `spread` times as many.
    """

    running: int
    itl_s: float
    tokens: int
    spread: float
    quiet: float
    times: float

    def sampling(self, chance: random.Random) -> dict[str, object]:
        """Of one request."""
        tokens = round(self.tokens * (1 + self.spread * (2 * chance.random() - 1)))
        return {"max_tokens": max(1, tokens), "ignore_eos": True}

    @property
    def answer_s(self) -> float:
        """How long an answer takes in a full batch."""
        return self.tokens * self.itl_s * (1 + _LONGER_PER_DECODE * (self.running - 1))

    @property
    def capacity(self) -> float:
        """Requests per second that the engine can serve."""
        return self.running / self.answer_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Felt:
    """One of the quiet tenant's requests, in milliseconds; `asks` are its questions to the router."""

    first_token: float
    place: float
    asks: int
    engine_queue: float
    prefill: float
    step: float


@dataclass(slots=True, kw_only=True)
class Condition:
    """What was felt, by round."""

    rounds: list[list[Felt]] = field(default_factory=list)
    noise_per_s: list[float] = field(default_factory=list)

    def all(self, of: Callable[[Felt], float] = lambda felt: felt.first_token) -> list[float]:
        """One number of each request."""
        return [of(felt) for each in self.rounds for felt in each]

    def p99s(self) -> list[float]:
        """Of each round."""
        return [rank([felt.first_token for felt in each], 0.99) for each in self.rounds]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """The cluster, its two tenants and what they do."""

    cluster: Cluster
    soft: Client
    loud: Client
    shape: Shape
    requests: int
    served: list[int] = field(default_factory=lambda: [0])

    async def measured(
        self, noise: Callable[[random.Random], Awaitable[None]] | None, seed: int
    ) -> tuple[list[Felt], float]:
        """One round of the quiet tenant beside `noise`, and how many requests a second that was served meanwhile."""
        crowd = asyncio.create_task(noise(random.Random(-seed))) if noise else None  # type: ignore[arg-type]
        if crowd:
            await asyncio.sleep(_UNTIL_FULL * self.shape.answer_s + 1)
        began, before = time.monotonic(), self.served[0]
        answers = await self._quiet(random.Random(seed))
        per_s = (self.served[0] - before) / (time.monotonic() - began)
        if crowd:
            crowd.cancel()
            await asyncio.wait({crowd})
            if not crowd.cancelled():
                crowd.result()
        await asyncio.sleep(_TRACES_AFTER_S)
        return await self._felt(answers), per_s

    async def poisson(self, per_s: float, chance: random.Random) -> None:
        """Requests of the noisy tenant at a rate, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                tasks.create_task(self._noisy(chance))
                await asyncio.sleep(chance.expovariate(per_s))

    async def closed(self, at_once: int, chance: random.Random) -> None:
        """So many of its requests at any time, until cancelled."""

        async def one() -> None:
            while True:
                await self._noisy(chance)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(at_once):
                tasks.create_task(one())

    async def _noisy(self, chance: random.Random) -> None:
        try:
            await self.loud.generate(text="a noisy question", sampling=self.shape.sampling(chance))
            self.served[0] += 1
        except Exhausted:
            pass  # what a tenant that asks for too much is told

    async def _quiet(self, chance: random.Random) -> list[Answer]:
        asked = []
        for _ in range(self.requests):
            sampling = self.shape.sampling(chance)
            asked.append(asyncio.create_task(self.soft.generate(text="a quiet question", sampling=sampling)))
            await asyncio.sleep(chance.expovariate(self.shape.quiet))
        return list(await asyncio.gather(*asked))

    async def _felt(self, answers: list[Answer]) -> list[Felt]:
        async with Peer(self.cluster.addresses["telemetry"]) as peer:
            stub = telemetry_grpc.TelemetryServiceStub(peer.channel)
            felt = []
            for answer in answers:
                assert answer.started is not None
                question = telemetry_pb.GetTraceRequest(request_id=answer.started.request_id)
                trace = await peer.unary(stub.GetTrace, question, deadline=Deadline.after(10))
                felt.append(_felt(answer, list(trace.spans)))
        return felt


def _felt(answer: Answer, spans: list[telemetry_pb.Span]) -> Felt:
    def took(name: str) -> float:
        return sum(span.duration_ms for span in spans if span.name == name)

    gaps = sorted(answer.end.timings.inter_token_ms)
    return Felt(
        first_token=answer.end.timings.first_token_ms,
        place=took("gateway.place"),
        asks=sum(span.name == "router.Place" for span in spans),
        engine_queue=took("engine.queue"),
        prefill=took("engine.prefill"),
        step=gaps[len(gaps) // 2],
    )


async def measure(shape: Shape, noise_per_s: float, rounds: int, requests: int, bounds: Saturation) -> None:
    """All conditions, in turns."""
    conditions = {name: Condition() for name in ("alone", "full", "beside")}
    with tempfile.TemporaryDirectory() as folder:
        cluster = Cluster(Path(folder))
        try:
            await _started(cluster, bounds)
            quiet, noisy = [await tenant_key(cluster, tenant) for tenant in ("quiet", "noisy")]
            async with cluster.client(api_key=quiet) as soft, cluster.client(api_key=noisy) as loud:
                bench = Bench(cluster=cluster, soft=soft, loud=loud, shape=shape, requests=requests)
                nearly = shape.running - round(shape.quiet * shape.answer_s)
                noises = {
                    "alone": None,
                    "full": lambda chance: bench.closed(nearly, chance),
                    "beside": lambda chance: bench.poisson(noise_per_s, chance),
                }
                for number in range(rounds):
                    for name, noise in noises.items():
                        await engine(cluster, shape, f"{name}-{number}", 2 if name == "full" else 1)
                        felt, per_s = await bench.measured(noise, number + 1)
                        conditions[name].rounds.append(felt)
                        conditions[name].noise_per_s.append(per_s)
                        await asyncio.to_thread(cluster.children[f"{name}-{number}"].stop)
        finally:
            await cluster.close()
    report(conditions)


async def _started(cluster: Cluster, bounds: Saturation) -> None:
    await cluster.start_stores()
    await saturated_at(cluster, bounds)
    for kind in ("telemetry", "router", "gateway"):
        cluster.start_service(kind)
    await cluster.until_serving("telemetry", "router", "gateway")


async def engine(cluster: Cluster, shape: Shape, name: str, times: int) -> None:
    """Start the fleet's only one, with so many times the shape's seats."""
    seats = times * shape.running
    cluster.start_engine(name, simulate_itl_ms=1000 * shape.itl_s, simulate_step_ms=0, max_num_seqs=seats)
    await cluster.until_ready(name)


async def saturated_at(cluster: Cluster, bounds: Saturation) -> None:
    """Set what of the deployment's saturation is given."""
    etcd = EtcdClient([cluster.etcd.endpoint])
    try:
        found = await etcd.get(keys.deployment_key(DEPLOYMENT))
        assert found is not None
        deployment = intent.decode(Deployment, found.value)
        deployment.routing.saturation.MergeFrom(bounds)
        await etcd.put(keys.deployment_key(DEPLOYMENT), intent.encode(deployment))
    finally:
        await etcd.close()


def report(conditions: dict[str, Condition]) -> None:
    """Print it."""
    for name, condition in conditions.items():
        times, p99s = condition.all(), condition.p99s()
        print(
            f"{name:7} TTFT p50 {rank(times, 0.5):6.1f} ms, p99 {rank(times, 0.99):6.1f} ms"
            f" (rounds {min(p99s):.1f} to {max(p99s):.1f}), n {len(times)}"
            f"; noise served {sum(condition.noise_per_s) / len(condition.noise_per_s):.1f}/s"
        )
        parts: dict[str, Callable[[Felt], float]] = {
            "placed after": lambda felt: felt.place,
            "questions to the router": lambda felt: felt.asks,
            "engine's queue": lambda felt: felt.engine_queue,
            "prefill": lambda felt: felt.prefill,
            "rest": lambda felt: felt.first_token - felt.place - felt.engine_queue - felt.prefill,
            "step": lambda felt: felt.step,
        }
        for part, of in parts.items():
            values = condition.all(of)
            mean = sum(values) / len(values)
            print(f"        {part:24} mean {mean:6.1f}, p50 {rank(values, 0.5):6.1f}, p99 {rank(values, 0.99):6.1f}")
    alone = conditions["alone"]
    for name, condition in conditions.items():
        by_round = sorted(b / a for a, b in zip(alone.p99s(), condition.p99s(), strict=True))
        print(
            f"{name:7} / alone: p50 {rank(condition.all(), 0.5) / rank(alone.all(), 0.5):.2f},"
            f" p99 {rank(condition.all(), 0.99) / rank(alone.all(), 0.99):.2f}"
            f" (rounds {by_round[0]:.2f} to {by_round[-1]:.2f})"
        )


def rank(values: list[float], share: float) -> float:
    """Nearest rank."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def main() -> None:
    """Parse and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--noise", choices=("rate", "capacity"), default="rate", help="ten times what")
    parser.add_argument("--times", type=float, default=10.0, help="how many times it is")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=100, help="of the quiet tenant, per round")
    parser.add_argument("--running", type=int, default=32, help="sequences that the engine runs at once")
    parser.add_argument("--itl", type=float, default=0.02, help="seconds that a step takes for one sequence")
    parser.add_argument("--tokens", type=int, default=20, help="of every answer")
    parser.add_argument("--quiet", type=float, default=1 / 0.15, help="requests of the quiet tenant per second")
    parser.add_argument("--spread", type=float, default=0.5, help="how much answers differ in length, 0 to 1")
    parser.add_argument("--waiting", type=float, help="routing.saturation.waiting of the deployment; else the default")
    parser.add_argument("--reserve", type=float, help="routing.saturation.reserve of the deployment; else the default")
    given = parser.parse_args()
    shape = Shape(
        running=given.running,
        itl_s=given.itl,
        tokens=given.tokens,
        spread=given.spread,
        quiet=given.quiet,
        times=given.times,
    )
    bounds = Saturation(waiting=given.waiting, reserve=given.reserve)
    noise = shape.times * (shape.quiet if given.noise == "rate" else shape.capacity)
    print(f"the engine serves {shape.capacity:.1f}/s, asked for {shape.quiet:.1f}/s + {noise:.1f}/s of noise")
    asyncio.run(measure(shape, noise, given.rounds, given.requests, bounds))


if __name__ == "__main__":
    main()
