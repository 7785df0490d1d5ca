"""The real controller process with a real etcd, a real Redis-protocol server and real (simulated) engines."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from headrace.api.control.v1 import control_service_pb2 as pb
from headrace.api.control.v1 import control_service_pb2_grpc as pb_grpc
from headrace.api.control.v1.intent_pb2 import Bundle, Deployment
from headrace.api.engine.v1 import engine_service_pb2 as engine_pb
from headrace.base.deadline import Deadline
from headrace.base.errors import HeadraceError
from headrace.bundle.bundle import describe, digest
from headrace.bundle.intent import encode
from headrace.bundle.keys import bundle_key, deployment_key
from headrace.bundle.shipped import shipped_model_path
from headrace.coord.embedded import EmbeddedEtcd, EmbeddedRedis
from headrace.coord.etcd.client import EtcdClient
from headrace.coord.redis.replica_board import ReplicaBoard
from headrace.coord.redis.store import open_redis
from headrace.rpc.client import Peer

Eventually = Callable[[Callable[[], Awaitable[bool]]], Awaitable[None]]
Check = Callable[[pb.GetStatusResponse], bool]


def alive(pid: int) -> bool:
    """Whether it runs; an orphan that has ended may stay a zombie where the init process does not reap."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _spawn(environ: dict[str, str], data_dir: Path) -> subprocess.Popen[bytes]:
    with (data_dir / "controller.log").open("ab") as log:
        return subprocess.Popen([sys.executable, "-m", "headrace.controller"], env=os.environ | environ, stderr=log)


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


@dataclass
class Controller:
    """One controller process and the way to ask it."""

    process: subprocess.Popen[bytes]
    peer: Peer
    eventually: Eventually

    async def status(self) -> pb.GetStatusResponse | None:
        stub = pb_grpc.ControlServiceStub(self.peer.channel)
        try:
            answer = await self.peer.unary(stub.GetStatus, pb.GetStatusRequest(), deadline=Deadline.after(2.0))
        except HeadraceError:
            return None
        assert isinstance(answer, pb.GetStatusResponse)
        return answer

    async def until(self, check: Check) -> pb.GetStatusResponse:
        """The first status for which `check` holds."""
        found: list[pb.GetStatusResponse] = []

        async def holds() -> bool:
            assert self.process.poll() is None, "the controller has ended"
            status = await self.status()
            if status is None or not check(status):
                return False
            found.append(status)
            return True

        await self.eventually(holds)
        return found[0]

    async def until_as_wanted(self, replicas: int) -> dict[str, int]:
        """Wait until `replicas` engines are ready and nothing is left to do; their pids by engine id."""
        status = await self.until(
            lambda s: (
                len(s.deployments) == 1
                and s.deployments[0].ready == s.deployments[0].desired == replicas
                and not s.deployments[0].reason
            )
        )
        return {p.engine_id: p.pid for p in status.deployments[0].processes}

    async def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return await asyncio.to_thread(self.process.wait, 20)


@dataclass
class Stack:
    """Stores, intent, and the controllers started on them."""

    data_dir: Path
    etcd: EmbeddedEtcd
    redis: EmbeddedRedis
    client: EtcdClient
    bundle: Bundle
    eventually: Eventually
    controllers: list[Controller] = field(default_factory=list)

    async def want(self, replicas: int, **settings: str) -> None:
        wanted = Deployment(
            name="chat",
            bundle_digest=digest(self.bundle),
            replicas=replicas,
            backend="simulated",
            engine_settings=settings,
        )
        await self.client.put(deployment_key("chat"), encode(wanted))

    async def controller(self, **settings: str) -> Controller:
        address = free_address()
        given = {"address": address, "data_dir": str(self.data_dir), "leader_ttl_s": "2"} | settings
        environ = {f"HEADRACE_CONTROLLER_{name.upper()}": value for name, value in given.items()}
        environ |= {"HEADRACE_ETCD_ENDPOINTS": self.etcd.endpoint, "HEADRACE_REDIS_URL": self.redis.url}
        controller = Controller(_spawn(environ, self.data_dir), Peer(address), self.eventually)
        self.controllers.append(controller)
        return controller


