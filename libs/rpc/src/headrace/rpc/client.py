"""One client for every peer: a deadline on each call, errors in our words, streams that cancel on exit.

The trace and the request id of the call being served go along with every call made for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import grpc
from grpc.aio import EOF, AioRpcError
from grpc_health.v1 import health_pb2, health_pb2_grpc
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from headrace.base.channel import Keepalive, channel_options
from headrace.base.deadline import Deadline
from headrace.base.errors import DeadlinePassed, HeadraceError
from headrace.base.tls import TlsSettings
from headrace.rpc.context import REQUEST_ID, current_call
from headrace.rpc.rotating_channel import RotatingChannel
from headrace.rpc.status import TRANSPORT, from_rpc_error
from headrace.rpc.tls import explained

R = TypeVar("R")
_PROPAGATOR = TraceContextTextMapPropagator()


class Peer:
    """One channel to one address, kept for the process's life; build it inside the running loop."""

    def __init__(
        self,
        address: str,
        *,
        keepalive: Keepalive | None = None,
        max_message_bytes: int = 16 << 20,
        tls: TlsSettings | None = None,
    ) -> None:
        """`tls` None: as the environment says of calls between services; StartError when its files are no good."""
        self.address = address
        self._tls = TlsSettings.from_environ() if tls is None else tls
        options = channel_options(keepalive or Keepalive(), max_message_bytes=max_message_bytes)
        self.channel: grpc.aio.Channel = (
            RotatingChannel(address, self._tls, options)
            if self._tls.calls
            else grpc.aio.insecure_channel(address, options=options)
        )

    async def unary(
        self, method: Callable[..., Any], request: Any, *, deadline: Deadline, metadata: Mapping[str, str] | None = None
    ) -> Any:
        """Call `method` (a stub's attribute); raises the peer's error from the `headrace.base.errors` tree."""
        if deadline.remaining_s() <= 0:
            raise DeadlinePassed(f"the deadline passed before {self.address} was called")
        try:
            return await method(request, timeout=deadline.timeout_s(), metadata=_outgoing(metadata))
        except AioRpcError as error:
            raise _domain_error(error, self._tls) from None

    @asynccontextmanager
    async def stream(
        self, method: Callable[..., Any], request: Any, *, deadline: Deadline, metadata: Mapping[str, str] | None = None
    ) -> AsyncIterator[AsyncIterator[Any]]:
        """Open a stream; `request` is a message or an async iterator of them. Leaving the block cancels the call.

        An abandoned aio call is never cancelled by garbage collection (grpc #43462), hence the block.
        """
        if deadline.remaining_s() <= 0:
            raise DeadlinePassed(f"the deadline passed before {self.address} was called")
        call = method(request, timeout=deadline.timeout_s(), metadata=_outgoing(metadata))
        try:
            yield _messages(call, self._tls)
        finally:
            call.cancel()

    async def healthy(self, full_name: str = "", *, deadline: Deadline) -> bool:
        """Whether the peer answers SERVING for a service; False when it cannot be reached."""
        stub: Any = health_pb2_grpc.HealthStub(self.channel)
        try:
            answer = await self.unary(stub.Check, health_pb2.HealthCheckRequest(service=full_name), deadline=deadline)
        except HeadraceError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def close(self) -> None:
        """Close the channel; running calls are cancelled."""
        await self.channel.close()

    async def __aenter__(self) -> Peer:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


async def _messages(call: Any, tls: TlsSettings) -> AsyncIterator[Any]:
    try:
        # Iterating over the call itself would put another generator around this one, for each message.
        while (message := await call.read()) is not EOF:
            yield message
    except AioRpcError as error:
        raise _domain_error(error, tls) from None
    except asyncio.CancelledError:
        # The call itself was cancelled (channel closed): aio raises CancelledError into a task nobody cancelled.
        task = asyncio.current_task()
        if task is not None and task.cancelling() == 0 and call.cancelled():
            raise DeadlinePassed("the call was cancelled by its own side", reason="CALL_CANCELLED") from None
        raise


def _domain_error(error: AioRpcError, tls: TlsSettings) -> HeadraceError:
    found = from_rpc_error(error)
    if found.reason == TRANSPORT:
        found.message = explained(found.message, tls)
        found.args = (found.message,)
    return found


def _outgoing(metadata: Mapping[str, str] | None) -> grpc.aio.Metadata:
    carrier: dict[str, str] = dict(metadata or {})
    _PROPAGATOR.inject(carrier)
    if REQUEST_ID not in carrier:
        try:
            carrier[REQUEST_ID] = current_call().request_id
        except LookupError:  # not in a handler: the peer makes an id
            pass
    return grpc.aio.Metadata(*carrier.items())
