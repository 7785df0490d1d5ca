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


class Members:
    """Channels to etcd's members, of which one is used until it fails. Made and closed inside the running loop."""

    def __init__(self, endpoints: Sequence[str]) -> None:
        if not endpoints:
            raise StartError("etcd needs at least one endpoint (host:port)")
        # A channel for each, rather than one with a list, which gRPC takes of addresses only, not of host names.
        self._channels = [grpc.aio.insecure_channel(endpoint, options=_options()) for endpoint in endpoints]
        self._current = 0

    async def unary(
        self, method: str, request: Message, response: type[Response], *, timeout_s: float, tries: int = 1
    ) -> Response:
        """Call `/etcdserverpb.<method>`; with `tries` above 1 (reads only) on as many members."""
        deadline = Deadline.after(timeout_s)
        for left in range(min(tries, len(self._channels)) - 1, -1, -1):
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
        return len(self._channels)

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
        for channel in self._channels:
            await channel.close()

    @asynccontextmanager
    async def _member(self) -> AsyncIterator[grpc.aio.Channel]:
        """The member in use; when the block fails for its sake, the next one is from then on."""
        used = self._current
        try:
            with rpc_errors():
                yield self._channels[used]
        except (Unavailable, DeadlinePassed):
            if self._current == used:
                self._current = (used + 1) % len(self._channels)
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
