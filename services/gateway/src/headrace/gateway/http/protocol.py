"""uvicorn's HTTP/1.1 protocol, with a bound on how large and how slow the head of a request may be."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_BYTES = 64 << 10
HEAD_WITHIN_S = 20.0


class BoundedHeadProtocol(HttpToolsProtocol):
    """httptools collects a head of any size for any time; here a connection that goes on like that is closed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_bytes: int | None = 0  # None: the head is complete, a body follows
        self._head_began = False
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        """Give the first head its time."""
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Let go of the timer."""
        self._stop_timer()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """A head begins."""
        super().on_message_begin()
        self._head_began = True
        self._expect_head()

    def on_headers_complete(self) -> None:
        """The head is there."""
        self._head_bytes = None
        self._stop_timer()
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        """Count what belongs to an unfinished head; a body has its own limit."""
        before, self._head_began = self._head_bytes or 0, False
        super().data_received(data)
        if self._head_bytes is None:
            return
        self._head_bytes = len(data) if self._head_began else before + len(data)
        if self._head_bytes > HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"The head of a request may have {HEAD_BYTES} bytes.")

    def _expect_head(self) -> None:
        self._head_bytes = 0
        self._stop_timer()
        self._head_timer = self.loop.call_later(HEAD_WITHIN_S, self._head_is_late)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()
