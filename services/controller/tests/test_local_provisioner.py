"""With real processes; a small script stands in for the engine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import psutil
import pytest

from headrace.base.errors import StartError
from headrace.controller.adapters.engine_record import EngineRecord, RecordFolder
from headrace.controller.adapters.local_provisioner import LocalProvisioner, LocalSettings
from headrace.controller.core.decision import Forget, Kill, Reason, Start, Stop, Why
from headrace.controller.core.fleet import EngineId, Life, Process, Spec
from headrace.controller.ports import ProvisionError

Eventually = Callable[[Callable[[], Awaitable[bool]]], Awaitable[None]]

DIGEST = "0123456789abcdef0123456789abcdef"
BUNDLE = b'{"display_name": "m"}'
ONE = EngineId("chat-1")
REASON = Reason(why=Why.SCALE_UP, text="test")

STAND_IN = """
import json, os, signal, subprocess, sys, time
flags = dict(a.removeprefix("--").split("=", 1) for a in sys.argv[1:])
mode = flags.get("mode", "")
if mode == "exit":
    sys.stderr.write("first words\\nlast words\\n")
    sys.exit(int(flags["code"]))
if mode == "lifeline":
    fd = int(os.environ["HEADRACE_LIFELINE_FD"])
    print("reading", flush=True)
    sys.exit(len(os.read(fd, 1)))
if mode == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if mode == "counting":
    told = []
    signal.signal(signal.SIGTERM, lambda *_: (told.append(1), print("told", len(told), flush=True)))
    signal.signal(signal.SIGUSR1, lambda *_: print("told", len(told), "in all", flush=True))
if mode == "parent":
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    print("worker", worker.pid, flush=True)
facts = {"argv": sys.argv[1:], "env": dict(os.environ), "sid": os.getsid(0), "pid": os.getpid()}
print(json.dumps(facts), flush=True)
while True:
    time.sleep(0.05)
