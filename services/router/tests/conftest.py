"""Builders for the core's values: an ordinary idle replica and an ordinary attempt, with what a test changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from headrace.router.core.placement import Decision
from headrace.router.core.prefix_index import PrefixIndex
from headrace.router.core.replica import Attempt, AttemptKey, EngineId, Phase, Rates, Replica, Unreadable
from headrace.router.core.router import Router
from headrace.router.core.rules import Rules
from headrace.router.core.view import Sighting, View

DEPLOYMENT = "chat"
BUNDLE = "sb-27"
FRESHNESS_S = 10.0


@pytest.fixture(scope="session")
def a_replica() -> Callable[..., Replica]:
    """Build an idle, ready, measured replica; keyword arguments change it."""

    def build(engine_id: str = "a", **changes: Any) -> Replica:
        usual: dict[str, Any] = {
            "epoch": 1,
            "sequence": 1,
            "address": "127.0.0.1:1",
            "deployment": DEPLOYMENT,
            "bundle_digest": BUNDLE,
            "adapters": frozenset(),
            "phase": Phase.READY,
            "waiting": 0,
            "waiting_prefill_tokens": 0,
            "running": 0,
            "free_blocks": 1024,
            "total_blocks": 1024,
            "block_size": 16,
            "max_model_len": 8192,
            "max_num_seqs": 32,
            "pressure": 0.0,
            "rates": Rates(prefill_tokens_per_s=500.0, itl_s=0.022),
        }
        return Replica(engine_id=EngineId(engine_id), **{**usual, **changes})

    return build


@pytest.fixture(scope="session")
def an_attempt() -> Callable[..., Attempt]:
    """Build an attempt of 140 prompt and 80 answer tokens; keyword arguments change it."""

    def build(request_id: str = "req-1842", number: int = 1, **changes: Any) -> Attempt:
        usual: dict[str, Any] = {
            "deployment": DEPLOYMENT,
            "bundle_digest": BUNDLE,
            "adapter": None,
            "prompt_tokens": 140,
            "max_tokens": 80,
        }
        return Attempt(key=AttemptKey(request_id, number), **{**usual, **changes})

    return build


@pytest.fixture(scope="session")
def a_view() -> Callable[..., dict[EngineId, Sighting]]:
    """Build sightings as of instant 0 from (replica, age in seconds) pairs."""

    def build(*seen: tuple[Replica | Unreadable, float]) -> dict[EngineId, Sighting]:
        return {r.engine_id: Sighting(seen=r, written_at=-age_s, payload=b"") for r, age_s in seen}

    return build


@pytest.fixture(scope="session")
def a_router() -> Callable[..., Router]:
    """Build a router without a view; by default with an empty prefix index and the first of equals."""

    def build(**changes: Any) -> Router:
        rules = changes.pop("rules", Rules(freshness_s=FRESHNESS_S))
        usual: dict[str, Any] = {
            "rules_of": lambda deployment: rules,
            "index": PrefixIndex(10_000),
            "chance": lambda: 0.0,
            "longest_s": FRESHNESS_S,
        }
        return Router(**{**usual, **changes})

    return build


@pytest.fixture(scope="session")
def place(a_router: Callable[..., Router]) -> Callable[..., Decision]:
    """Decide at instant 0 by one router alone, with the default rules and, unless given, the first of equals."""

    def run(sightings: Mapping[EngineId, Sighting], attempt: Attempt, **changes: Any) -> Decision:
        router = a_router(**changes)
        router.view = View(sightings=sightings, read_at=0.0, degraded=False)
        return router.place(attempt, 0.0)

    return run