@pytest.fixture
async def stack(
    tmp_path: Path, etcd: EmbeddedEtcd, redis: EmbeddedRedis, eventually: Eventually
) -> AsyncIterator[Stack]:
    data_dir = tmp_path / "data"
    data_dir.mkdir()
    bundle = describe(shipped_model_path())
    client = EtcdClient([etcd.endpoint])
    await client.put(bundle_key(digest(bundle)), encode(bundle))
    built = Stack(data_dir, etcd, redis, client, bundle, eventually)
    yield built
    await client.close()
    for controller in built.controllers:
        controller.process.kill()
        controller.process.wait()
        await controller.peer.close()
    _kill_engines(data_dir)


def _kill_engines(data_dir: Path) -> None:
    for process in psutil.process_iter():
        try:
            if process.environ().get("HEADRACE_ENGINE_BUNDLE", "").startswith(str(data_dir)):
                process.kill()
        except psutil.Error:
            continue


async def test_engines_are_started_restarted_after_a_kill_scaled_down_and_deleted(stack: Stack) -> None:
    await stack.want(2)
    controller = await stack.controller()
    first = await controller.until_as_wanted(2)
    assert set(first) == {"chat-1", "chat-2"}

    os.kill(first["chat-1"], signal.SIGKILL)
    status = await controller.until(lambda s: s.deployments[0].processes[0].starts == 2)
    assert status.deployments[0].processes[0].last_exit == "killed by SIGKILL"
    second = await controller.until_as_wanted(2)
    assert second["chat-1"] != first["chat-1"]
    assert second["chat-2"] == first["chat-2"]

    # chat-1 is the newest now, as it was started again.
    await stack.want(1)
    assert set(await controller.until_as_wanted(1)) == {"chat-2"}

    await stack.client.delete(deployment_key("chat"))
    await controller.until(lambda s: not s.deployments)
    assert not alive(second["chat-2"])
    assert await controller.end() == 0


async def test_engines_outlive_controllers_and_are_adopted(stack: Stack) -> None:
    await stack.want(1)
    killed = await stack.controller()
    engines = await killed.until_as_wanted(1)
    await killed.end(signal.SIGKILL)

    heir = await stack.controller()
    assert await heir.until_as_wanted(1) == engines
    assert await heir.end() == 0
    assert alive(engines["chat-1"])

    last = await stack.controller(stop_engines_on_exit="true")
    status = await last.until(lambda s: bool(s.deployments) and s.deployments[0].ready == 1)
    assert status.deployments[0].processes[0].starts == 1
    assert await last.end() == 0
    assert not alive(engines["chat-1"])
    assert not list((stack.data_dir / "engines").rglob("*.json"))


async def test_engines_go_on_while_etcd_is_away_and_the_controller_acts_again_when_it_is_back(stack: Stack) -> None:
    await stack.want(1)
    controller = await stack.controller()
    engines = await controller.until_as_wanted(1)
    await asyncio.to_thread(stack.etcd.stop)

    status = await controller.until(lambda s: not s.etcd_connected and "does not lead" in s.deployments[0].reason)
    assert (status.deployments[0].desired, status.deployments[0].ready) == (1, 1)
    assert alive(engines["chat-1"])

    os.kill(engines["chat-1"], signal.SIGKILL)
    await controller.until(lambda s: s.deployments[0].processes[0].state == "backing_off")
    back = await asyncio.to_thread(EmbeddedEtcd.start, stack.etcd.data_dir, stack.etcd.port)
    try:
        assert (await controller.until_as_wanted(1))["chat-1"] != engines["chat-1"]
    finally:
        await asyncio.to_thread(back.stop)


