"""What every embedded server has: a process that is looked at and ended in the same way."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from headrace.coord.embedded.child import Child


class EmbeddedServer:
    """A running server process; a context manager that ends it."""

    def __init__(self, child: Child) -> None:
        self._child = child

    @property
    def pid(self) -> int:
        """Process id."""
        return self._child.pid

    @property
    def running(self) -> bool:
        """Whether the process is there."""
        return self._child.exit_code is None

    def stop(self, *, grace_s: float = 3.0) -> None:
        """End it; returns when it is gone. Harmless when it already is."""
        self._child.stop(grace_s=grace_s)

    def kill(self) -> None:
        """End it without warning, as a crash would; returns when it is gone."""
        self._child.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
