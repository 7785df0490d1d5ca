from __future__ import annotations

from pathlib import Path

import pytest

from headrace.controller.adapters.exit_text import describe_exit, last_line


@pytest.mark.parametrize(
    ("status", "line", "text"),
    [
        (1, "no such file", "exit code 1: no such file"),
        (0, "", "exit code 0"),
        (-9, "engine_ready", "killed by SIGKILL"),
        (-11, "Fatal Python error", "killed by SIGSEGV: Fatal Python error"),
        (-64, "", "killed by SIGRTMAX"),
        (-99, "", "killed by signal 99"),
        (None, "bye", "an exit nobody watched: bye"),
    ],
)
def test_an_exit_is_one_line_for_people(status: int | None, line: str, text: str) -> None:
    assert describe_exit(status, line) == text


def test_the_last_line_is_of_this_start_and_not_of_the_one_before(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_text("old end\n")
    offset = log.stat().st_size
    assert last_line(log, offset) == ""
    with log.open("a") as file:
        file.write("new start\nnew end\n\n")
    assert last_line(log, offset) == "new end"


def test_a_json_log_line_is_cut_down_to_what_it_says(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_text('{"ts": "2026", "event": "service_failed", "error": "no disk"}\n')
    assert last_line(log, 0) == "service_failed: no disk"
    log.write_text('{"not": "ours"}\n')
    assert last_line(log, 0) == '{"not": "ours"}'


def test_a_missing_log_and_a_huge_line_do_no_harm(tmp_path: Path) -> None:
    assert last_line(tmp_path / "none.log", 0) == ""
    log = tmp_path / "engine.log"
    log.write_text("x" * 100_000)
    assert len(last_line(log, 0)) == 300
