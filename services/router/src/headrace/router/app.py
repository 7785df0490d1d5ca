"""The router process: wiring, start and end."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import time

from redis.asyncio import Redis

from headrace.api.routing.v1.routing_service_pb2 import DESCRIPTOR
from headrace.api.routing.v1.routing_service_pb2_grpc import add_RoutingServiceServicer_to_server
from headrace.coord.redis.replica_board import ReplicaBoard
from headrace.coord.redis.store import open_redis
from headrace.observe.log import get_logger
from headrace.observe.metrics import start_metrics_server
from headrace.observe.tracing import Tracing
from headrace.router.core.router import Router
from headrace.router.loops import ViewLoop
from headrace.router.servicer import RoutingServicer
from headrace.router.settings import RouterSettings
from headrace.rpc.server import Server, ServerSettings

log = get_logger(__name__)

FULL_NAME = DESCRIPTOR.services_by_name["RoutingService"].full_name


class RouterApp:
    """Needs nothing but a port to start; healthy once the replica board has been read."""

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        self.router = Router(freshness_s=settings.freshness_s, pick=random.Random().randrange)
        self.address = ""
        self._redis: Redis | None = None
        self._server: Server | None = None
        self._tracing: Tracing | None = None

    async def start(self) -> None:
        """Read the board once, within a second, and listen; NOT_SERVING until a read has succeeded."""
        settings = self._settings
        self._tracing = Tracing("router", f"{socket.gethostname()}-{os.getpid()}", settings.otlp_endpoint or None)
        await self._tracing.start()
        if settings.metrics_address:
            log.info("metrics_served", address=start_metrics_server(settings.metrics_address))
        self._redis = open_redis(settings.redis_url)
        self._view_loop = ViewLoop(
            self.router, ReplicaBoard(self._redis), period_s=settings.poll_period_s, clock=time.monotonic
        )
        # Before listening, so that with Redis there no early request is refused for want of a view.
        await self._view_loop.step()
        server = Server(ServerSettings(address=settings.address, grace_s=settings.grace_s), service_name="router")
        servicer = RoutingServicer(self.router, clock=time.monotonic, retry_after_s=settings.retry_after_s)
        server.add(add_RoutingServiceServicer_to_server, servicer, FULL_NAME)
        self.address = await server.start()
        self._server = server

    async def run(self) -> None:
        """Keep the view up to date; whatever ends here ends the process."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._view_loop.run())
            tasks.create_task(self._serve_once_read())

    async def drain(self) -> None:
        """Answer what has arrived, then let go; harmless after a start that failed."""
        if self._server:
            await self._server.drain()
        if self._redis:
            await self._redis.aclose()
        if self._tracing:
            await self._tracing.shutdown()

    async def _serve_once_read(self) -> None:
        await self._view_loop.first_read.wait()
        if self._server:
            await self._server.set_serving(True)
