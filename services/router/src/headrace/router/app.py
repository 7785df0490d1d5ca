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
from headrace.bundle import keys
from headrace.coord.etcd.client import EtcdClient
from headrace.coord.etcd.watch import PrefixMap
from headrace.coord.redis.booking_board import BookingBoard
from headrace.coord.redis.replica_board import ReplicaBoard
from headrace.coord.redis.store import open_redis
from headrace.observe.log import get_logger
from headrace.observe.metrics import start_metrics_server
from headrace.observe.tracing import Tracing
from headrace.router.adapters.booker import Booker
from headrace.router.adapters.cache_feed import CacheFeed, Life
from headrace.router.adapters.deployments import Deployments
from headrace.router.adapters.prober import Prober
from headrace.router.core.prefix_index import PrefixIndex
from headrace.router.core.replica import Phase, Replica
from headrace.router.core.router import Router
from headrace.router.loops import ViewLoop
from headrace.router.memory import Memory
from headrace.router.servicer import RoutingServicer
from headrace.router.settings import RouterSettings
from headrace.rpc.server import Server, ServerSettings

log = get_logger(__name__)

FULL_NAME = DESCRIPTOR.services_by_name["RoutingService"].full_name


class RouterApp:
    """Needs nothing but a port to start; healthy once the replica board has been read."""

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        self._deployments = Deployments(freshness_s=settings.freshness_s)
        self._index = PrefixIndex(settings.index_blocks, settings.predicted_s)
        self.router = Router(
            rules_of=self._deployments.rules_of,
            index=self._index,
            chance=random.Random().random,
            longest_s=settings.freshness_s,
        )
        self.address = ""
        self._redis: Redis | None = None
        self._etcd: EtcdClient | None = None
        self._server: Server | None = None
        self._tracing: Tracing | None = None
        self._feed: CacheFeed | None = None

    async def start(self) -> None:
        """Read the board once, within a second, and listen; NOT_SERVING until a read has succeeded."""
        settings = self._settings
        self._tracing = Tracing("router", f"{socket.gethostname()}-{os.getpid()}", settings.otlp_endpoint or None)
        await self._tracing.start()
        if settings.metrics_address:
            log.info("metrics_served", address=start_metrics_server(settings.metrics_address))
        self._redis = open_redis(settings.redis_url)
        self._etcd = EtcdClient(settings.etcd_endpoints) if settings.etcd_endpoints else None
        self._feed = CacheFeed(self._index)
        self._booker = Booker(BookingBoard(self._redis, longest_s=settings.freshness_s))
        self._view_loop = ViewLoop(
            self.router,
            ReplicaBoard(self._redis),
            period_s=settings.poll_period_s,
            clock=time.monotonic,
            read=self._board_was_read,
        )
        # Before listening, so that with Redis there no early request is refused for want of a view.
        await self._view_loop.step()
        server = Server(ServerSettings(address=settings.address, grace_s=settings.grace_s), service_name="router")
        servicer = RoutingServicer(
            self.router,
            self._booker,
            Memory(most=settings.remembered),
            clock=time.monotonic,
            retry_after_s=settings.retry_after_s,
        )
        server.add(add_RoutingServiceServicer_to_server, servicer, FULL_NAME)
        self.address = await server.start()
        self._server = server

    async def run(self) -> None:
        """Keep the view up to date; whatever ends here ends the process."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._view_loop.run())
            tasks.create_task(self._booker.run())
            tasks.create_task(Prober(self.router, clock=time.monotonic).run())
            tasks.create_task(self._serve_once_read())
            if self._feed:
                tasks.create_task(self._feed.run())
            if self._etcd:
                records = PrefixMap(self._etcd, keys.DEPLOYMENTS)
                tasks.create_task(records.run())
                tasks.create_task(self._follow(records))

    async def drain(self) -> None:
        """Answer what has arrived, then let go; harmless after a start that failed."""
        if self._server:
            await self._server.drain()
        if self._feed:
            await self._feed.close()
        if self._redis:
            await self._redis.aclose()
        if self._etcd:
            await self._etcd.close()
        if self._tracing:
            await self._tracing.shutdown()

    def _board_was_read(self) -> None:
        self._booker.close_breaker()
        if self._feed:
            replicas = [s.seen for s in self.router.view.sightings.values() if isinstance(s.seen, Replica)]
            # A warming engine may not know its address yet, and has nothing cached.
            lives = {
                r.engine_id: Life(epoch=r.epoch, address=r.address) for r in replicas if r.phase is not Phase.WARMING
            }
            self._feed.follow(lives)

    async def _follow(self, records: PrefixMap) -> None:
        version = 0
        while True:
            version = await records.changed(version)
            self._deployments.update(records.snapshot)

    async def _serve_once_read(self) -> None:
        await self._view_loop.first_read.wait()
        if self._server:
            await self._server.set_serving(True)
