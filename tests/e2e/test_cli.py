"""The `headrace` command as a user has it: start, talk, scale, stop, and everything that can go wrong on the way."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headrace.cli.home import Home
from headrace.cli.mark import alive, marked
from headrace.testkit.command import HEADRACE, WITHIN_S, Generating, Terminal, Up, environ, headrace
from headrace.testkit.eventually import eventually

SIMULATED = ("--backend", "simulated")
# 20 ms a token: slow enough to act while an answer streams.
SLOW = (*SIMULATED, "--engine", "simulate_itl_ms=20")
IS_UP = "Headrace is up"
StartUp = Callable[..., Up]

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def start_up(tmp_path: Path) -> Iterator[StartUp]:
    """Starts `headrace up` with the given arguments on the test's own data folder; closed with the test."""
    started: list[Up] = []

    def start(*args: str) -> Up:
        started.append(Up(tmp_path / "home", *args))
        return started[-1]

    yield start
    for up in started:
        up.close()


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """One simulated stack for all tests that only use it."""
    up = Up(tmp_path_factory.mktemp("stack") / "home", *SLOW)
    try:
        asyncio.run(up.until(IS_UP))
        yield up
    finally:
        up.close()


# --- using a running stack ---------------------------------------------------------------------------------------


async def test_status_shows_every_service_the_deployment_and_its_replica(stack: Up) -> None:
    ran = await headrace(stack.home.path, "status")
    assert ran.status == 0
    for name in ("gateway", "router", "controller", "telemetry"):
        (row,) = (line for line in ran.out.splitlines() if line.strip().startswith(name))
        assert row.split()[-1] == "serving"
    assert "smollm2-135m-1=ready" in ran.out
    assert "unknown" not in ran.out, "a warmed-up replica has measured its rates"


async def test_generate_streams_the_text_alone_to_stdout_and_timings_to_stderr(stack: Up) -> None:
    home = stack.home.path
    by_argument, by_stdin, timed = await asyncio.gather(
        headrace(home, "generate", "Once upon", "--max-tokens", "6"),
        headrace(home, "generate", "-", "--max-tokens", "6", given=b"Once upon"),
        headrace(home, "generate", "Once upon", "--max-tokens", "6", "--timings", "--seed", "7"),
    )
    assert by_argument.status == by_stdin.status == timed.status == 0
    assert by_argument.out == by_stdin.out == timed.out
    assert len(by_argument.out.split()) == 6
    assert by_argument.out.endswith("\n")
    assert by_argument.err == ""
    for stage in ("queue", "prefill", "first token (TTFT)", "each later token (ITL)", "total"):
        assert stage in timed.err
    assert "finish: length, replica smollm2-135m-1" in timed.err


async def test_generate_chat_renders_the_models_template(stack: Up) -> None:
    plain, chat = await asyncio.gather(
        headrace(stack.home.path, "generate", "hi", "--max-tokens", "4"),
        headrace(stack.home.path, "generate", "hi", "--chat", "--max-tokens", "4"),
    )
    assert plain.status == chat.status == 0
    assert plain.out != chat.out


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--model", "no-such"], "NOT_FOUND"),
        (["--top-p", "7"], "sampling.top_p"),
    ],
)
async def test_a_refusal_is_one_line_that_names_the_field(stack: Up, args: list[str], said: str) -> None:
    ran = await headrace(stack.home.path, "generate", "hi", *args)
    assert ran.status == 1
    assert said in ran.err
    assert ran.err.count("\n") == 1


async def test_ctrl_c_ends_generate_with_status_130_and_the_engine_is_free_again(stack: Up) -> None:
    answer = await Generating.begin(stack.home.path, tokens=4000)
    answer.process.send_signal(signal.SIGINT)
    ran = await answer.ended()
    assert (ran.status, ran.err) == (130, "")
    await eventually(lambda: replica_row(stack)[3] == "0", within_s=10)


