"""Streams answers and notes when each token arrives, with as little work of its own as can be: it shares the cores."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Heard:
    """One answer: when it was asked for, and when each token came; seconds of `time.perf_counter`."""

    asked_at: float
    token_ids: list[int] = field(default_factory=list)
    arrived_at: list[float] = field(default_factory=list)

    def note(self, token_ids: Sequence[int]) -> None:
        """Tokens that came together count as arrived together."""
        now = time.perf_counter()
        self.token_ids.extend(token_ids)
        self.arrived_at.extend([now] * len(token_ids))

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.arrived_at[0] - self.asked_at

    @property
    def gaps_s(self) -> list[float]:
        """Times from each token to the next."""
        return [later - earlier for earlier, later in zip(self.arrived_at, self.arrived_at[1:], strict=False)]


async def post_stream(port: int, path: str, body: dict[str, Any]) -> AsyncIterator[Any]:
    """Each server-sent event's JSON, of one HTTP/1.1 request on a connection of its own."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    try:
        payload = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(payload)}\r\n"
        )
        writer.write(head.encode() + b"Connection: close\r\n\r\n" + payload)
        status = await reader.readline()
        chunked = False
        while (line := await reader.readline()).strip():
            chunked = chunked or line.lower().startswith(b"transfer-encoding: chunked")
        if b" 200 " not in status:
            raise RuntimeError(f"{status!r}: {(await reader.read(2000))!r}")
        pending = b""
        async for piece in _pieces(reader, chunked):
            pending += piece
            while b"\n\n" in pending:
                event, pending = pending.split(b"\n\n", 1)
                text = event.removeprefix(b"data: ").strip()
                if text and text != b"[DONE]":
                    yield json.loads(text)
    finally:
        writer.close()


async def _pieces(reader: asyncio.StreamReader, chunked: bool) -> AsyncIterator[bytes]:
    if not chunked:
        while piece := await reader.read(65536):
            yield piece
        return
    while size := int((await reader.readline()).strip() or b"0", 16):
        yield await reader.readexactly(size)
        await reader.readline()
