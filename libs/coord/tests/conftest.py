"""Real etcd and Valkey servers on free ports; nothing here is simulated."""

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from headrace.coord.embedded import EmbeddedEtcd, EmbeddedRedis
from headrace.coord.etcd.client import EtcdClient

Eventually = Callable[..., Awaitable[None]]


@pytest.fixture
def folder() -> Iterator[Path]:
    """Removed at once, unlike tmp_path: each etcd writes 62 MB."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


@pytest.fixture(scope="session")
def shared_etcd() -> Iterator[EmbeddedEtcd]:
    """For tests that only write their own keys."""
    with tempfile.TemporaryDirectory() as path, EmbeddedEtcd.start(Path(path)) as server:
        yield server


@pytest.fixture
def etcd(folder: Path) -> Iterator[EmbeddedEtcd]:
    """For tests that stop, kill or compact it."""
    server = EmbeddedEtcd.start(folder)
    yield server
    server.stop()


@pytest.fixture(scope="session")
def shared_redis() -> Iterator[EmbeddedRedis]:
    """For tests that leave it running; each finds it empty."""
    with tempfile.TemporaryDirectory() as path, EmbeddedRedis.start(Path(path)) as server:
        yield server


@pytest.fixture
def redis_server(folder: Path) -> Iterator[EmbeddedRedis]:
    server = EmbeddedRedis.start(folder)
    yield server
    server.stop()


@pytest.fixture
async def client(etcd: EmbeddedEtcd) -> AsyncIterator[EtcdClient]:
    client = EtcdClient([etcd.endpoint])
    yield client
    await client.close()


@pytest.fixture
async def shared_client(shared_etcd: EmbeddedEtcd) -> AsyncIterator[EtcdClient]:
    client = EtcdClient([shared_etcd.endpoint])
    yield client
    await client.close()


@pytest.fixture
def freeze() -> Callable[[int], None]:
    def stop(pid: int) -> None:
        """SIGSTOP, and wait until every thread has stopped: the signal takes effect some time after the call."""
        os.kill(pid, signal.SIGSTOP)
        deadline = time.monotonic() + 5
        while {_state(thread) for thread in Path(f"/proc/{pid}/task").iterdir()} != {"T"}:
            assert time.monotonic() < deadline

    return stop


def _state(thread: Path) -> str:
    return (thread / "stat").read_text().rpartition(")")[2].split()[0]


@pytest.fixture
def eventually() -> Eventually:
    async def wait(holds: Callable[[], object], *, within_s: float = 10.0) -> None:
        """Return once `holds()`, a plain or an async function, is true; fail after `within_s`."""
        deadline = time.monotonic() + within_s
        while True:
            held = holds()
            if await held if isinstance(held, Awaitable) else held:
                return
            assert time.monotonic() < deadline, f"not within {within_s} s"
            await asyncio.sleep(0.01)

    return wait