async def test_a_reader_that_goes_away_ends_generate_without_a_word(stack: Up) -> None:
    reader = f"set -o pipefail; {HEADRACE} generate hi --max-tokens 4000 | head -c 10 >/dev/null"
    process = await asyncio.create_subprocess_exec(
        "bash", "-c", reader, env=environ(stack.home.path), stderr=asyncio.subprocess.PIPE
    )
    _, err = await asyncio.wait_for(process.communicate(), WITHIN_S)
    assert (process.returncode, err) == (141, b"")


def replica_row(stack: Up) -> list[str]:
    """Columns of the replica in `headrace status`."""
    shown = subprocess.run([HEADRACE, "status"], env=environ(stack.home.path), capture_output=True, timeout=WITHIN_S)
    rows = [line.split() for line in shown.stdout.decode().splitlines() if line.strip().startswith("smollm2-135m-1")]
    return rows[-1]


async def test_chat_from_a_pipe_remembers_the_conversation_until_reset(stack: Up) -> None:
    home = stack.home.path
    lines = b"hello\nhello\n/reset\nhello\n\n/quit\nnever sent\n"
    ran = await headrace(home, "chat", "--max-tokens", "6", given=lines)
    assert (ran.status, ran.err) == (0, "")
    first, second, third = ran.out.splitlines()
    assert first == third, "after /reset the same question is the same conversation"
    assert first != second, "the second turn was asked with the first one before it"
    failing = await headrace(home, "chat", "--model", "no-such", given=b"hello\nhello\n")
    assert failing.status == 1
    assert failing.err.count("\n") == failing.err.count("[NOT_FOUND/") == 2, (
        "a turn that fails does not end the conversation"
    )


async def test_ctrl_c_in_a_chat_stops_the_answer_and_not_the_chat(stack: Up) -> None:
    terminal = Terminal(stack.home.path, "chat", "--max-tokens", "4000")
    try:
        await terminal.until("you> ")
        terminal.type("tell me everything\n")
        await terminal.until("everything\r\n")
        await eventually(lambda: replica_row(stack)[3] == "1")
        terminal.process.send_signal(signal.SIGINT)
        await terminal.until("(stopped)")
        await terminal.until("you> ")
        await eventually(lambda: replica_row(stack)[3] == "0")
        terminal.process.send_signal(signal.SIGINT)
        await terminal.until("(Ctrl-C again leaves")
        await terminal.until("you> ")
        terminal.type("/reset\n")
        await terminal.until("you> ")
        terminal.type("\x04")
        await eventually(lambda: terminal.process.poll() == 0)
    finally:
        terminal.close()


async def test_logs_of_each_service_and_of_the_replica_are_there(stack: Up) -> None:
    home = stack.home.path
    gateway, engine, unknown = await asyncio.gather(
        headrace(home, "logs", "gateway", "-n", "1"), headrace(home, "logs", "engine"), headrace(home, "logs", "nope")
    )
    assert gateway.out.count("\n") == 1
    assert '"event": "engine_ready"' in engine.out
    assert unknown.status == 1
    assert "smollm2-135m-1" in unknown.err


async def test_a_trace_shows_the_request_through_gateway_router_and_engine(stack: Up) -> None:
    home = stack.home.path
    await headrace(home, "generate", "trace me", "--max-tokens", "3")

    async def newest() -> str:
        listed = await headrace(home, "trace")
        assert listed.status == 0
        return next((line.split()[0] for line in listed.out.splitlines() if line.endswith("gateway.Generate")), "")

    trace_id = await eventually(newest)

    async def complete() -> bool:
        shown = await headrace(home, "trace", trace_id)
        return {"gateway", "router", "engine"} <= {line.split()[0] for line in shown.out.splitlines() if line.strip()}

    await eventually(complete)
    unknown = await headrace(home, "trace", "0" * 32)
    assert unknown.status == 1
    assert unknown.err.count("\n") == 1


