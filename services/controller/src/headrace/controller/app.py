"""The controller, put together."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

from headrace.api.control.v1 import control_service_pb2_grpc as pb_grpc
from headrace.controller.adapters.etcd_intent import EtcdIntent
from headrace.controller.adapters.external_provisioner import ExternalProvisioner
from headrace.controller.adapters.local_provisioner import LocalProvisioner, LocalSettings
from headrace.controller.adapters.redis_heartbeats import RedisHeartbeats
from headrace.controller.core.policy import Policy
from headrace.controller.core.reconcile import decide
from headrace.controller.core.survey import survey
from headrace.controller.loops import Pace, ReconcileLoop
from headrace.controller.ports import Judge, Provisioner
from headrace.controller.servicer import SERVICE, ControlServicer
from headrace.controller.settings import ControllerSettings, ProvisionerName
from headrace.coord.etcd.client import EtcdClient
from headrace.coord.etcd.election import Election
from headrace.coord.redis.booking_board import BookingBoard
from headrace.coord.redis.replica_board import ReplicaBoard
from headrace.coord.redis.store import open_redis
from headrace.observe.log import get_logger
from headrace.observe.metrics import start_metrics_server
from headrace.observe.tracing import Tracing
from headrace.rpc.server import Server, ServerSettings

log = get_logger(__name__)

ELECTION = "controller"


class ControllerApp:
    """Starts whether or not etcd and Redis answer: it waits for them, and says so in its status."""

    def __init__(self, settings: ControllerSettings) -> None:
        self._settings = settings
        self._ended_by_itself = False
        instance = f"{socket.gethostname()}-{os.getpid()}"
        self._etcd = EtcdClient(settings.etcd_endpoints)
        self._redis = open_redis(settings.redis_url)
        self._tracing = Tracing("controller", instance, settings.otlp_endpoint or None)
        self._intent = EtcdIntent(self._etcd)
        self._provisioner, judge = self._provision()
        policy = Policy(drain_s=settings.drain_s, longest_restart_s=settings.longest_restart_s)
        self._election = Election(self._etcd, ELECTION, instance, settings.leader_ttl_s)
        self._loop = ReconcileLoop(
            intent=self._intent,
            heartbeats=RedisHeartbeats(
                ReplicaBoard(self._redis), BookingBoard(self._redis, longest_s=policy.freshness_s)
            ),
            provisioner=self._provisioner,
            judge=judge,
            leadership=self._election,
            policy=policy,
            pace=Pace(period_s=settings.period_s, action_timeout_s=settings.action_timeout_s),
        )
        self._server = Server(ServerSettings(address=settings.address, grace_s=2.0), service_name="controller")
        servicer = ControlServicer(self._loop, self._intent, self._election)
        self._server.add(pb_grpc.add_ControlServiceServicer_to_server, servicer, SERVICE)

    async def start(self) -> None:
        """Serve the status; StartError for a taken port."""
        if self._settings.metrics_address:
            start_metrics_server(self._settings.metrics_address)
        await self._tracing.start()
        await self._server.start()
        await self._server.set_serving(True)

    async def run(self) -> None:
        """Follow intent, stand for election, reconcile; a loop that dies ends the process."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._intent.run())
                group.create_task(self._election.run())
                group.create_task(self._loop.run())
        except BaseExceptionGroup:
            self._ended_by_itself = True
            raise

    async def drain(self) -> None:
        """Release everything. Engines go on, unless told otherwise: a restart of the controller shows nowhere."""
        # After a fault of our own the engines go on in any case: the next controller takes them over.
        if self._settings.stop_engines_on_exit and not self._ended_by_itself:
            await self._provisioner.stop_all(self._settings.exit_grace_s)
            log.info("engines_stopped")
        self._provisioner.close()
        await self._server.drain()
        await self._etcd.close()
        await self._redis.aclose()
        await self._tracing.shutdown()

    def _provision(self) -> tuple[Provisioner, Judge]:
        if self._settings.provisioner is ProvisionerName.EXTERNAL:
            return ExternalProvisioner(), survey
        local = LocalSettings(
            data_dir=Path(self._settings.data_dir).absolute(),
            redis_url=self._settings.redis_url,
            otlp_endpoint=self._settings.otlp_endpoint,
        )
        return LocalProvisioner(local, self._intent.bundle), decide
