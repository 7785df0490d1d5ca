"""The worker's end of the socket: blocking sends, and receives that wait only as long as the loop says."""

from __future__ import annotations

import math
import select
import socket

from headrace.engine.worker.messages import Command, FrameBuffer, Report, encode

_RECEIVE_BYTES = 1 << 20
_LONGEST_POLL_S = 3600.0  # poll takes its milliseconds in 31 bits


class ShellGone(Exception):
    """The shell closed its end or died."""


class Connection:
    """Messages to and from the shell. Every method raises ShellGone once the shell's end is closed."""

    def __init__(self, shell: socket.socket) -> None:
        self._socket = shell
        self._poll = select.poll()
        self._poll.register(shell, select.POLLIN)
        self._frames = FrameBuffer()

    def send(self, report: Report) -> None:
        """Send now; blocks while the shell does not read, which is how a slow shell holds the worker back."""
        try:
            self._socket.sendall(encode(report))
        except (BrokenPipeError, ConnectionResetError):
            raise ShellGone from None

    def receive(self, wait_s: float) -> list[Command]:
        """Every command that has arrived; waits up to `wait_s` (may be infinite) for the first one."""
        if not wait_s and not self._poll.poll(0):  # between two steps
            return []
        wait_ms = None if math.isinf(wait_s) else math.ceil(min(max(wait_s, 0.0), _LONGEST_POLL_S) * 1000)
        commands: list[Command] = []
        while not commands and self._poll.poll(wait_ms):
            commands = self._read()
        return commands

    def _read(self) -> list[Command]:
        try:
            data = self._socket.recv(_RECEIVE_BYTES)
        except ConnectionResetError:
            raise ShellGone from None
        if not data:
            raise ShellGone
        return self._frames.feed(data)  # type: ignore[return-value]  # the shell sends commands only
