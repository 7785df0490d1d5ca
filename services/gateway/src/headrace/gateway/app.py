"""The gateway process: wiring, start and end."""

from __future__ import annotations

import asyncio
import secrets
import socket

from redis.asyncio import Redis

from headrace.api.inference.v1.inference_service_pb2 import DESCRIPTOR
from headrace.api.inference.v1.inference_service_pb2_grpc import add_InferenceServiceServicer_to_server
from headrace.base.channel import Keepalive
from headrace.base.prefix import PrefixKey
from headrace.base.tls import TlsSettings
from headrace.coord.etcd.client import EtcdClient
from headrace.coord.redis.store import open_redis
from headrace.gateway import metrics
from headrace.gateway.adapters.attach import AttachSettings
from headrace.gateway.adapters.catalog import Catalog
from headrace.gateway.adapters.pool import AttachPool
from headrace.gateway.adapters.routers import Routers
from headrace.gateway.admission import Admission
from headrace.gateway.answer import AnswerSettings, Means
from headrace.gateway.core.budget import RetryBudget
from headrace.gateway.core.fair_queue import Bounds
from headrace.gateway.core.quarantine import Quarantine
from headrace.gateway.fleet import Fleet
from headrace.gateway.http.books import Books
from headrace.gateway.http.edge import HttpEdge, HttpSettings
from headrace.gateway.identity.identity import Identity
from headrace.gateway.identity.tenants import Tenants
from headrace.gateway.ledger import Ledger, TelemetrySink
from headrace.gateway.policies import Policies, installed_filters
from headrace.gateway.prefixes import Prefixes
from headrace.gateway.queue import RequestQueues
from headrace.gateway.quota import Quotas, QuotaTimes
from headrace.gateway.servicer import InferenceServicer
from headrace.gateway.settings import GatewaySettings
from headrace.observe.metrics import start_metrics_server
from headrace.observe.tracing import Tracing
from headrace.rpc.client import Peer
from headrace.rpc.server import Server, ServerSettings

FULL_NAME = DESCRIPTOR.services_by_name["InferenceService"].full_name


