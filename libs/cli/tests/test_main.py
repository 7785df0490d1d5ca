"""The `headrace` command before it reaches any stack: help that teaches, errors of one line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from headrace.cli.main import INTERRUPTED, READER_GONE, main, plain_errors

COMMANDS = [
    "up",
    "down",
    "status",
    "chat",
    "generate",
    "logs",
    "trace",
    "usage",
    "audit",
    "apply",
    "setup",
    "certs",
    "delete",
    "key",
    "tenant",
    "issuer",
]
SUBCOMMANDS = [
    *(("key", name) for name in ("create", "list", "revoke", "show")),
    *(("tenant", name) for name in ("set", "show", "list", "delete")),
    *(("issuer", name) for name in ("set", "list", "delete")),
]


@pytest.fixture(autouse=True)
def empty_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path))
    for name in ("HEADRACE_GATEWAY", "HEADRACE_API_KEY", "HEADRACE_ETCD_ENDPOINTS", "HEADRACE_LOG_LEVEL"):
        monkeypatch.delenv(name, raising=False)


class Ran:
    """Status and output of one run of the command."""

    def __init__(self, status: int, out: str, err: str) -> None:
        self.status = status
        self.out = out
        self.err = err


Headrace = Callable[..., Ran]


@pytest.fixture
def headrace(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Headrace:
    def run(*args: str) -> Ran:
        monkeypatch.setattr(sys, "argv", ["headrace", *args])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return Ran(int(ended.value.code or 0), out, err)

    return run


def test_help_names_every_command(headrace: Headrace) -> None:
    ran = headrace("--help")
    assert ran.status == 0
    assert all(f" {name} " in ran.out for name in COMMANDS)


@pytest.mark.parametrize("command", [*COMMANDS, *(f"{a} {b}" for a, b in SUBCOMMANDS)])
def test_each_commands_help_says_what_it_does_and_explains_each_option(headrace: Headrace, command: str) -> None:
    ran = headrace(*command.split(), "--help")
    assert ran.status == 0
    assert f"Usage: headrace {command}" in ran.out
    options = [line for line in ran.out.splitlines() if line.startswith("│ ") and "--" in line]
    assert all(len(line.strip("│ ").split()) > 2 for line in options), "an option without a word of explanation"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["fly"], "headrace: No such command 'fly'. (see headrace --help)"),
        (["generate"], "headrace generate: Missing argument 'prompt'. (see headrace generate --help)"),
        (["generate", "x", "--nope"], "headrace generate: No such option: --nope"),
        (["up", "--replicas", "65"], "headrace up: Invalid value for '--replicas'"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(headrace: Headrace, args: list[str], said: str) -> None:
    ran = headrace(*args)
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.startswith(said)
    assert ran.err.count("\n") == 1


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["status"], "no stack is up on"),
        (["down"], "no stack is up on"),
        (["generate", "hi"], "no stack is up on"),
        (["chat"], "no stack is up on"),
        (["trace"], "no stack is up on"),
        (["apply", "--replicas", "2"], "no stack is up on"),
        (["key", "create", "--tenant", "t"], "no stack is up on"),
        (["key", "show"], "cannot read the API key"),
        (["logs", "engine"], "there are: none yet"),
        (["apply", "--engine", "fast"], "is not NAME=VALUE"),
        (["up", "--engine", "=1"], "is not NAME=VALUE"),
        (["up", "--demo", "--replicas", "0"], "--demo needs at least one replica"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_status_1(headrace: Headrace, args: list[str], said: str) -> None:
    ran = headrace(*args)
    assert (ran.status, ran.out) == (1, "")
    assert said in ran.err
    assert ran.err.startswith("headrace ")
    assert ran.err.count("\n") == 1


def test_another_gateway_needs_a_key(headrace: Headrace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_GATEWAY", "127.0.0.1:1")
    assert "set HEADRACE_API_KEY" in headrace("generate", "hi").err
    monkeypatch.setenv("HEADRACE_API_KEY", "hr_x")
    refused = headrace("generate", "hi")
    assert refused.status == 1
    assert "UNAVAILABLE" in refused.err
    assert refused.err.count("\n") == 1


def test_a_prompt_that_is_not_text_is_refused_here(headrace: Headrace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_GATEWAY", "127.0.0.1:1")
    monkeypatch.setenv("HEADRACE_API_KEY", "hr_x")
    assert "not UTF-8 text" in headrace("generate", "bad \udcff").err


def test_a_fault_of_ours_is_one_line_too_unless_debugging(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(typer.Exit) as ended, plain_errors("x"):
        raise RuntimeError("two\nlines")
    assert ended.value.exit_code == 1
    assert capsys.readouterr().err == "headrace x: RuntimeError: two lines (HEADRACE_LOG_LEVEL=debug shows where)\n"
    monkeypatch.setenv("HEADRACE_LOG_LEVEL", "debug")
    with pytest.raises(RuntimeError), plain_errors("x"):
        raise RuntimeError("seen")


@pytest.mark.parametrize(("error", "status"), [(KeyboardInterrupt(), INTERRUPTED), (BrokenPipeError(), READER_GONE)])
def test_interruptions_are_silent_and_have_the_shells_status(
    capsys: pytest.CaptureFixture[str], error: BaseException, status: int
) -> None:
    with pytest.raises(typer.Exit) as ended, plain_errors("x"):
        raise error
    assert ended.value.exit_code == status
    assert capsys.readouterr() == ("", "")
