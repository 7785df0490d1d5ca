"""Tenants of a test's cluster, and what the ledger holds of them."""

from __future__ import annotations

import time
from typing import Any

from headrace.api.control.v1.intent_pb2 import ApiKey, Limits, Tenant
from headrace.api.inference.v1 import inference_service_pb2 as inference_pb
from headrace.api.telemetry.v1 import telemetry_service_pb2 as pb
from headrace.api.telemetry.v1 import telemetry_service_pb2_grpc as rpc
from headrace.base.deadline import Deadline
from headrace.base.errors import Unauthenticated
from headrace.bundle import intent, keys
from headrace.bundle.intent import new_api_key
from headrace.cli.intent import grant_key
from headrace.coord.etcd.client import EtcdClient
from headrace.rpc.client import Peer
from headrace.testkit.cluster import Client, Cluster
from headrace.testkit.eventually import eventually

_PAGE = 1000
"""The most records that telemetry lists at once."""


async def tenant_key(cluster: Cluster, tenant: str, limits: Limits | None = None, **rights: Any) -> str:
    """A fresh API key of a tenant with these limits, in force at every gateway; `rights` are ApiKey fields."""
    key = new_api_key()
    etcd = EtcdClient([cluster.etcd.endpoint])
    try:
        await etcd.put(keys.tenant_key(tenant), intent.encode(Tenant(name=tenant, limits=limits)))
        await grant_key(etcd, key, ApiKey(tenant=tenant, name=f"key of {tenant}", **rights))
    finally:
        await etcd.close()
    for gateway in [name for name in cluster.addresses if name.startswith("gateway")]:
        if cluster.children[gateway].alive:
            await _until_accepted(cluster, gateway, key)
    return key


async def _until_accepted(cluster: Cluster, gateway: str, key: str) -> None:
    async with cluster.client(gateway, api_key=key) as client:

        async def accepted() -> bool:
            try:
                await client.peer.unary(
                    client.stub.ListModels,
                    inference_pb.ListModelsRequest(),
                    deadline=Deadline.after(5),
                    metadata=client.metadata,
                )
            except Unauthenticated:
                return False
            return True

        await eventually(accepted)


async def usage_sums(cluster: Cluster, tenant: str = "") -> pb.UsageSum:
    """All of a tenant's usage (of all tenants' for ""), added up."""
    answer = await _asked(cluster, pb.QueryUsageRequest(tenant=tenant))
    total = pb.UsageSum(tenant=tenant)
    for each in answer.sums:
        total.requests += each.requests
        total.prompt_tokens += each.prompt_tokens
        total.cached_tokens += each.cached_tokens
        total.output_tokens += each.output_tokens
    return total


async def usage_rows(cluster: Cluster, tenant: str = "") -> list[pb.UsageRecord]:
    """Every record; the same one is listed once."""
    found: dict[tuple[str, str, int], pb.UsageRecord] = {}
    until = time.time_ns() + 10**12
    while True:
        page = (await _asked(cluster, pb.QueryUsageRequest(tenant=tenant, until_unix_ns=until, records=_PAGE))).records
        new = {(r.request_id, r.gateway_id, r.admitted_unix_ns): r for r in page}
        if new.keys() <= found.keys():
            return list(found.values())
        found |= new
        until = page[-1].ended_unix_ns + 1  # those that ended in the same instant may stand on both pages


async def the_row(cluster: Cluster, request_id: str, *, within_s: float = 15.0) -> pb.UsageRecord:
    """The one record of a request, as soon as it is there; AssertionError when there are two."""

    async def there() -> list[pb.UsageRecord]:
        return list((await _asked(cluster, pb.QueryUsageRequest(request_id=request_id))).records)

    rows = await eventually(there, within_s=within_s)
    assert len(rows) == 1, f"{request_id} has {len(rows)} records"
    return rows[0]  # type: ignore[no-any-return]


async def _asked(cluster: Cluster, question: pb.QueryUsageRequest) -> pb.QueryUsageResponse:
    async with Peer(cluster.addresses["telemetry"]) as peer:
        stub = rpc.TelemetryServiceStub(peer.channel)
        answer: pb.QueryUsageResponse = await peer.unary(stub.QueryUsage, question, deadline=Deadline.after(10))
    return answer


def with_id(client: Client, request_id: str, **more: str) -> dict[str, str]:
    """The metadata of a call that names its request itself."""
    return client.metadata | {"x-request-id": request_id} | more


__all__ = ["tenant_key", "the_row", "usage_rows", "usage_sums", "with_id"]