class GatewayApp:
    """Needs nothing but its ports to start; healthy once keys, deployments and bundles have been read."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._settings = settings
        self._id = settings.gateway_id or f"{socket.gethostname()}-{secrets.token_hex(4)}"
        self.address = ""
        self.http_address = ""
        self._server: Server | None = None
        self._http: HttpEdge | None = None
        self._tracing: Tracing | None = None
        self._etcd: EtcdClient | None = None
        self._routers: Routers | None = None
        self._pool: AttachPool | None = None
        self._redis: Redis | None = None
        self._quotas: Quotas | None = None
        self._ledger: Ledger | None = None
        self._policies: Policies | None = None

    async def start(self) -> None:
        """Listen; NOT_SERVING until the first read."""
        settings = self._settings
        self._tracing = Tracing("gateway", self._id, settings.otlp_endpoint or None)
        await self._tracing.start()
        if settings.metrics_address:
            start_metrics_server(settings.metrics_address)
        keepalive = Keepalive(time_s=settings.keepalive_s, timeout_s=settings.keepalive_s)
        self._etcd = EtcdClient(settings.etcd_endpoints)
        self._identity = Identity(self._etcd)
        self._tenants = Tenants(self._etcd)
        self._catalog = Catalog(self._etcd)
        self._redis = open_redis(settings.redis_url)
        self._quotas = Quotas(self._redis, self._id, times=QuotaTimes(lease_s=settings.quota_lease_s))
        sink = TelemetrySink(Peer(settings.telemetry_address)) if settings.telemetry_address else None
        ledger = Ledger(settings.data_dir, sink, self._id)
        await asyncio.to_thread(ledger.start)
        self._ledger = ledger
        self._policies = Policies(installed_filters(), ledger.audit)
        self._routers = Routers(settings.router_addresses, keepalive=keepalive, try_timeout_s=settings.place_timeout_s)
        self._pool = AttachPool(AttachSettings(gateway_id=self._id, keepalive=keepalive, idle_s=settings.attach_idle_s))
        metrics.ATTACH_CONNECTIONS.set_function(lambda: self._pool.connections if self._pool else 0)
        metrics.OPEN_SLOTS.set_function(lambda: self._pool.open_slots if self._pool else 0)
        self._server = Server(_server_settings(settings), service_name="gateway")
        admission = Admission(
            identity=self._identity,
            catalog=self._catalog,
            tenants=self._tenants,
            policies=self._policies,
            quotas=self._quotas,
            queues=RequestQueues(_queue_bounds(settings)),
            ledger=ledger,
            means=self._means(self._routers, self._pool),
        )
        self._server.add(add_InferenceServiceServicer_to_server, InferenceServicer(admission), FULL_NAME)
        self.address = await self._server.start()
        if settings.http_address:
            self._http = HttpEdge(_http_settings(settings), admission, Books(settings.telemetry_address))
            self.http_address = await self._http.start()

    async def run(self) -> None:
        """Follow etcd and look after the streams; whatever ends here ends the process."""
        assert self._pool is not None
        assert self._quotas is not None
        assert self._ledger is not None
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._identity.run())
            tasks.create_task(self._tenants.run())
            tasks.create_task(self._quotas.run())
            tasks.create_task(self._ledger.run())
            tasks.create_task(self._catalog.run())
            tasks.create_task(self._pool.run())
            tasks.create_task(self._serve_once_read())

    async def drain(self) -> None:
        """Let running answers end within the grace, then close the streams; harmless after a start that failed."""
        await asyncio.gather(*(server.drain() for server in (self._server, self._http) if server))
        if self._pool:
            await self._pool.close()
        if self._routers:
            await self._routers.close()
        if self._policies:
            self._policies.close()
        # After the streams: what their ends settle is written last.
        if self._quotas:
            await self._quotas.close()
        if self._redis:
            await self._redis.aclose()
        if self._ledger:
            await self._ledger.close()
        if self._etcd:
            await self._etcd.close()
        if self._tracing:
            await self._tracing.shutdown()

    async def _serve_once_read(self) -> None:
        await self._identity.ready.wait()
        await self._tenants.ready.wait()
        await self._catalog.ready.wait()
        if self._server:
            await self._server.set_serving(True)

    def _means(self, routers: Routers, pool: AttachPool) -> Means:
        settings = self._settings
        return Means(
            fleet=Fleet(
                routers=routers,
                pool=pool,
                quarantine=Quarantine(duration_s=settings.quarantine_s),
                suspects=Quarantine(duration_s=settings.suspect_s),
                prefixes=Prefixes(key=_prefix_key(settings)),
            ),
            budget=RetryBudget(ratio=settings.retry_ratio, floor=settings.retry_floor),
            settings=AnswerSettings(
                max_attempts=settings.max_attempts,
                stall_s=settings.stall_s,
                place_wait_s=settings.place_wait_s,
                resume_wait_s=settings.resume_wait_s,
            ),
        )


def _queue_bounds(settings: GatewaySettings) -> Bounds:
    return Bounds(
        max_requests=settings.queue_max_requests,
        max_bytes=settings.queue_max_bytes,
        max_wait_s=settings.queue_max_wait_s,
        starvation_s=settings.queue_starvation_s,
    )


def _prefix_key(settings: GatewaySettings) -> PrefixKey | None:
    return PrefixKey.parse(settings.prefix_cache_key) if settings.prefix_cache_key else None


def _http_settings(settings: GatewaySettings) -> HttpSettings:
    return HttpSettings(
        address=settings.http_address,
        max_body_bytes=settings.max_message_bytes,
        default_deadline_s=settings.default_deadline_s,
        stalled_s=settings.stalled_reader_s,
        propagation_s=settings.propagation_s,
        grace_s=settings.grace_s,
        tls=TlsSettings.edge_from_environ(),
    )


def _server_settings(settings: GatewaySettings) -> ServerSettings:
    return ServerSettings(
        address=settings.address,
        # Clients are far away and may be slow: a lost one is noticed by its stream that takes nothing, too.
        keepalive=Keepalive(time_s=20.0, timeout_s=10.0),
        max_message_bytes=settings.max_message_bytes,
        default_deadline_s=settings.default_deadline_s,
        propagation_s=settings.propagation_s,
        grace_s=settings.grace_s,
        stalled_reader_s=settings.stalled_reader_s,
        tls=TlsSettings.edge_from_environ(),
    )
