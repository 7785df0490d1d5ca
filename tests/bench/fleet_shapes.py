"""Workloads that tell routers apart: requests with their answers, and when they come.

Arrivals are an open loop: Poisson, whatever becomes of those before. Users, siblings and lengths are drawn from the
seed, so every policy is asked exactly the same. Answers are shorter than what clients allow (`MAX_TOKENS`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from fleet_replica import BUNDLE, EOS, KEY, ReplicaModel, Request
from fleet_simulation import Arrival

ROOT = KEY.root(bundle_digest=BUNDLE, adapter_digest="", isolation_domain="")
VOCABULARY = 49_152
MAX_TOKENS = 256
PREFIX = 4096
TURNS = 8

Make = Callable[["Maker"], list[Request]]


class Maker:
    """Draws one workload's requests. A prompt is made of `text`, and nothing in it occurs elsewhere by chance."""

    def __init__(self, seed: int, model: ReplicaModel) -> None:
        self.random = random.Random(seed)
        self.model = model
        self._ids = 0
        self._chains: dict[int, tuple[list[int], list[bytes]]] = {}

    def text(self, tokens: int) -> list[int]:
        """So many tokens that nobody else has."""
        draw = self.random
        return draw.choices(range(EOS + 1, VOCABULARY), k=tokens)

    def between(self, least: int, most: int) -> int:
        """A length."""
        return self.random.randint(least, most)

    def answer(self) -> list[int]:
        """16 to 112 tokens, 64 in the mean."""
        return [*self.text(self.between(15, 111)), EOS]

    def request(self, beginning: list[int], own: list[int]) -> Request:
        """A request with the prompt `beginning` + `own`. The list `beginning` is kept, and hashed only once."""
        prompt = beginning + own
        self._ids += 1
        return Request(
            id=self._ids,
            prompt=prompt,
            answer=self.answer(),
            max_tokens=MAX_TOKENS,
            hashes=self._hashes(beginning, prompt),
        )

    def _hashes(self, beginning: list[int], prompt: list[int]) -> list[bytes]:
        size = self.model.block_size
        kept = self._chains.get(id(beginning))
        if kept is None:
            kept = self._chains[id(beginning)] = beginning, KEY.chain(ROOT, beginning, size)
        known = kept[1]
        return known + KEY.chain(known[-1] if known else ROOT, prompt[len(known) * size :], size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One workload. `draw` yields groups of requests: those of a group come at once, each with its follow-ups,
    and there are `group` requests in one in the mean."""

    name: str
    about: str
    draw: Callable[[Maker], Iterator[list[Request]]]
    requests: int
    group: float = 1.0
    model: ReplicaModel = field(default_factory=ReplicaModel)

    def workload(self, seed: int, rate: float, requests: int) -> list[Arrival]:
        """About `requests` of them, follow-ups included, `rate` a second."""
        maker = Maker(seed, self.model)
        arrivals: list[Arrival] = []
        at, made = 0.0, 0
        for group in self.draw(maker):
            size = sum(1 for first in group for _ in chain_of(first))
            # The time that a group stands for goes by before it: groups are a Poisson process whose rate is theirs.
            at += maker.random.expovariate(rate / self.group)
            arrivals += [Arrival(at=at, request=request) for request in group]
            made += size
            if made >= requests:
                return arrivals
        raise AssertionError("shapes draw without end")


def chain_of(request: Request | None) -> Iterator[Request]:
    """A request and its follow-ups."""
    while request is not None:
        yield request
        request = request.follow_up


def tenants(working_set: float) -> Callable[[Maker], Iterator[list[Request]]]:
    """A system prompt of `PREFIX` tokens per tenant, together `working_set` × one replica's cache; short questions."""

    def draw(maker: Maker) -> Iterator[list[Request]]:
        count = round(working_set * maker.model.cache_tokens / PREFIX)
        prompts = [maker.text(PREFIX) for _ in range(count)]
        while True:
            yield [maker.request(maker.random.choice(prompts), maker.text(maker.between(32, 256)))]

    return draw


def conversations(maker: Maker) -> Iterator[list[Request]]:
    """Eight turns: 512 tokens to begin with, each turn adds the answer and 64 to 256 tokens after some 2 s."""
    while True:
        turns: list[Request] = []
        history: list[int] = []
        for _ in range(TURNS):
            said = maker.text(maker.between(64, 256) if history else 512)
            turn = maker.request(history, said)
            if turns:
                turns[-1].follow_up, turns[-1].think_s = turn, maker.random.expovariate(0.5)
            turns.append(turn)
            history = [*turn.prompt, *turn.answer]
        yield [turns[0]]


def siblings(maker: Maker) -> Iterator[list[Request]]:
    """An agent's step: 4 to 16 requests at once over 1,024 new tokens they share, and 64 of their own."""
    while True:
        shared = maker.text(1024)
        yield [maker.request(shared, maker.text(64)) for _ in range(maker.between(4, 16))]


def unique(maker: Maker) -> Iterator[list[Request]]:
    """Prompts of 512 to 1,536 tokens that share nothing."""
    while True:
        yield [maker.request([], maker.text(maker.between(512, 1536)))]


def bimodal(maker: Maker) -> Iterator[list[Request]]:
    """Prompts of 10 tokens, and one in five of 10,000; they share nothing."""
    while True:
        yield [maker.request([], maker.text(10_000 if maker.random.random() < 0.2 else 10))]


SLOW_PREFILL = ReplicaModel(prompt_token_s=0.001)
NOISY = ReplicaModel(noisy_period_s=20.0)

SHAPES = (
    *(
        Shape(
            name=f"tenants-{working_set:g}x",
            about=f"shared prefixes, {working_set:g} × one cache",
            draw=tenants(working_set),
            requests=700,
        )
        for working_set in (0.5, 1, 2, 6)
    ),
    Shape(name="conversations", about="conversations of 8 turns", draw=conversations, requests=900, group=TURNS),
    Shape(name="siblings", about="bursts of 4–16 siblings", draw=siblings, requests=900, group=10),
    Shape(name="unique", about="unique prompts", draw=unique, requests=900),
    Shape(
        name="unique-slow-prefill",
        about="unique prompts, prefill 10 × slower",
        draw=unique,
        requests=450,
        model=SLOW_PREFILL,
    ),
    Shape(name="unique-noisy", about="unique prompts, noisy neighbours", draw=unique, requests=900, model=NOISY),
    Shape(name="bimodal", about="prompts of 10 or 10,000 tokens", draw=bimodal, requests=700),
)