async def test_without_redis_nothing_is_scaled_but_a_dead_engine_is_started_again(stack: Stack) -> None:
    await stack.want(1)
    controller = await stack.controller()
    engines = await controller.until_as_wanted(1)
    await asyncio.to_thread(stack.redis.stop)
    await stack.want(2)
    await controller.until(lambda s: s.deployments[0].desired == 2 and "cannot be read" in s.deployments[0].reason)

    os.kill(engines["chat-1"], signal.SIGKILL)
    status = await controller.until(lambda s: s.deployments[0].processes[0].starts == 2)
    assert len(status.deployments[0].processes) == 1

    back = await asyncio.to_thread(EmbeddedRedis.start, stack.redis.data_dir, stack.redis.port)
    try:
        assert set(await controller.until_as_wanted(2)) == {"chat-1", "chat-2"}
    finally:
        await asyncio.to_thread(back.stop)


async def test_an_unknown_engine_setting_is_told_once_and_a_changed_one_replaces_without_a_gap(stack: Stack) -> None:
    await stack.want(1)
    controller = await stack.controller()
    old = await controller.until_as_wanted(1)

    await stack.want(1, max_seqs="4")
    status = await controller.until(lambda s: "unrecognized arguments: --max-seqs=4" in s.deployments[0].reason)
    assert status.deployments[0].ready == 1
    assert [p.starts for p in status.deployments[0].processes] == [1, 1]

    await stack.want(1, max_num_seqs="4")
    ready_counts: list[int] = []

    def replaced(s: pb.GetStatusResponse) -> bool:
        ready_counts.append(s.deployments[0].ready)
        return not s.deployments[0].reason and [p.engine_id for p in s.deployments[0].processes] == ["chat-2"]

    await controller.until(replaced)
    assert min(ready_counts) >= 1
    assert not alive(old["chat-1"])


async def test_a_value_nobody_can_read_changes_nothing_and_is_shown(stack: Stack) -> None:
    await stack.want(1)
    controller = await stack.controller()
    engines = await controller.until_as_wanted(1)
    await stack.client.put(deployment_key("chat"), b'{"replicas": "none at all"}')
    status = await controller.until(lambda s: "replicas" in s.deployments[0].reason)
    assert {p.engine_id: p.pid for p in status.deployments[0].processes} == engines


async def test_of_two_controllers_one_acts_and_the_other_says_that_it_does_not(stack: Stack) -> None:
    await stack.want(1)
    leader = await stack.controller()
    await leader.until_as_wanted(1)
    follower = await stack.controller()
    await follower.until(lambda s: bool(s.deployments) and "does not lead" in s.deployments[0].reason)
    engines = await leader.until_as_wanted(1)
    assert await leader.end() == 0
    assert await follower.until_as_wanted(1) == engines


async def test_external_engines_are_reported_and_left_alone(stack: Stack) -> None:
    await stack.want(2)
    controller = await stack.controller(provisioner="external")
    redis = open_redis(stack.redis.url)
    beat = engine_pb.Heartbeat(
        deployment="chat", bundle_digest=digest(stack.bundle), phase=engine_pb.PHASE_READY, backend="simulated", pid=1
    )
    await ReplicaBoard(redis).write("pod-7", 1, 1, beat.SerializeToString())
    status = await controller.until(lambda s: bool(s.deployments) and s.deployments[0].ready == 1)
    assert "2 wanted, 1 ready" in status.deployments[0].reason
    assert [p.engine_id for p in status.deployments[0].processes] == ["pod-7"]
    await redis.aclose()


def test_a_taken_port_or_an_unusable_data_folder_is_a_clear_line_and_exit_code_1(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        for flags in (["--address", address, "--data-dir", str(tmp_path)], ["--data-dir", str(blocked)]):
            ended = subprocess.run(
                [sys.executable, "-m", "headrace.controller", *flags], capture_output=True, text=True, timeout=20
            )
            assert ended.returncode == 1
            assert ended.stderr.splitlines()[-1].startswith("headrace controller: cannot ")
            assert "Traceback" not in ended.stderr