"""


def start(mode: str = "", *, engine_id: EngineId = ONE, **settings: str) -> Start:
    given = {"mode": mode, **settings} if mode else settings
    return Start(
        engine_id=engine_id,
        deployment="chat",
        spec=Spec(bundle_digest=DIGEST, backend="simulated", settings=tuple(sorted(given.items()))),
        starts=1,
        failures=0,
        last_exit="",
        reason=REASON,
    )


def stop(engine_id: EngineId = ONE) -> Stop:
    return Stop(engine_id=engine_id, deployment="chat", reason=REASON)


def kill(engine_id: EngineId = ONE) -> Kill:
    return Kill(engine_id=engine_id, deployment="chat", reason=REASON)


def forget(engine_id: EngineId = ONE) -> Forget:
    return Forget(engine_id=engine_id, deployment="chat", reason=REASON)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "stand_in.py"
    path.write_text(STAND_IN)
    return path


@pytest.fixture
def make(tmp_path: Path, script: Path) -> Callable[[], LocalProvisioner]:
    def build() -> LocalProvisioner:
        settings = LocalSettings(
            data_dir=tmp_path / "data",
            redis_url="redis://:secret@127.0.0.1:1/0",
            otlp_endpoint="127.0.0.1:2",
            command=(sys.executable, str(script)),
        )
        return LocalProvisioner(settings, lambda digest: BUNDLE if digest == DIGEST else None)

    return build


@pytest.fixture
async def provisioner(make: Callable[[], LocalProvisioner]) -> AsyncIterator[LocalProvisioner]:
    built = make()
    yield built
    await built.stop_all(0.0)
    built.close()


async def has_crashed(provisioner: LocalProvisioner) -> bool:
    return all(p.life is Life.CRASHED for p in await provisioner.observe())


async def only(provisioner: LocalProvisioner) -> Process:
    (process,) = await provisioner.observe()
    return process


def facts(tmp_path: Path) -> dict[str, object]:
    """What the stand-in said of itself."""
    lines = (tmp_path / "data/logs/chat-1.log").read_text().splitlines()
    return next(dict(json.loads(line)) for line in lines if line.startswith("{"))


async def contains(log: Path, text: str) -> bool:
    return text in content(str(log)).decode()


def content(path: str) -> bytes:
    return Path(path).read_bytes()


def spawn(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", *arguments], stdout=subprocess.PIPE, text=True)


async def test_an_engine_gets_its_settings_identity_and_stores_and_a_session_of_its_own(
    provisioner: LocalProvisioner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    monkeypatch.setenv("HEADRACE_ENGINE_MAX_NUM_SEQS", "1")
    monkeypatch.setenv("HEADRACE_CONTROLLER_DATA_DIR", "x")
    await provisioner.act(start(max_num_seqs="4"))
    await eventually(lambda: contains(tmp_path / "data/logs/chat-1.log", "argv"))
    found = facts(tmp_path)
    env = found["env"]
    assert isinstance(env, dict)
    assert found["argv"] == ["--max-num-seqs=4"]
    assert found["sid"] == found["pid"]
    assert env["HEADRACE_ENGINE_ENGINE_ID"] == "chat-1"
    assert env["HEADRACE_ENGINE_DEPLOYMENT"] == "chat"
    assert env["HEADRACE_ENGINE_BACKEND"] == "simulated"
    assert env["HEADRACE_REDIS_URL"] == "redis://:secret@127.0.0.1:1/0"
    assert env["HEADRACE_OTLP_ENDPOINT"] == "127.0.0.1:2"
    assert content(env["HEADRACE_ENGINE_BUNDLE"]) == BUNDLE
    assert "HEADRACE_ENGINE_MAX_NUM_SEQS" not in env
    assert "HEADRACE_CONTROLLER_DATA_DIR" not in env


async def test_everything_kept_on_disk_is_private(provisioner: LocalProvisioner, tmp_path: Path) -> None:
    await provisioner.act(start())
    files = [p for p in (tmp_path / "data").rglob("*") if p.is_file() and p.name != "lock"]
    assert {p.name for p in files} == {"chat-1.json", f"{DIGEST}.json", "chat-1.log"}
    assert {p.stat().st_mode & 0o777 for p in files} == {0o600}


async def test_an_engine_outlives_a_killed_controller_and_is_adopted_by_the_next(
    make: Callable[[], LocalProvisioner], tmp_path: Path, script: Path, eventually: Eventually
) -> None:
    with spawn(_CONTROLLER, str(tmp_path / "data"), str(script), DIGEST) as controller:
        assert controller.stdout is not None
        assert controller.stdout.readline() == "started\n"
        controller.kill()

    successor = make()
    adopted = await only(successor)
    assert adopted.life is Life.RUNNING
    assert psutil.Process(adopted.pid).is_running()
    assert (adopted.engine_id, adopted.spec, adopted.starts) == (ONE, start().spec, 1)

    await successor.act(stop())

    async def gone() -> bool:
        return (await only(successor)).life is Life.STOPPED

    await eventually(gone)
    assert (await only(successor)).last_exit == "an exit nobody watched"
    await successor.act(forget())
    assert await successor.observe() == ()
    successor.close()


_CONTROLLER = textwrap.dedent(
    """
    import asyncio, sys, time
    from pathlib import Path
    from headrace.controller.adapters.local_provisioner import LocalProvisioner, LocalSettings
    from headrace.controller.core.decision import Reason, Start, Why
    from headrace.controller.core.fleet import EngineId, Spec

    data, script, digest = sys.argv[1:]
    settings = LocalSettings(data_dir=Path(data), redis_url="redis://x", command=(sys.executable, script))
    start = Start(engine_id=EngineId("chat-1"), deployment="chat", starts=1, failures=0, last_exit="",
                  spec=Spec(bundle_digest=digest, backend="simulated"), reason=Reason(why=Why.SCALE_UP, text=""))
    asyncio.run(LocalProvisioner(settings, lambda _: b"{}").act(start))
    print("started", flush=True)
    time.sleep(600)
    """
)


async def test_an_engine_whose_controller_died_before_noting_its_pid_is_found(
    provisioner: LocalProvisioner, make: Callable[[], LocalProvisioner], tmp_path: Path
) -> None:
    await provisioner.act(start("parent"))
    pid = (await only(provisioner)).pid
    path = tmp_path / "data/engines/chat-1.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pid": None, "created": None}))
    successor = make()
    found = await only(successor)
    assert (found.life, found.pid) == (Life.RUNNING, pid)
    successor.close()


async def test_a_pid_given_to_another_process_is_never_touched(provisioner: LocalProvisioner, tmp_path: Path) -> None:
    with spawn("import time; time.sleep(600)") as stranger:
        record = EngineRecord(
            engine_id=ONE,
            deployment="chat",
            spec=start().spec,
            launch_id="of-a-process-long-gone",
            starts=1,
            failures=0,
            last_exit="",
            log_path=str(tmp_path / "none.log"),
            log_offset=0,
            pid=stranger.pid,
            created=psutil.Process(stranger.pid).create_time() - 60,
        )
        RecordFolder(tmp_path / "data/engines").write(record)
        assert (await only(provisioner)).life is Life.CRASHED
        await provisioner.act(stop())
        await provisioner.act(kill())
        await provisioner.stop_all(0.0)
        assert stranger.poll() is None
        assert await provisioner.observe() == ()
        stranger.kill()


async def test_an_engine_is_known_again_after_the_clock_was_set(provisioner: LocalProvisioner, tmp_path: Path) -> None:
    await provisioner.act(start())
    path = tmp_path / "data/engines/chat-1.json"
    fields = json.loads(path.read_text())
    path.write_text(json.dumps(fields | {"created": fields["created"] - 3600}))
    assert (await only(provisioner)).life is Life.RUNNING


@pytest.mark.parametrize(("code", "refused"), [("1", False), ("2", True)])
async def test_an_exit_is_told_with_its_last_words_and_leaves_no_zombie(
    provisioner: LocalProvisioner, eventually: Eventually, code: str, refused: bool
) -> None:
    await provisioner.act(start("exit", code=code))

    await eventually(lambda: has_crashed(provisioner))
    ended = await only(provisioner)
    assert ended.last_exit == f"exit code {code}: last words"
    assert ended.refused is refused
    assert not psutil.pid_exists(ended.pid)


async def test_a_restart_keeps_the_count_and_the_reason_and_appends_to_the_log(
    provisioner: LocalProvisioner, tmp_path: Path, eventually: Eventually
) -> None:
    await provisioner.act(start("exit", code="1"))

    await eventually(lambda: has_crashed(provisioner))
    before = await only(provisioner)
    again = start()
    await provisioner.act(
        Start(
            engine_id=ONE,
            deployment="chat",
            spec=again.spec,
            starts=2,
            failures=1,
            last_exit=before.last_exit,
            reason=REASON,
        )
    )
    now = await only(provisioner)
    assert (now.life, now.starts, now.failures) == (Life.RUNNING, 2, 1)
    assert now.last_exit == "exit code 1: last words"
    assert (tmp_path / "data/logs/chat-1.log").read_text().startswith("first words\nlast words\n")


async def test_an_engine_is_not_started_beside_itself(provisioner: LocalProvisioner) -> None:
    await provisioner.act(start())
    pid = (await only(provisioner)).pid
    with pytest.raises(ProvisionError, match="running already"):
        await provisioner.act(start())
    assert (await only(provisioner)).pid == pid


async def test_a_stop_is_told_once_and_shown_as_stopping_by_any_controller(
    provisioner: LocalProvisioner, make: Callable[[], LocalProvisioner], tmp_path: Path, eventually: Eventually
) -> None:
    log = tmp_path / "data/logs/chat-1.log"
    await provisioner.act(start("counting"))
    await eventually(lambda: contains(log, "argv"))
    await provisioner.act(stop())
    await eventually(lambda: contains(log, "told 1"))
    await provisioner.act(stop())
    successor = make()
    await successor.act(stop())
    assert (await only(successor)).life is Life.STOPPING
    os.kill((await only(provisioner)).pid, signal.SIGUSR1)
    await eventually(lambda: contains(log, "in all"))
    assert "told 1 in all" in log.read_text()
    successor.close()


async def test_a_kill_takes_the_engines_own_children_along(
    provisioner: LocalProvisioner, tmp_path: Path, eventually: Eventually
) -> None:
    await provisioner.act(start("parent"))
    log = tmp_path / "data/logs/chat-1.log"
    await eventually(lambda: contains(log, "argv"))
    worker = psutil.Process(int(log.read_text().split()[1]))
    await provisioner.act(kill())

    async def both_gone() -> bool:
        ended = not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE
        return ended and (await only(provisioner)).life is Life.CRASHED

    await eventually(both_gone)


async def test_stopping_all_drains_then_kills_and_leaves_no_record(
    provisioner: LocalProvisioner, tmp_path: Path, eventually: Eventually
) -> None:
    await provisioner.act(start())
    await provisioner.act(start("stubborn", engine_id=EngineId("chat-2")))

    async def both_up() -> bool:
        return all((tmp_path / f"data/logs/chat-{n}.log").read_text() for n in (1, 2))

    await eventually(both_up)
    pids = [p.pid for p in await provisioner.observe()]
    await provisioner.stop_all(0.3)
    assert await provisioner.observe() == ()
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert not list((tmp_path / "data/engines").rglob("*.json"))


async def test_engines_hold_the_launchers_lifeline(
    provisioner: LocalProvisioner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, eventually: Eventually
) -> None:
    read_fd, write_fd = os.pipe()
    monkeypatch.setenv("HEADRACE_LIFELINE_FD", str(read_fd))
    await provisioner.act(start("lifeline"))
    log = tmp_path / "data/logs/chat-1.log"
    await eventually(lambda: contains(log, "reading"))
    assert (await only(provisioner)).life is Life.RUNNING
    os.close(write_fd)

    await eventually(lambda: has_crashed(provisioner))
    assert (await only(provisioner)).last_exit.startswith("exit code 0")
    os.close(read_fd)


async def test_a_controller_does_not_act_while_another_one_does(provisioner: LocalProvisioner, tmp_path: Path) -> None:
    with RecordFolder(tmp_path / "data/engines").exclusive(), pytest.raises(ProvisionError):
        await provisioner.act(start())
    assert await provisioner.observe() == ()


async def test_a_bundle_that_was_seen_before_is_kept_for_restarts_and_an_unknown_one_is_refused(
    tmp_path: Path, script: Path, provisioner: LocalProvisioner
) -> None:
    await provisioner.act(start())
    settings = LocalSettings(data_dir=tmp_path / "data", redis_url="redis://x", command=(sys.executable, str(script)))
    without_etcd = LocalProvisioner(settings, lambda _: None)
    await without_etcd.act(start(engine_id=EngineId("chat-2")))
    with pytest.raises(ProvisionError, match="neither in etcd nor kept here"):
        await without_etcd.act(
            Start(
                engine_id=EngineId("chat-3"),
                deployment="chat",
                spec=Spec(bundle_digest="f" * 32, backend="simulated"),
                starts=1,
                failures=0,
                last_exit="",
                reason=REASON,
            )
        )
    assert [p.engine_id for p in await provisioner.observe()] == ["chat-1", "chat-2"]
    await without_etcd.stop_all(0.0)
    without_etcd.close()


async def test_a_file_that_is_no_record_is_set_aside(provisioner: LocalProvisioner, tmp_path: Path) -> None:
    (tmp_path / "data/engines/chat-9.json").write_text("{half")
    await provisioner.act(start())
    assert [p.engine_id for p in await provisioner.observe()] == ["chat-1"]
    assert (tmp_path / "data/engines/chat-9.unreadable").exists()


def test_an_unusable_data_folder_is_one_clear_line(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(StartError, match="cannot use the data folder"):
        LocalProvisioner(LocalSettings(data_dir=blocked, redis_url="redis://x"), lambda _: None)


async def test_an_engine_killed_from_outside_is_seen_as_crashed(
    provisioner: LocalProvisioner, eventually: Eventually
) -> None:
    await provisioner.act(start())
    os.kill((await only(provisioner)).pid, signal.SIGKILL)
    await eventually(lambda: has_crashed(provisioner))
    assert (await only(provisioner)).last_exit == "killed by SIGKILL"
