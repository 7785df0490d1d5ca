"""A service that cannot start says why in one line on stderr, and exits with 1."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ENVIRON = {
    "HEADRACE_LOG_LEVEL": "error",
    "HEADRACE_REDIS_URL": "redis://127.0.0.1:9/0",
    "HEADRACE_ETCD_ENDPOINTS": "127.0.0.1:9",
    "HEADRACE_ENGINE_BACKEND": "simulated",
}


@pytest.fixture
def taken() -> Iterator[str]:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        yield f"127.0.0.1:{holder.getsockname()[1]}"


def refusal(tmp_path: Path, service: str, *arguments: str) -> str:
    data_dir = {f"HEADRACE_{s}_DATA_DIR": str(tmp_path / s.lower()) for s in ("TELEMETRY", "CONTROLLER")}
    ended = subprocess.run(
        [sys.executable, "-m", f"headrace.{service}", *arguments],
        env=os.environ | ENVIRON | data_dir,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert ended.returncode == 1, ended.stderr
    assert ended.stderr.startswith(f"headrace {service}: "), ended.stderr
    assert ended.stderr.count("\n") == 1, ended.stderr
    return ended.stderr


@pytest.mark.parametrize("service", ["gateway", "router", "engine", "controller", "telemetry"])
def test_a_taken_port(tmp_path: Path, taken: str, service: str) -> None:
    assert taken in refusal(tmp_path, service, "--address", taken)
    assert taken in refusal(tmp_path, service, "--metrics-address", taken)


def test_a_missing_model(tmp_path: Path) -> None:
    assert "/no/such/model.gguf" in refusal(tmp_path, "engine", "--model", "/no/such/model.gguf")
    assert "/no/such/model.gguf" in refusal(tmp_path, "engine", "--backend", "model", "--model", "/no/such/model.gguf")


def test_a_data_folder_that_cannot_be(tmp_path: Path) -> None:
    for service in ("controller", "telemetry"):
        assert "/proc/nowhere" in refusal(tmp_path, service, "--data-dir", "/proc/nowhere")


def test_a_setting_out_of_range(tmp_path: Path) -> None:
    assert "--max-num-seqs=0" in refusal(tmp_path, "engine", "--max-num-seqs", "0")
    assert "--freshness-s=soon" in refusal(tmp_path, "router", "--freshness-s", "soon").replace("'", "")
