"""The process itself: it starts without Redis, ends when asked, and says in one line why it cannot start."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys

COMMAND = [sys.executable, "-m", "headrace.router"]
NO_REDIS = "redis://127.0.0.1:1/0"


def test_it_starts_without_redis_and_ends_cleanly_on_sigterm():
    with subprocess.Popen([*COMMAND, "--redis-url", NO_REDIS], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        events = [json.loads(process.stderr.readline())["event"] for _ in range(2)]
        process.send_signal(signal.SIGTERM)
        _, rest = process.communicate(timeout=20)
    assert events == ["board_read_failed", "server_started"]
    assert process.returncode == 0, rest


def test_a_taken_port_is_one_line_and_a_non_zero_exit():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = subprocess.run(
            [*COMMAND, "--redis-url", NO_REDIS, "--address", address], capture_output=True, text=True, timeout=20
        )
    assert done.returncode == 1
    assert f"headrace router: cannot listen on {address}" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_unusable_redis_url_is_one_line_and_a_non_zero_exit():
    done = subprocess.run([*COMMAND, "--redis-url", "nonsense"], capture_output=True, text=True, timeout=20)
    assert done.returncode == 1
    assert done.stderr.startswith("headrace router: the Redis URL cannot be used")
    assert "Traceback" not in done.stderr