async def test_a_created_key_works_until_it_is_revoked(stack: Up) -> None:
    home = stack.home.path
    key = (await headrace(home, "key", "create", "--tenant", "acme", "--name", "laptop")).out.strip()

    async def status_with(key: str) -> int:
        process = await asyncio.create_subprocess_exec(
            *(HEADRACE, "generate", "hi", "--max-tokens", "1"),
            env=environ(home) | {"HEADRACE_API_KEY": key},
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        return await asyncio.wait_for(process.wait(), WITHIN_S)

    async def works() -> bool:
        return await status_with(key) == 0

    async def refused() -> bool:
        return await status_with(key) == 1

    await eventually(works)
    assert (await headrace(home, "key", "revoke", "-", given=key.encode())).out == "revoked\n"
    await eventually(refused)
    assert (await headrace(home, "key", "revoke", key)).status == 1
    shown = await headrace(home, "key", "show")
    assert shown.out == stack.home.key_file.read_text()


async def test_apply_scales_the_running_deployment_up_and_down(stack: Up) -> None:
    home = stack.home.path

    async def scaled(replicas: int) -> None:
        applied = await headrace(home, "apply", "--replicas", str(replicas))
        assert applied.out.startswith(f"wanted: {replicas} x smollm2-135m")

        async def ready() -> bool:
            row = next(line.split() for line in (await headrace(home, "status")).out.splitlines() if "=ready" in line)
            return row[1:4] == [str(replicas), str(replicas), "0"] and len(row) - 4 == replicas

        await eventually(ready, within_s=30)

    await scaled(2)
    await scaled(1)
    assert (await headrace(home, "generate", "still here", "--max-tokens", "2")).status == 0


async def test_a_second_up_is_refused_and_the_first_is_not_disturbed(stack: Up) -> None:
    before = stack.home.stack_file.read_bytes()
    ran = await headrace(stack.home.path, "up", *SIMULATED)
    assert (ran.status, ran.out) == (1, "")
    assert f"(process {stack.process.pid})" in ran.err
    assert "headrace down" in ran.err
    assert ran.err.count("\n") == 1
    assert stack.home.stack_file.read_bytes() == before
    assert (await headrace(stack.home.path, "generate", "hi", "--max-tokens", "2")).status == 0


async def test_a_service_that_dies_comes_back_and_requests_go_on(stack: Up) -> None:
    victim = stack.home.running().processes["router"]
    os.kill(victim, signal.SIGKILL)
    await stack.until("router was started again")
    assert stack.home.running().processes["router"] != victim

    async def works() -> bool:
        return (await headrace(stack.home.path, "generate", "hi", "--max-tokens", "2")).status == 0

    await eventually(works, within_s=20)
    assert "router ended (killed by SIGKILL)" in stack.text


# --- ends ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["SIGINT", "SIGHUP", "down"])
async def test_told_to_stop_it_lets_running_answers_end_and_leaves_nothing(start_up: StartUp, how: str) -> None:
    up = start_up(*SLOW)
    await up.until(IS_UP)
    answer = await Generating.begin(up.home.path, tokens=60)
    if how == "down":
        told = await headrace(up.home.path, "down")
        assert told.status == 0
        assert told.out.startswith("stopped after")
    else:
        up.process.send_signal(signal.Signals[how])
    ran = await answer.ended()
    assert (ran.status, ran.err) == (0, "")
    assert len(ran.out.split()) >= 59, "the first read may have split the first word off"
    assert await up.ended() == 0
    assert up.text.splitlines()[-1].endswith("stopped")
    await up.assert_nothing_left(within_s=0)


async def test_a_second_ctrl_c_cuts_running_answers_off(start_up: StartUp) -> None:
    up = start_up(*SLOW)
    await up.until(IS_UP)
    answer = await Generating.begin(up.home.path, tokens=4000)
    up.process.send_signal(signal.SIGINT)
    await up.until("draining gateway")
    up.process.send_signal(signal.SIGINT)
    assert await up.ended(within_s=10) == 1
    ran = await answer.ended()
    assert ran.status == 1
    assert "UNAVAILABLE" in ran.err
    await up.assert_nothing_left(within_s=0)


async def test_a_killed_launcher_leaves_no_process_and_the_next_up_works_even_beside_a_frozen_engine(
    start_up: StartUp,
) -> None:
    up = start_up(*SIMULATED)
    await up.until(IS_UP)
    family = up.processes()
    modules = {word for p in family for word in p.cmdline() if word.startswith("headrace.")}
    assert modules == {
        f"headrace.{n}" for n in ("telemetry", "controller", "router", "gateway", "engine", "engine.worker")
    }
    assert len(family) == len(modules) + 2, "and etcd and the Redis server"
    engine = next(p for p in family if "headrace.engine" in p.cmdline())
    waits = {engine, *engine.children(), next(p for p in family if "headrace.controller" in p.cmdline())}
    os.kill(engine.pid, signal.SIGSTOP)
    up.process.kill()
    up.process.wait(10)
    # The controller gives its engines 10 s to drain before it kills them.
    await eventually(lambda: {p for p in family if alive(p)} <= waits)
    again = start_up(*SIMULATED)
    await again.until(IS_UP)
    assert "left over from an earlier stack" in again.text
    assert not any(alive(p) for p in family)
    again.process.kill()
    again.process.wait(10)
    await again.assert_nothing_left(within_s=10)


# --- starts that fail ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--model", "/nope.gguf"], "there is no model at /nope.gguf"),
        (["--backend", "quantum"], "backend: must be one of model, simulated"),
        (["--engine", "no_such_setting=1"], "--no-such-setting=1"),
        (["--engine", "kv_cache_memory_bytes=1"], "kv_cache_memory_bytes=1"),
    ],
)
async def test_a_start_that_fails_says_why_in_one_line_and_leaves_nothing(
    start_up: StartUp, args: list[str], said: str
) -> None:
    up = start_up(*SIMULATED, *args)
    assert await up.ended() == 1
    lines = [line for line in up.text.splitlines() if line.startswith("headrace up: ")]
    assert len(lines) == 1
    assert said in lines[0]
    assert up.text.endswith(lines[0] + "\n")
    await up.assert_nothing_left(within_s=0)


