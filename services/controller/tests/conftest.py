from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from headrace.coord.embedded import EmbeddedEtcd, EmbeddedRedis

T = TypeVar("T")

Eventually = Callable[[Callable[[], Awaitable[bool]]], Awaitable[None]]


@pytest.fixture
def eventually() -> Eventually:
    """Wait until a condition holds, looking every 50 ms; fails after 30 s, which is only met when it never would."""

    async def wait(condition: Callable[[], Awaitable[bool]], timeout_s: float = 30.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not await condition():
            assert time.monotonic() < deadline, "did not come true"
            await asyncio.sleep(0.05)

    return wait


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EmbeddedEtcd]:
    with EmbeddedEtcd.start(tmp_path / "stores") as server:
        yield server


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis.start(tmp_path / "stores") as server:
        yield server
