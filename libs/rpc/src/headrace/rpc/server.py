"""One server for every service: options, interceptor, health, reflection and the drain sequence."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from headrace.base.channel import Keepalive, server_options
from headrace.base.errors import StartError
from headrace.base.tls import TlsSettings
from headrace.rpc.interceptor import CallInterceptor
from headrace.rpc.tls import PeerNames, server_credentials

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """How a server listens, waits and ends; times in seconds, sizes in bytes.

    `propagation_s` is how long a draining server goes on accepting after it said NOT_SERVING, so that
    those who choose servers can notice first. A client of a stream that takes no message for `stalled_reader_s` is
    cut off with ReaderStalled: what waits for it must not wait for ever.
    """

    address: str = "127.0.0.1:0"
    reflection: bool = True
    keepalive: Keepalive = field(default_factory=Keepalive)
    max_message_bytes: int = 16 << 20
    default_deadline_s: float = 300.0
    propagation_s: float = 0.0
    grace_s: float = 10.0
    most_calls: int | None = None
    stalled_reader_s: float = 30.0
    tls: TlsSettings | None = None
    """None: as the environment says of calls between services."""


class Server:
    """A grpc.aio server with the house's behaviour; build it inside the running loop."""

    def __init__(self, settings: ServerSettings, *, service_name: str) -> None:
        self._settings = settings
        self._tls = TlsSettings.from_environ() if settings.tls is None else settings.tls
        self._interceptor = CallInterceptor(
            service_name,
            default_deadline_s=settings.default_deadline_s,
            stalled_reader_s=settings.stalled_reader_s,
            peer_names=PeerNames(self._tls.peer_name) if self._tls.peer_name else None,
        )
        self._server: Any = grpc.aio.server(
            interceptors=[self._interceptor],
            options=server_options(settings.keepalive, max_message_bytes=settings.max_message_bytes),
            maximum_concurrent_rpcs=settings.most_calls,
        )
        self._health = HealthServicer()
        self._names: list[str] = [""]
        self.address = ""

    def add(self, register: Callable[[Any, Any], None], servicer: object, full_name: str) -> None:
        """Serve `servicer`; `register` is the generated add_…_to_server, `full_name` its service name."""
        register(servicer, self._server)
        self._names.append(full_name)

    @property
    def in_flight(self) -> int:
        """Calls being served now, probes not counted."""
        return self._interceptor.in_flight

    async def start(self) -> str:
        """Bind and serve, NOT_SERVING at first; returns host:port. StartError when the address cannot be bound."""
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        await self.set_serving(False)
        if self._settings.reflection:
            names = [n for n in self._names if n]
            reflection.enable_server_reflection(
                [*names, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name], self._server
            )
        host, _, port = self._settings.address.rpartition(":")
        if not host or not port.isdigit() or int(port) > 65535:
            raise StartError(f"address {self._settings.address!r} is not host:port, such as 127.0.0.1:7000")
        try:
            bound = self._bind()
        except RuntimeError:
            bound = 0
        if bound == 0:
            raise StartError(
                f"cannot listen on {self._settings.address}: the port is taken or the host is not this machine's; "
                "choose another address"
            )
        await self._server.start()
        self.address = f"{host}:{bound}"
        log.info("server_started", address=self.address, tls=self._tls.serves)
        return self.address

    def _bind(self) -> int:
        if self._tls.serves:
            return int(self._server.add_secure_port(self._settings.address, server_credentials(self._tls)))
        return int(self._server.add_insecure_port(self._settings.address))

    async def set_serving(self, serving: bool) -> None:
        """Tell health watchers whether new work is taken."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in self._names:
            await self._health.set(name, status)

    async def drain(self, grace_s: float | None = None) -> None:
        """Say NOT_SERVING, let others notice, refuse new calls, let running ones end within the grace, stop.

        A health Watch held open by a client would hold `stop` for the whole grace (measured), so calls are
        counted here and the transport is stopped with no grace once ours have ended.
        """
        if self._server is None:
            return
        grace = self._settings.grace_s if grace_s is None else grace_s
        started = time.monotonic()
        await self._health.enter_graceful_shutdown()
        if grace > 0:
            await asyncio.sleep(self._settings.propagation_s)
        self._interceptor.refusing = True
        while self.in_flight and time.monotonic() - started < grace:
            await asyncio.sleep(0.02)
        left = self.in_flight
        await self._server.stop(0)
        self._server = None  # a TLS server that lives until the interpreter ends makes that end 2 s late (measured)
        log.info("server_stopped", seconds=round(time.monotonic() - started, 3), calls_cut=left)
