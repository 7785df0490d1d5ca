"""The HTTP server, inside the gateway's own event loop: start, and the drain sequence of every server here."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import structlog
from uvicorn.config import Config
from uvicorn.server import Server

from headrace.base.errors import StartError
from headrace.base.tls import TlsSettings
from headrace.gateway.admission import Admission
from headrace.gateway.http.app import HttpApp, Limits
from headrace.gateway.http.books import Books
from headrace.gateway.http.protocol import BoundedHeadProtocol
from headrace.rpc.tls import http_server_context

log = structlog.get_logger(__name__)

_KEEP_ALIVE_S = 75
"""An idle connection stays open longer than a client's pool keeps it: who closes first loses no request."""
_BODY_WITHIN_S = 60.0
_LEAVE_WITHIN_S = 1
"""What answers that the grace did not cover may take to notice their end."""
_POLL_S = 0.02
_UNSENT_BYTES = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpSettings:
    """How the edge listens, waits and ends; times in seconds, as in `headrace.rpc.server.ServerSettings`.

    `stalled_s`: a client that takes nothing for so long is cut off. `tls`: the edge's own, the same as gRPC's.
    """

    address: str
    max_body_bytes: int = 4 << 20
    default_deadline_s: float = 300.0
    stalled_s: float = 30.0
    propagation_s: float = 0.0
    grace_s: float = 10.0
    tls: TlsSettings = field(default_factory=TlsSettings)


class HttpEdge:
    """Serves OpenAI's protocol from `start` to `drain`; build it inside the running loop."""

    def __init__(self, settings: HttpSettings, admission: Admission, books: Books) -> None:
        self._settings = settings
        self._books = books
        self._app = HttpApp(
            admission,
            books,
            Limits(
                body_bytes=settings.max_body_bytes,
                body_within_s=_BODY_WITHIN_S,
                deadline_s=settings.default_deadline_s,
            ),
        )
        self._server = _Server(self._config())
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Bind and serve; returns host:port. StartError when the address or the certificate cannot be used."""
        self._load()
        listener = self._listener()
        host = self._settings.address.rpartition(":")[0]
        address = f"{host}:{listener.getsockname()[1]}"
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        up = asyncio.create_task(self._server.up.wait())
        await asyncio.wait({self._serving, up}, return_when=asyncio.FIRST_COMPLETED)
        up.cancel()
        if self._serving.done():
            self._serving.result()
        log.info("http_started", address=address, tls=self._settings.tls.serves)
        return address

    async def drain(self, grace_s: float | None = None) -> None:
        """Say not ready, let others notice, refuse new requests, let running ones end within the grace, stop."""
        if self._serving is None:
            return
        grace = self._settings.grace_s if grace_s is None else grace_s
        began = time.monotonic()
        self._app.draining = True
        if grace > 0:
            await asyncio.sleep(self._settings.propagation_s)
        self._app.refusing = True
        while self._app.in_flight and time.monotonic() - began < grace:
            await asyncio.sleep(_POLL_S)
        left = self._app.in_flight
        self._app.cut()
        self._server.should_exit = True
        await asyncio.wait({self._serving})
        await self._books.close()
        log.info("http_stopped", seconds=round(time.monotonic() - began, 3), requests_cut=left)

    def _config(self) -> Config:
        return Config(
            self._app,
            interface="asgi3",
            http=BoundedHeadProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,  # a client's headers do not say who it is
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_LEAVE_WITHIN_S,
        )

    def _load(self) -> None:
        self._server.config.load()
        if self._settings.tls.serves:
            self._server.config.ssl = http_server_context(self._settings.tls)

    def _listener(self) -> socket.socket:
        """A bound socket; its connections inherit what bounds a slow client's memory and a dead one's time.

        The kernel gives up a connection whose client takes nothing: closing it from here would wait for the client to
        take what is pending. And it takes little that it cannot send: by default up to 4 MB per connection, 25,000
        chunks that could have been merged.
        """
        host, _, port = self._settings.address.rpartition(":")
        if not host or not port.isdigit() or int(port) > 65535:
            raise StartError(f"http address {self._settings.address!r} is not host:port, such as 127.0.0.1:8701")
        host = host.strip("[]")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listener = socket.create_server((host, int(port)), family=family, backlog=2048)
        except OSError as error:
            raise StartError(f"cannot listen on {self._settings.address} for HTTP: {error.strerror}") from error
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * self._settings.stalled_s))
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
        return listener


class _Server(Server):
    """uvicorn's server as a part of a process: the process's own signals stay its own."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take none."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Tell when it listens."""
        await super().startup(sockets)
        self.up.set()
