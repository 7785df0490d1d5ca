"""The answer's way out: one whole body, or server-sent events."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from headrace.gateway.http.errors import Failure
from headrace.gateway.http.spelling import Json

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

REQUEST_ID = "x-request-id"
_DONE = b"data: [DONE]\n\n"
# A proxy that collects events would turn the stream into one late answer.
_STREAM_HEADERS = (("content-type", "text/event-stream; charset=utf-8"), ("cache-control", "no-cache"))
_UNBUFFERED = ("x-accel-buffering", "no")
# JSON allows these bare, but some readers of events take them for ends of lines.
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))  # json.dumps would make one per chunk
_LINE_ENDS = str.maketrans({"\u0085": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"})


class Reply:
    """What one request is answered with, sent once; each send waits while the client's connection is full."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self._request_id = request_id
        self.outcome = 0
        """The status that was sent, or that of what broke a stream off; 0 before."""

    async def json(self, status: int, content: Json) -> None:
        """One whole JSON body."""
        await self._whole(status, encoded(content), ())

    async def fail(self, failure: Failure) -> None:
        """A refusal instead of an answer; in a stream that has begun, its last event, without `[DONE]` after it."""
        if self.outcome:
            self.outcome = failure.status
            await self._send(_body(b"data: " + failure.body + b"\n\n", more=False))
        else:
            await self._whole(failure.status, failure.body, failure.headers)

    async def begin(self) -> None:
        """The headers of a stream."""
        await self._start(200, (*_STREAM_HEADERS, _UNBUFFERED))

    async def events(self, chunks: Iterable[Json]) -> None:
        """Events of a stream, in one write."""
        data = b"".join(b"data: " + encoded(chunk) + b"\n\n" for chunk in chunks)
        if data:
            await self._send(_body(data, more=True))

    async def done(self) -> None:
        """The end of a stream that is complete."""
        await self._send(_body(_DONE, more=False))

    async def _whole(self, status: int, body: bytes, headers: Iterable[tuple[str, str]]) -> None:
        fixed = (("content-type", "application/json"), ("content-length", str(len(body))))
        await self._start(status, (*fixed, *headers))
        await self._send(_body(body, more=False))

    async def _start(self, status: int, headers: Iterable[tuple[str, str]]) -> None:
        self.outcome = status
        named = [(name.encode(), value.encode()) for name, value in ((REQUEST_ID, self._request_id), *headers)]
        await self._send({"type": "http.response.start", "status": status, "headers": named})


def encoded(content: Json) -> bytes:
    """One line of JSON."""
    text = _ENCODER.encode(content)
    return (text if text.isascii() else text.translate(_LINE_ENDS)).encode(errors="backslashreplace")


def _body(data: bytes, *, more: bool) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}
