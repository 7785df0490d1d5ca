"""Calls to etcd's members: which member, by when, and what their failures mean to us."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Generic, TypeVar

import grpc
from google.protobuf.message import Message

from headrace.base.channel import Keepalive, Options, channel_options
from headrace.base.deadline import Deadline
from headrace.base.errors import DeadlinePassed, HeadraceError, InternalError, NotFound, StartError, Unavailable
from headrace.base.tls import TlsSettings, tls_files

Response = TypeVar("Response", bound=Message)

# etcd answers pings that come more often than every 5 s with GOAWAY too_many_pings.
_KEEPALIVE = Keepalive(time_s=6.0, timeout_s=2.0)
# A member cut off from the others would keep a watch open and silent; with this it ends the stream.
_WITH_LEADER = (("hasleader", "true"),)


class Stream(Generic[Response]):
    """A bidirectional call; both methods raise our errors. `Members.stream` opens and cancels it."""

    def __init__(self, call: grpc.aio.StreamStreamCall[Any, Response], response: type[Response]) -> None:
        self._call = call
        self._response = response

    async def write(self, request: Message) -> None:
        """Send one message."""
        with rpc_errors():
            try:
                await self._call.write(request)
            except asyncio.InvalidStateError:  # grpc's way to say that the call has failed already
                await self._call.read()
                raise _ended() from None

    async def read(self) -> Response:
        """The next message; Unavailable when etcd ends the call."""
        with rpc_errors():
            answer = await self._call.read()
        if isinstance(answer, self._response):
            return answer
        raise _ended()


class _Member:
    """One member's channel; one with https is made anew when the files that it was made of have changed.

    Calls that run then end on the channel on which they began, unless it changes once more: watches begin again by
    themselves.
    """

    def __init__(self, endpoint: str) -> None:
        self._address = endpoint.removeprefix("https://").removeprefix("http://").rstrip("/")
        self._files = tls_files(TlsSettings.etcd_from_environ()) if endpoint.startswith("https://") else None
        self._pem = self._files.current() if self._files else None
        self._channel: grpc.aio.Channel | None = self._made()
        self._former: grpc.aio.Channel | None = None

    async def channel(self) -> grpc.aio.Channel:
        """For the next call."""
        if self._channel is None:
            raise grpc.aio.UsageError("the client of etcd is closed")
        if self._files is not None and self._files.current() is not self._pem:
            self._pem = self._files.current()
            outlived, self._former, self._channel = self._former, self._channel, self._made()
            if outlived is not None:
                await outlived.close()
        return self._channel

    async def close(self) -> None:
        """Close what is open, and keep nothing of it: beside TLS a channel left to the interpreter's end, plain ones
        too, makes that end 2 s late (measured)."""
        open_ones = [channel for channel in (self._channel, self._former) if channel is not None]
        self._channel = self._former = None
        for channel in open_ones:
            await channel.close()

    def _made(self) -> grpc.aio.Channel:
        if self._files is None or self._pem is None:
            return grpc.aio.insecure_channel(self._address, options=_options())
        settings, pem = self._files.settings, self._pem
        shown = {"private_key": pem.key, "certificate_chain": pem.cert} if settings.cert_file else {}
        credentials = grpc.ssl_channel_credentials(root_certificates=pem.ca or None, **shown)
        name = [("grpc.ssl_target_name_override", settings.server_name)] if settings.server_name else []
        return grpc.aio.secure_channel(self._address, credentials, options=[*_options(), *name])


class Members:
    """Channels to etcd's members, of which one is used until it fails. Made and closed inside the running loop."""

    def __init__(self, endpoints: Sequence[str]) -> None:
        if not endpoints:
            raise StartError("etcd needs at least one endpoint (host:port, or https://host:port)")
        # A channel for each, rather than one with a list, which gRPC takes of addresses only, not of host names.
        self._members = [_Member(endpoint) for endpoint in endpoints]
        self._current = 0

    async def unary(
        self, method: str, request: Message, response: type[Response], *, timeout_s: float, tries: int = 1
    ) -> Response:
        """Call `/etcdserverpb.<method>`; with `tries` above 1 (reads only) on as many members."""
        deadline = Deadline.after(timeout_s)
        for left in range(min(tries, len(self._members)) - 1, -1, -1):
            try:
                async with self._member() as channel:
                    call = channel.unary_unary(
                        f"/etcdserverpb.{method}",
                        request_serializer=_serialize,
                        response_deserializer=response.FromString,
                    )
                    return await call(request, timeout=deadline.timeout_s())
            except Unavailable:
                if not left:
                    raise
        raise AssertionError("the last try returns or raises")

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self._members)

    @asynccontextmanager
    async def stream(
        self, method: str, response: type[Response], *, deadline: Deadline
    ) -> AsyncIterator[Stream[Response]]:
        """Open `/etcdserverpb.<method>`; leaving the block cancels it."""
        async with self._member() as channel:
            call = channel.stream_stream(
                f"/etcdserverpb.{method}", request_serializer=_serialize, response_deserializer=response.FromString
            )(timeout=deadline.timeout_s(), metadata=_WITH_LEADER)
            try:
                yield Stream(call, response)
            finally:
                call.cancel()

    async def close(self) -> None:
        """Close the channels; running calls are cancelled."""
        for member in self._members:
            await member.close()

    @asynccontextmanager
    async def _member(self) -> AsyncIterator[grpc.aio.Channel]:
        """The member in use; when the block fails for its sake, the next one is from then on."""
        used = self._current
        try:
            with rpc_errors():
                yield await self._members[used].channel()
        except (Unavailable, DeadlinePassed):
            if self._current == used:
                self._current = (used + 1) % len(self._members)
            raise


@contextmanager
def rpc_errors() -> Iterator[None]:
    """Turn gRPC's errors into ours."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise _mapped(error) from error


def _mapped(error: grpc.aio.AioRpcError) -> HeadraceError:
    said = f"etcd: {error.details()}"
    match error.code():
        case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.RESOURCE_EXHAUSTED:
            return Unavailable(said, reason="ETCD_UNAVAILABLE", retry_after_s=1.0)
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlinePassed(said)
        case grpc.StatusCode.NOT_FOUND:
            return NotFound(said)
        case code:
            return InternalError(f"{said} ({code.name})")


def _ended() -> Unavailable:
    return Unavailable("etcd ended the stream", reason="ETCD_UNAVAILABLE", retry_after_s=1.0)


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()


def _options() -> Options:
    without_calls = "grpc.keepalive_permit_without_calls"
    options = [(name, value) for name, value in channel_options(_KEEPALIVE) if name != without_calls]
    # On a connection without calls etcd counts every ping as one too many.
    return [*options, (without_calls, 0)]
