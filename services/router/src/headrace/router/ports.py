"""What the router needs from outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from headrace.coord.redis.replica_board import Board

Clock = Callable[[], float]
"""Local monotonic seconds."""


class BoardReader(Protocol):
    """Where heartbeats are read."""

    async def read(self) -> Board:
        """All records and the server's time, in one go; HeadraceError when that fails."""
        ...
