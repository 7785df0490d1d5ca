import json
import logging
import os
import subprocess
import sys
import warnings

import pytest
import structlog
from opentelemetry.sdk.trace import TracerProvider

from headrace.observe.log import configure_logging, get_logger

KEY = "hr_" + "aZ0-_" * 8 + "xyz"


@pytest.fixture
def lines(monkeypatch, capsys):
    """Configure logging as a service does; calling the fixture's value gives the lines written since."""
    monkeypatch.setenv("HEADRACE_LOG_LEVEL", "info")
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    with warnings.catch_warnings():
        configure_logging("router")
        yield lambda: [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    logging.captureWarnings(False)
    root.handlers[:], root.level = handlers, level
    structlog.reset_defaults()


def test_a_line_is_json_that_names_time_level_event_service_and_module(lines):
    get_logger("headrace.router.app").info("replica_ejected", replica="e1", failures=3)
    [line] = lines()
    assert line.pop("ts").endswith("Z")
    assert line == {
        "level": "info",
        "event": "replica_ejected",
        "service": "router",
        "logger": "headrace.router.app",
        "replica": "e1",
        "failures": 3,
    }


def test_a_line_inside_a_span_carries_its_ids_and_one_outside_does_not(lines):
    tracer = TracerProvider(shutdown_on_exit=False).get_tracer("test")
    with tracer.start_as_current_span("call") as span:
        get_logger("x").info("inside")
    get_logger("x").info("outside")
    inside, outside = lines()
    assert inside["trace_id"] == f"{span.get_span_context().trace_id:032x}"
    assert inside["span_id"] == f"{span.get_span_context().span_id:016x}"
    assert "trace_id" not in outside


def test_levels_below_the_configured_one_are_not_written(lines):
    get_logger("x").debug("noise")
    logging.getLogger("y").debug("noise")
    assert lines() == []


def test_an_exception_is_one_line_with_its_traceback(lines):
    try:
        raise OSError("disk gone")
    except OSError:
        get_logger("x").exception("write_failed")
    [line] = lines()
    assert line["level"] == "error"
    assert "OSError: disk gone" in line["exception"]


def test_standard_library_records_and_warnings_come_out_as_the_same_json(lines):
    logging.getLogger("grpc._cython").warning("connection to %s lost", "e1")
    logging.getLogger("odd").log(25, "between info and warning")
    try:
        raise ValueError("bad")
    except ValueError:
        logging.getLogger("asyncio").exception("task failed")
    warnings.simplefilter("default")
    warnings.warn("old way", UserWarning, stacklevel=1)
    first, odd, failed, warned = lines()
    assert (first["event"], first["logger"], first["service"]) == ("connection to e1 lost", "grpc._cython", "router")
    assert odd["level"] == "info"
    assert "ValueError: bad" in failed["exception"]
    assert "UserWarning: old way" in warned["event"]


def test_a_record_with_a_wrong_format_never_raises_at_the_caller(lines, monkeypatch):
    monkeypatch.setattr(logging, "raiseExceptions", False)
    logging.getLogger("third.party").warning("%d items", "many")
    assert lines() == []


@pytest.mark.parametrize(
    "fields",
    [
        {"key": KEY},
        {"detail": f"unknown key {KEY}, refused"},
        {"detail": f"first line\n{KEY}"},
        {"headers": {"nested": [("x-api-key", KEY)]}},
        {"raw": KEY.encode()},
        {"authorization": "opaque-" + KEY[3:]},
        {"detail": "Bearer " + KEY[3:]},
        {"url": f"redis://:{KEY[3:]}@127.0.0.1:6379/0"},
        {"url": f"rediss://user:{KEY[3:]}@cache:6379/0"},
        {"url": f'redis://:p@"\\é{KEY[3:]}@cache:6379/0'},
        {"api_key": KEY[3:]},
        {"prompt": KEY[3:]},
    ],
)
def test_keys_passwords_and_prompts_never_reach_a_line(lines, capsys, fields):
    get_logger("x").info("request_refused", **fields)
    logging.getLogger("y").info("refused %r", {k: v for k, v in fields.items() if len(KEY) <= len(repr(v))})
    written = capsys.readouterr().err.splitlines()
    assert KEY[3:] not in written[0]
    assert "***" in written[0]
    assert json.loads(written[0])["event"] == "request_refused"


def test_an_exception_text_with_a_secret_is_blanked_too(lines, capsys):
    try:
        raise ConnectionError(f"cannot reach redis://:{KEY[3:]}@cache:6379 with {KEY}")
    except ConnectionError:
        logging.getLogger("redis").exception("lost")
    assert KEY[3:] not in capsys.readouterr().err


def test_an_ordinary_url_is_left_alone(lines):
    get_logger("x").info("started", url="http://127.0.0.1:9090/metrics", other="redis://cache:6379/0")
    [line] = lines()
    assert line["url"] == "http://127.0.0.1:9090/metrics"
    assert line["other"] == "redis://cache:6379/0"


def test_a_value_json_does_not_know_is_written_as_text(lines):
    get_logger("x").info("seen", value={1, 2}, kind=OSError)
    [line] = lines()
    assert line["value"] == "{1, 2}"


def run(code: str, **streams) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "HEADRACE_LOG_LEVEL": "loud" if "loud" in code else "info"}
    return subprocess.run([sys.executable, "-c", code], env=environ, text=True, timeout=60, check=False, **streams)


def test_a_stderr_that_nobody_reads_any_more_does_not_fail_the_work():
    read, write = os.pipe()
    os.close(read)
    code = (
        "from headrace.observe.log import *; configure_logging('x'); get_logger('y').info('lost')\n"
        "print('worked', flush=True); import os; os._exit(0)"
    )
    try:
        assert run(code, stdout=subprocess.PIPE, stderr=write).stdout == "worked\n"
    finally:
        os.close(write)


def test_an_unknown_level_ends_the_process_with_one_line_that_names_the_known_ones():
    done = run("from headrace.observe.log import *; configure_logging('loud')", capture_output=True)
    assert done.returncode == 1
    assert done.stderr == "HEADRACE_LOG_LEVEL='loud': use one of debug, info, warning, error, critical\n"
