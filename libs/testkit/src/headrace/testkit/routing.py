"""A cluster's routers, asked as gateways and operators ask them."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from headrace.api.control.v1 import intent_pb2
from headrace.api.routing.v1 import routing_service_pb2 as pb
from headrace.api.routing.v1 import routing_service_pb2_grpc as rpc
from headrace.base.deadline import Deadline
from headrace.base.errors import HeadraceError, NotFound
from headrace.bundle import intent, keys
from headrace.cli.intent import etcd_client
from headrace.rpc.client import Peer
from headrace.testkit.cluster import DEPLOYMENT, Answer, Cluster

_NUMBERS = itertools.count()


@asynccontextmanager
async def routing(cluster: Cluster, router: str) -> AsyncIterator[Routing]:
    """One of the routers, asked as a gateway asks it."""
    async with Peer(cluster.addresses[router]) as peer:
        yield Routing(peer, cluster.bundle_digest)


class Routing:
    """The calls of one router."""

    def __init__(self, peer: Peer, bundle_digest: str) -> None:
        self._peer = peer
        self._stub: Any = rpc.RoutingServiceStub(peer.channel)
        self._bundle_digest = bundle_digest

    async def place(self, prompt_tokens: int = 64) -> pb.PlaceResponse:
        """A placement of nothing, given back."""
        request_id = f"probe-{next(_NUMBERS)}"
        request = pb.PlaceRequest(
            request_id=request_id,
            attempt=1,
            deployment=DEPLOYMENT,
            bundle_digest=self._bundle_digest,
            prompt_tokens=prompt_tokens,
            max_tokens=20,
        )
        placed: pb.PlaceResponse = await self._peer.unary(self._stub.Place, request, deadline=Deadline.after(2))
        await self._peer.unary(
            self._stub.Release, pb.ReleaseRequest(request_id=request_id, attempt=1), deadline=Deadline.after(2)
        )
        return placed

    async def eligible(self) -> set[str]:
        """Who may be chosen at present; nobody while the router is away."""
        try:
            placed = await self.place()
        except HeadraceError:
            return set()
        may = (pb.VERDICT_CHOSEN, pb.VERDICT_SLOWER)
        return {c.engine_id for c in placed.considered if c.verdict in may}

    async def replicas(self) -> dict[str, pb.Replica]:
        """The view, by engine id."""
        view = await self._peer.unary(self._stub.ListReplicas, pb.ListReplicasRequest(), deadline=Deadline.after(2))
        return {r.heartbeat.engine_id: r for r in view.replicas}

    async def decisions(self, request_id: str) -> list[pb.Decision]:
        """What it remembers of a request."""
        asked = pb.ExplainRequest(request_id=request_id)
        return list((await self._peer.unary(self._stub.Explain, asked, deadline=Deadline.after(2))).decisions)


async def explained(cluster: Cluster, answer: Answer) -> list[pb.Decision]:
    """What the routers remember of how an answer's attempts were placed."""
    assert answer.started is not None
    found: list[pb.Decision] = []
    for name in [name for name in cluster.addresses if name.startswith("router")]:
        async with routing(cluster, name) as router:
            try:
                found += await router.decisions(answer.started.request_id)
            except NotFound:
                continue
    assert found, "no router remembers it"
    return found


async def set_routing(cluster: Cluster, **fields: Any) -> None:
    """Change the deployment's routing, as an operator does."""
    key = keys.deployment_key(DEPLOYMENT)
    async with etcd_client([cluster.etcd.endpoint]) as etcd:
        found = await etcd.get(key)
        assert found is not None
        deployment = intent.decode(intent_pb2.Deployment, found.value)
        deployment.routing.CopyFrom(intent_pb2.Routing(**fields))
        await etcd.put(key, intent.encode(deployment))


__all__ = ["Routing", "explained", "routing", "set_routing"]