async def test_a_taken_port_is_named(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        ran = await headrace(tmp_path / "home", "up", *SIMULATED, "--port", str(port))
    assert (ran.status, ran.out) == (1, "")
    assert ran.err == f"headrace up: --port {port} is taken on 127.0.0.1: choose another or leave it out\n"


async def test_a_data_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ran = await headrace(tmp_path / "file" / "home", "up", *SIMULATED)
    assert (ran.status, ran.out) == (1, "")
    assert ran.err.startswith(f"headrace up: cannot use the data folder {tmp_path}/file/home: Not a directory")
    assert ran.err.count("\n") == 1


async def test_a_disk_that_takes_no_more_is_named_before_anything_is_started(tmp_path: Path) -> None:
    # A limit of 100 kB on each file stands for a full disk, which cannot be had without mounting one.
    process = await asyncio.create_subprocess_exec(
        *("bash", "-c", f"ulimit -f 100; exec {HEADRACE} up"),
        env=environ(tmp_path / "home"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), WITHIN_S)
    assert (process.returncode, out) == (1, b"")
    assert b"set HEADRACE_HOME to a folder with space" in err
    assert err.count(b"\n") == 1


# --- the whole thing, on the real model ----------------------------------------------------------------------------


async def test_the_demo_streams_a_real_answer_tells_where_the_time_went_and_stops(tmp_path: Path) -> None:
    ran = await headrace(tmp_path / "home", "up", "--demo", "--prompt", "Is [bold]this[/x] markup?")
    assert (ran.status, ran.err) == (0, "")
    lines = ran.out.splitlines()
    stages = ["engine is ready", "you  Is [bold]this[/x] markup?", "answer  ", "where the time went", "stopped"]
    found = [next(n for n, line in enumerate(lines) if stage in line) for stage in stages]
    assert found == sorted(found)
    for stage in ("queue", "prefill", "first token (TTFT)", "each later token (ITL)", "total"):
        assert any(line.strip().startswith(stage) for line in lines)
    assert "finish: " in ran.out
    assert not marked(Home(tmp_path / "home").mark)
