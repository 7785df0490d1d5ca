"""TCP ports of this host."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

from headrace.base.errors import StartError

HOST = "127.0.0.1"
_TRIES = 5


def usable_ports(port: int, *, name: str) -> Iterator[int]:
    """`port` if it is free, or for 0 a few free ones, since each may be lost to another process before its use.

    Ends by raising StartError.
    """
    if not 0 <= port <= 65535:
        raise StartError(f"{name} cannot listen on port {port}: use 1 to 65535, or 0 for a free one")
    for _ in range(1 if port else _TRIES):
        chosen = port or free_port()
        if _becomes_free(chosen, within_s=0.5):
            yield chosen
    raise StartError(f"{name} cannot listen on {HOST}:{chosen}: the port is taken")


def free_port() -> int:
    """A port nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def is_taken(port: int) -> bool:
    """Whether a server could not listen on `port` now."""
    with socket.socket() as probe:
        # As servers do: connections of an earlier run in TIME_WAIT must not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return True
        return False


def _becomes_free(port: int, *, within_s: float) -> bool:
    """Wait for `port`: a server killed a moment ago holds it until the kernel has taken the process apart."""
    deadline = time.monotonic() + within_s
    while is_taken(port):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
