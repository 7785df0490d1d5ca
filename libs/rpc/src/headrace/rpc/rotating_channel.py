"""A gRPC channel that takes new certificates over: new calls go over a new channel once the files have changed.

A grpc.aio channel is bound to the credentials it was made with (grpc #41779), and the stubs of the fleet are made once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import grpc
import structlog

from headrace.base.channel import Options
from headrace.base.tls import TlsPem, TlsSettings, tls_files
from headrace.rpc.tls import channel_credentials, channel_name_options

log = structlog.get_logger(__name__)

LOOK_PERIOD_S = 1.0
"""How often, at most, the files are looked at: calls are made up to thousands of times a second."""

RETIRED_PERIOD_S = 1.0
"""How often a former channel is asked whether its calls have ended."""


class RotatingChannel(grpc.aio.Channel):
    """Behaves like a secure channel to `address`; running calls end on the channel on which they began."""

    def __init__(self, address: str, settings: TlsSettings, options: Options) -> None:
        self._address = address
        self._settings = settings
        self._options = [*options, *channel_name_options(settings)]
        self._files = tls_files(settings)
        self._newest: _Generation | None = _Generation(self._make(self._files.current()), self._files.current())
        self._retired: set[asyncio.Task[None]] = set()
        self._looked_at = time.monotonic()

    def _make(self, pem: TlsPem) -> grpc.aio.Channel:
        credentials = channel_credentials(self._settings, pem)
        return grpc.aio.secure_channel(self._address, credentials, options=self._options)

    def current(self) -> _Generation:
        """The channel for the next call."""
        if self._newest is None:
            raise grpc.aio.UsageError("the channel is closed")
        now = time.monotonic()
        if now - self._looked_at >= LOOK_PERIOD_S:
            self._looked_at = now
            pem = self._files.current()
            if pem is not self._newest.pem:
                log.info("tls_channel_renewed", address=self._address)
                retired = asyncio.get_running_loop().create_task(_close_when_idle(self._newest))
                self._retired.add(retired)
                retired.add_done_callback(self._retired.discard)
                self._newest = _Generation(self._make(pem), pem)
        return self._newest

    async def close(self, grace: float | None = None) -> None:
        """Close all of them; running calls are cancelled after the grace.

        Nothing of them is kept: a TLS channel that lives until the interpreter ends makes that end 2 s late (measured).
        """
        newest, self._newest = self._newest, None
        if newest is None:
            return
        retired = list(self._retired)
        for task in retired:
            task.cancel()
        await asyncio.gather(newest.channel.close(grace), *retired, return_exceptions=True)
        newest.methods.clear()

    async def __aenter__(self) -> RotatingChannel:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """That of the channel for the next call."""
        return self.current().channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """On the channel for the next call."""
        await self.current().channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """Wait until the channel for the next call is connected."""
        await self.current().channel.channel_ready()

    def unary_unary(self, *method: Any, **options: Any) -> Any:
        """A method to call."""
        return _Method(self, lambda channel: channel.unary_unary(*method, **options))

    def unary_stream(self, *method: Any, **options: Any) -> Any:
        """A method to call."""
        return _Method(self, lambda channel: channel.unary_stream(*method, **options))

    def stream_unary(self, *method: Any, **options: Any) -> Any:
        """A method to call."""
        return _Method(self, lambda channel: channel.stream_unary(*method, **options))

    def stream_stream(self, *method: Any, **options: Any) -> Any:
        """A method to call."""
        return _Method(self, lambda channel: channel.stream_stream(*method, **options))


class _Generation:
    """One channel, the files' content it was made with, and its running calls.

    A call's own done callback would tie it into a cycle, thousands of them a second for the garbage collector. So calls
    are known by weak references.
    """

    __slots__ = ("calls", "channel", "methods", "pem")

    def __init__(self, channel: grpc.aio.Channel, pem: TlsPem) -> None:
        self.channel = channel
        self.pem = pem
        self.calls: WeakSet[Any] = WeakSet()
        self.methods: WeakKeyDictionary[_Method, Callable[..., Any]] = WeakKeyDictionary()


async def _close_when_idle(generation: _Generation) -> None:
    try:
        while not all(call.done() for call in generation.calls):
            await asyncio.sleep(RETIRED_PERIOD_S)
    finally:
        await generation.channel.close()


class _Method:
    """A method on whichever channel is the newest when it is called."""

    def __init__(self, owner: RotatingChannel, bind: Callable[[grpc.aio.Channel], Callable[..., Any]]) -> None:
        self._owner = owner
        self._bind = bind

    def __call__(self, *args: Any, **options: Any) -> Any:
        generation = self._owner.current()
        method = generation.methods.get(self)
        if method is None:
            method = generation.methods[self] = self._bind(generation.channel)
        call = method(*args, **options)
        generation.calls.add(call)
        return call
