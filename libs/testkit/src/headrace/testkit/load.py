"""A load of simulated clients, and a fleet to carry it."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from headrace.base.deadline import Deadline
from headrace.base.errors import HeadraceError
from headrace.testkit.cluster import Answer, Client, Cluster
from headrace.testkit.eventually import eventually

_VOCABULARY = 40_000
_NUMBERS = itertools.count()


async def with_fleet(
    cluster: Cluster, *, engines: int, routers: int, environ: Mapping[str, str] | None = None, **settings: object
) -> list[str]:
    """Engines e-0, e-1, …, routers router-0, …, and one gateway, all serving; the engines' ids."""
    names = [f"e-{n}" for n in range(engines)]
    for name in names:
        cluster.start_engine(name, **settings)
    await cluster.until_ready(*names)
    router_names = [f"router-{n}" for n in range(routers)]
    for name in router_names:
        cluster.start_service("router", name=name)
    cluster.start_service("gateway", environ=environ)
    await cluster.until_serving(*router_names, "gateway")
    await cluster.until_ready(*names)
    return names


def prompt(tokens: int) -> list[int]:
    """A prompt that nobody has sent before."""
    drawn = random.Random(next(_NUMBERS))
    return [drawn.randrange(1000, _VOCABULARY) for _ in range(tokens)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """One request of a load: how long it took, and what came of it."""

    token_ids: list[int]
    took_s: float
    answer: Answer | None
    error: HeadraceError | None


@dataclass(slots=True, kw_only=True)
class Load:
    """Clients that send one request after the other."""

    client: Client
    prompt_tokens: int
    max_tokens: int
    deadline_s: float
    sent: list[Sent] = field(default_factory=list)
    stopping: bool = False

    async def one_client(self) -> None:
        """Ask until told to stop; the last answer is waited for."""
        while not self.stopping:
            token_ids, began = prompt(self.prompt_tokens), time.monotonic()
            answer, error = None, None
            try:
                answer = await self.client.generate(
                    token_ids=token_ids,
                    sampling={"max_tokens": self.max_tokens},
                    deadline=Deadline.after(self.deadline_s),
                )
            except HeadraceError as raised:
                error = raised
            took_s = time.monotonic() - began
            self.sent.append(Sent(token_ids=token_ids, took_s=took_s, answer=answer, error=error))

    async def more(self, requests: int) -> None:
        """Wait until so many more requests have ended."""
        until = len(self.sent) + requests
        await eventually(lambda: len(self.sent) >= until, within_s=30)

    @property
    def answers(self) -> list[Answer]:
        """All that were answered."""
        return [sent.answer for sent in self.sent if sent.answer is not None]

    @property
    def errors(self) -> list[HeadraceError]:
        """What clients heard instead of an answer."""
        return [sent.error for sent in self.sent if sent.error is not None]


@asynccontextmanager
async def load(
    client: Client, clients: int, *, prompt_tokens: int = 64, max_tokens: int = 20, deadline_s: float = 30.0
) -> AsyncIterator[Load]:
    """So many clients at once while the block runs; all have ended when it is left."""
    made = Load(client=client, prompt_tokens=prompt_tokens, max_tokens=max_tokens, deadline_s=deadline_s)
    async with asyncio.TaskGroup() as tasks:
        for _ in range(clients):
            tasks.create_task(made.one_client())
        try:
            yield made
        finally:
            made.stopping = True


__all__ = ["Load", "Sent", "load", "prompt", "with_fleet"]
