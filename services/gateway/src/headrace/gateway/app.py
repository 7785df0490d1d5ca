"""The gateway process: wiring, start and end."""

from __future__ import annotations

import asyncio
import secrets
import socket

from headrace.api.inference.v1.inference_service_pb2 import DESCRIPTOR
from headrace.api.inference.v1.inference_service_pb2_grpc import add_InferenceServiceServicer_to_server
from headrace.base.channel import Keepalive
from headrace.coord.etcd.client import EtcdClient
from headrace.gateway import metrics
from headrace.gateway.adapters.attach import AttachSettings
from headrace.gateway.adapters.catalog import Catalog
from headrace.gateway.adapters.pool import AttachPool
from headrace.gateway.adapters.routers import Routers
from headrace.gateway.admission import Admission
from headrace.gateway.answer import AnswerSettings
from headrace.gateway.core.budget import RetryBudget
from headrace.gateway.core.quarantine import Quarantine
from headrace.gateway.fleet import Fleet
from headrace.gateway.servicer import InferenceServicer
from headrace.gateway.settings import GatewaySettings
from headrace.observe.metrics import start_metrics_server
from headrace.observe.tracing import Tracing
from headrace.rpc.server import Server, ServerSettings

FULL_NAME = DESCRIPTOR.services_by_name["InferenceService"].full_name


class GatewayApp:
    """Needs nothing but its ports to start; healthy once keys, deployments and bundles have been read."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._settings = settings
        self._id = settings.gateway_id or f"{socket.gethostname()}-{secrets.token_hex(4)}"
        self.address = ""
        self._server: Server | None = None
        self._tracing: Tracing | None = None
        self._etcd: EtcdClient | None = None
        self._routers: Routers | None = None
        self._pool: AttachPool | None = None

    async def start(self) -> None:
        """Listen; NOT_SERVING until the first read."""
        settings = self._settings
        self._tracing = Tracing("gateway", self._id, settings.otlp_endpoint or None)
        await self._tracing.start()
        if settings.metrics_address:
            start_metrics_server(settings.metrics_address)
        keepalive = Keepalive(time_s=settings.keepalive_s, timeout_s=settings.keepalive_s)
        self._etcd = EtcdClient(settings.etcd_endpoints)
        self._catalog = Catalog(self._etcd)
        self._routers = Routers(settings.router_addresses, keepalive=keepalive, try_timeout_s=settings.place_timeout_s)
        self._pool = AttachPool(AttachSettings(gateway_id=self._id, keepalive=keepalive, idle_s=settings.attach_idle_s))
        metrics.ATTACH_CONNECTIONS.set_function(lambda: self._pool.connections if self._pool else 0)
        metrics.OPEN_SLOTS.set_function(lambda: self._pool.open_slots if self._pool else 0)
        self._server = Server(_server_settings(settings), service_name="gateway")
        servicer = InferenceServicer(self._admission(self._routers, self._pool))
        self._server.add(add_InferenceServiceServicer_to_server, servicer, FULL_NAME)
        self.address = await self._server.start()

    async def run(self) -> None:
        """Follow etcd and look after the streams; whatever ends here ends the process."""
        assert self._pool is not None
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._catalog.run())
            tasks.create_task(self._pool.run())
            tasks.create_task(self._serve_once_read())

    async def drain(self) -> None:
        """Let running answers end within the grace, then close the streams; harmless after a start that failed."""
        if self._server:
            await self._server.drain()
        if self._pool:
            await self._pool.close()
        if self._routers:
            await self._routers.close()
        if self._etcd:
            await self._etcd.close()
        if self._tracing:
            await self._tracing.shutdown()

    async def _serve_once_read(self) -> None:
        await self._catalog.ready.wait()
        if self._server:
            await self._server.set_serving(True)

    def _admission(self, routers: Routers, pool: AttachPool) -> Admission:
        settings = self._settings
        return Admission(
            catalog=self._catalog,
            fleet=Fleet(
                routers=routers,
                pool=pool,
                quarantine=Quarantine(duration_s=settings.quarantine_s),
                suspects=Quarantine(duration_s=settings.suspect_s),
            ),
            budget=RetryBudget(ratio=settings.retry_ratio, floor=settings.retry_floor),
            settings=AnswerSettings(
                max_attempts=settings.max_attempts, stall_s=settings.stall_s, place_wait_s=settings.place_wait_s
            ),
        )


def _server_settings(settings: GatewaySettings) -> ServerSettings:
    return ServerSettings(
        address=settings.address,
        max_message_bytes=settings.max_message_bytes,
        default_deadline_s=settings.default_deadline_s,
        propagation_s=settings.propagation_s,
        grace_s=settings.grace_s,
    )
