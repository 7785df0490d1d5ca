"""A request's way in: its call context, and its body within a size and a time."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from headrace.base.deadline import Deadline
from headrace.base.errors import InvalidRequest
from headrace.gateway.http.errors import HttpError
from headrace.gateway.http.reply import REQUEST_ID
from headrace.rpc.context import CallContext
from headrace.rpc.ids import is_request_id, new_request_id

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

TIMEOUT = "x-request-timeout"
"""Seconds that the client gives the whole request; without it the gateway's default deadline holds."""
_LONGEST_S = 86400.0


class Disconnected(Exception):
    """The client went away; there is nobody to answer."""


def headers_of(scope: Scope) -> dict[str, str]:
    """Headers by lower-case name, as gRPC's metadata are; of a repeated one the last."""
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}


def request_id_of(headers: Mapping[str, str]) -> str:
    """The client's own id when it is well-formed, else a new one."""
    given = headers.get(REQUEST_ID, "")
    return given if is_request_id(given) else new_request_id()


def call_of(scope: Scope, headers: Mapping[str, str], request_id: str, default_deadline_s: float) -> CallContext:
    """What admission knows about the request, whose span is the current one."""
    host, port = scope.get("client") or ("", 0)
    return CallContext(
        request_id=request_id,
        deadline=Deadline.after(_time_given_s(headers, default_deadline_s)),
        peer=f"http:{host}:{port}",
        metadata=headers,
    )


async def body_of(receive: Receive, headers: Mapping[str, str], *, most: int, within_s: float) -> bytes:
    """The whole body; HttpError when it is too large or too slow, Disconnected when the client leaves."""
    declared = headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > most:
        raise _too_large(most)
    body = bytearray()
    try:
        async with asyncio.timeout(within_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Disconnected
                body += message.get("body", b"")
                if len(body) > most:
                    raise _too_large(most)
                if not message.get("more_body"):
                    return bytes(body)
    except TimeoutError:
        raise HttpError(
            408,
            f"the request's body did not arrive within {within_s:g} s",
            reason="BODY_TIMEOUT",
            headers={"connection": "close"},
        ) from None


async def until_gone(receive: Receive) -> None:
    """Wait until the client has left, once the body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _time_given_s(headers: Mapping[str, str], default_s: float) -> float:
    given = headers.get(TIMEOUT, "")
    if not given:
        return default_s
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= _LONGEST_S:
        raise InvalidRequest(TIMEOUT, f"must be a number of seconds, above 0 and at most {_LONGEST_S:.0f}")
    return seconds


def _too_large(most: int) -> HttpError:
    return HttpError(413, f"the request's body is larger than {most} bytes", reason="REQUEST_TOO_LARGE")
