"""What is asked of every server: prompts that nobody has cached, closed loops, arrivals by chance, a long newcomer."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from contestants import Contestant
from stream_client import Heard

from headrace.text.tokenizer import Tokenizer

TOPICS = ["rivers", "mountains", "clocks", "bread", "ships", "stars", "gardens", "music", "letters", "bridges"]


@dataclass(slots=True)
class Prompts:
    """Prompts of a given length, each unlike all before from its first token on."""

    tokenizer: Tokenizer
    made: int = 0

    def take(self, count: int, length: int = 200) -> list[list[int]]:
        """`count` prompts of exactly `length` tokens."""
        return [self._one(length) for _ in range(count)]

    def _one(self, length: int) -> list[int]:
        self.made += 1
        text = f"{self.made} essays were written. " + " ".join(
            f"A sentence about {TOPICS[(self.made + i) % len(TOPICS)]} number {i}." for i in range(length // 6 + 2)
        )
        return self.tokenizer.encode(text)[:length]


@dataclass(slots=True)
class Load:
    """What one server did under one load."""

    heard: list[Heard]
    seconds: float
    cpu_s: float
    memory_bytes: int
    prompts: list[list[int]] = field(default_factory=list)

    def facts(self) -> dict[str, Any]:
        """The numbers of the report."""
        tokens = sum(len(h.token_ids) for h in self.heard)
        ttft, gaps = [h.ttft_s for h in self.heard], [gap for h in self.heard for gap in h.gaps_s]
        return {
            "tokens_per_s": tokens / self.seconds,
            "ttft_ms": percentiles(ttft),
            "itl_ms": percentiles(gaps),
            "cpu_s_per_1000_tokens": 1000 * self.cpu_s / tokens,
            "memory_mb": self.memory_bytes / 1e6,
        }


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """p50, p90 and p99 in milliseconds, by nearest rank."""
    ordered = sorted(seconds)
    return {f"p{p}": 1000 * ordered[min(len(ordered) - 1, p * len(ordered) // 100)] for p in (50, 90, 99)}


async def closed_loop(server: Contestant, prompts: list[list[int]], streams: int, tokens: int) -> Load:
    """`streams` clients, each asking again as soon as it is answered, until the prompts are used up."""
    waiting = iter(prompts)
    heard: list[Heard] = []

    async def client() -> None:
        for prompt in waiting:
            heard.append(await server.ask(prompt, tokens))

    return await _measured(server, prompts, heard, [client() for _ in range(streams)])


async def open_loop(server: Contestant, prompts: list[list[int]], rate: float, tokens: int, seed: int) -> Load:
    """Requests that arrive at `rate` per second by chance, whether or not the server keeps up."""
    chance = random.Random(seed)  # the same arrivals for every server
    heard: list[Heard] = []
    at = 0.0

    async def arrive(delay: float, prompt: list[int]) -> None:
        await asyncio.sleep(delay)
        heard.append(await server.ask(prompt, tokens))

    arrivals = []
    for prompt in prompts:
        at += chance.expovariate(rate)
        arrivals.append(arrive(at, prompt))
    return await _measured(server, prompts, heard, arrivals)


async def _measured(server: Contestant, prompts: list[list[int]], heard: list[Heard], work: Sequence[Any]) -> Load:
    cpu, began = server.cpu_s(), time.perf_counter()
    await asyncio.gather(*work)
    seconds = time.perf_counter() - began
    return Load(heard, seconds, server.cpu_s() - cpu, server.memory_bytes(), prompts)


async def newcomer(server: Contestant, prompts: Prompts, *, running: int, length: int) -> dict[str, float]:
    """Gaps of `running` streams before and while a prompt of `length` tokens is computed, milliseconds."""
    began = time.perf_counter()
    await asyncio.gather(*(server.ask(p, 16) for p in prompts.take(running)))
    settled_s = max(2.0, 2 * (time.perf_counter() - began))  # a slow server's streams take seconds to begin
    # Long enough to be still running when the newcomer has its first token, at 4 ms a token, too.
    streams = [asyncio.create_task(server.ask(p, 1500)) for p in prompts.take(running)]
    try:
        await asyncio.sleep(settled_s)
        came_at = time.perf_counter()
        long = await server.ask(prompts.take(1, length)[0], 1)
    finally:
        ended = await asyncio.gather(*streams)
    before: list[float] = []
    beside: list[float] = []
    for heard in ended:
        for earlier, later in zip(heard.arrived_at, heard.arrived_at[1:], strict=False):
            if heard.arrived_at[8] < earlier and later < came_at:
                before.append(later - earlier)
            elif later > came_at and earlier < long.arrived_at[0]:
                beside.append(later - earlier)
    median, worst = 1000 * statistics.median(before), percentiles(beside)["p99"]
    ttft_ms = 1000 * long.ttft_s
    return {"median_before_ms": median, "p99_beside_ms": worst, "ratio": worst / median, "newcomer_ttft_ms": ttft_ms}


async def repeated_prefix(server: Contestant, prompts: Prompts, length: int) -> dict[str, float]:
    """TTFT of a prompt of `length` tokens, then of the same with another ending, milliseconds."""
    (first,) = prompts.take(1, length)
    cold = await server.ask([*first, 504, 288], 4)
    warm = await server.ask([*first, 260, 359], 4)
    return {"cold_ms": 1000 * cold.ttft_s, "warm_ms": 1000 * warm.ttft_s, "ratio": warm.ttft_s / cold.ttft_s}


async def prefill(server: Contestant, prompts: Prompts, length: int) -> float:
    """Tokens per second while one prompt of `length` tokens is computed alone."""
    (prompt,) = prompts.take(1, length)
    return length / (await server.ask(prompt, 1)).ttft_s
