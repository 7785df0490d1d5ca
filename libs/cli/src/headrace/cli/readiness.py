"""When a starting stack is able to generate, and why it never will be."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Self

from headrace.api.control.v1 import control_service_pb2 as control_pb
from headrace.api.control.v1 import control_service_pb2_grpc as control_grpc
from headrace.api.engine.v1 import engine_service_pb2 as engine_pb
from headrace.api.routing.v1 import routing_service_pb2 as routing_pb
from headrace.api.routing.v1 import routing_service_pb2_grpc as routing_grpc
from headrace.base.deadline import Deadline
from headrace.base.errors import HeadraceError, StartError
from headrace.base.tls import TlsSettings
from headrace.rpc.client import Peer

GATEWAY_READY = "gateway is ready"
ENGINE_READY = "engine is ready"
NOT_WANTED = "no engine is wanted"
ANSWER_WITHIN_S = 1.0


class Readiness:
    """Asks the gateway, router and controller of one stack, over connections kept until the block is left."""

    def __init__(
        self, addresses: Mapping[str, str], deployment: str, *, replicas: int, tls: TlsSettings | None = None
    ) -> None:
        """`tls` None: services other than the gateway are called as the environment says."""
        self._addresses = addresses
        self._deployment = deployment
        self._replicas = replicas
        self._tls = tls
        self._peers: dict[str, Peer] = {}
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()

    async def look(self) -> tuple[tuple[str, ...], bool]:
        """The state in words, and whether everything is ready; StartError when an engine ended instead."""
        states = tuple(await asyncio.gather(self._gateway(), self._engine()))
        return states, states[0] == GATEWAY_READY and states[1] in (ENGINE_READY, NOT_WANTED)

    async def _gateway(self) -> str:
        peer = await self._peer("gateway")
        ready = peer is not None and await peer.healthy(deadline=Deadline.after(ANSWER_WITHIN_S))
        return GATEWAY_READY if ready else "gateway is starting"

    async def _engine(self) -> str:
        if self._replicas == 0:
            return NOT_WANTED
        try:
            if await self._some_replica_is_ready():
                return ENGINE_READY
            return await self._progress()
        except HeadraceError:
            return "engine is starting"

    async def _some_replica_is_ready(self) -> bool:
        router = await self._peer("router")
        if router is None:
            return False
        view = await router.unary(
            routing_grpc.RoutingServiceStub(router.channel).ListReplicas,
            routing_pb.ListReplicasRequest(),
            deadline=Deadline.after(ANSWER_WITHIN_S),
        )
        return any(
            r.fresh and r.heartbeat.deployment == self._deployment and r.heartbeat.phase == engine_pb.PHASE_READY
            for r in view.replicas
        )

    async def _progress(self) -> str:
        controller = await self._peer("controller")
        if controller is None:
            return "engine is starting"
        status = await controller.unary(
            control_grpc.ControlServiceStub(controller.channel).GetStatus,
            control_pb.GetStatusRequest(),
            deadline=Deadline.after(ANSWER_WITHIN_S),
        )
        return engine_words(status, self._deployment)

    async def _peer(self, name: str) -> Peer | None:
        """A connection, made once the port answers: gRPC's own waits between tries would cost up to a second."""
        if name not in self._peers:
            host, _, port = self._addresses[name].rpartition(":")
            try:
                _, writer = await asyncio.open_connection(host, int(port))
            except OSError:
                return None
            writer.close()
            tls = TlsSettings.edge_from_environ() if name == "gateway" else self._tls
            self._peers[name] = await self._stack.enter_async_context(Peer(self._addresses[name], tls=tls))
        return self._peers[name]


def engine_words(status: control_pb.GetStatusResponse, deployment: str) -> str:
    """What the deployment's engines are doing; StartError when one has ended, since a new stack started none before.

    The controller would try again, but what stopped the first start (a setting, a file, memory) is the user's to mend.
    """
    for found in status.deployments:
        if found.name != deployment:
            continue
        for process in found.processes:
            if process.last_exit:
                raise StartError(f"engine {process.engine_id} could not start: {process.last_exit}")
        if found.processes:
            return "engine is loading the model and running a first generation"
        return found.reason or "engine is starting"
    return "engine is starting"
