"""What tenants see of their usage and audit over HTTP, and what roles allow; all processes are real."""

from __future__ import annotations

import time
from typing import Any

import httpx2
import pytest

from headrace.api.control.v1.intent_pb2 import Tenant
from headrace.base.errors import Forbidden
from headrace.bundle import intent, keys
from headrace.cli.intent import etcd_client
from headrace.testkit.books import tenant_key
from headrace.testkit.cluster import DEPLOYMENT, Cluster
from headrace.testkit.eventually import eventually


class Books:
    """A client of one gateway's HTTP edge."""

    def __init__(self, cluster: Cluster, key: str) -> None:
        self._url = f"http://{cluster.http_addresses['gateway']}"
        self._headers = {"authorization": f"Bearer {key}"}

    async def get(self, path: str, **query: Any) -> httpx2.Response:
        async with httpx2.AsyncClient(base_url=self._url, headers=self._headers, timeout=20) as client:
            return await client.get(path, params=query)

    async def post(self, path: str, body: Any) -> httpx2.Response:
        async with httpx2.AsyncClient(base_url=self._url, headers=self._headers, timeout=20) as client:
            return await client.post(path, json=body)

    async def used(self, **query: Any) -> dict[str, int]:
        """Output tokens by tenant."""
        found = (await self.get("/v1/usage", **query)).json()
        return {line["tenant"]: line["output_tokens"] for line in found["data"]}


async def test_a_tenant_sees_its_own_books_and_an_operator_those_of_all(fleet: Cluster) -> None:
    fleet.start_engine("a", simulate_itl_ms=0)
    await fleet.until_ready("a")
    held = {tenant: await tenant_key(fleet, tenant) for tenant in ("acme", "zenith")}
    operator = Books(fleet, await tenant_key(fleet, "staff", roles=["operator"]))
    asked = {}
    for tokens, (tenant, key) in enumerate(held.items(), 3):
        async with fleet.client(api_key=key) as client:
            answer = await client.generate(text="a", sampling={"max_tokens": tokens, "ignore_eos": True})
            assert answer.started is not None
            asked[tenant] = answer.started.request_id
    everything = {"acme": 3, "zenith": 4}

    async def known() -> bool:
        return everything.items() <= (await operator.used()).items()

    await eventually(known)
    acme = Books(fleet, held["acme"])
    assert await acme.used() == await acme.used(tenant="acme") == await operator.used(tenant="acme") == {"acme": 3}
    assert await acme.used(since=time.time() + 60) == {}

    newest = (await acme.get("/v1/usage", records=10)).json()["records"]
    assert [(line["request_id"], line["output_tokens"], line["attempts"][0]["engine_id"]) for line in newest] == [
        (asked["acme"], 3, "a")
    ]
    theirs = (await acme.get("/v1/usage", request_id=asked["zenith"], records=10)).json()
    assert theirs["records"] == [], "another's request is nobody's"

    refused = await acme.get("/v1/usage", tenant="zenith")
    unknown = await acme.get("/v1/usage", tenant="nobody")
    assert refused.status_code == unknown.status_code == 403
    assert refused.json()["error"]["code"] == "role_required"
    assert refused.json()["error"]["message"] == unknown.json()["error"]["message"], "not even whether there is one"
    assert (await acme.get("/v1/audit", tenant="zenith")).status_code == 403
    assert (await Books(fleet, "hr_x").get("/v1/usage")).status_code == 401


async def test_parameters_that_mean_nothing_are_named(fleet: Cluster) -> None:
    books = Books(fleet, fleet.api_key)
    for query in ({"from": "2026-01-01"}, {"since": "yesterday"}, {"until": "-5"}, {"records": "1001"}):
        answer = await books.get("/v1/usage", **query)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, next(iter(query)))
    assert (await books.get("/v1/audit", limit=0)).json()["error"]["param"] == "limit"
    assert (await books.post("/v1/usage", {})).status_code == 405


async def test_a_policy_s_decision_is_in_the_tenant_s_audit(fleet: Cluster) -> None:
    fleet.start_engine("a", simulate_itl_ms=0)
    await fleet.until_ready("a")
    books = Books(fleet, await tenant_key(fleet, "strict"))
    async with etcd_client([fleet.etcd.endpoint]) as etcd:
        strict = Tenant(name="strict", denied_patterns=["forbidden"])
        await etcd.put(keys.tenant_key("strict"), intent.encode(strict))

    async def refusal() -> httpx2.Response | None:
        asked = {"model": DEPLOYMENT, "prompt": "a forbidden word", "max_tokens": 1}
        answer = await books.post("/v1/completions", asked)
        return answer if answer.status_code == 403 else None

    refused = await eventually(refusal)

    async def told() -> list[dict[str, Any]]:
        return (await books.get("/v1/audit", limit=5)).json()["data"]

    (event,) = await eventually(told)
    assert (event["tenant"], event["decision"], event["service"]) == ("strict", "REFUSED", "gateway")
    assert event["request_id"] == refused.headers["x-request-id"]


async def test_who_is_no_user_asks_no_model_and_sees_which_there_are(fleet: Cluster) -> None:
    fleet.start_engine("a", simulate_itl_ms=0)
    await fleet.until_ready("a")
    key = await tenant_key(fleet, "staff", roles=["operator"])
    chat = {"model": DEPLOYMENT, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    refused = await Books(fleet, key).post("/v1/chat/completions", chat)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "role_required")
    assert "needs user" in refused.json()["error"]["message"]
    assert [m["id"] for m in (await Books(fleet, key).get("/v1/models")).json()["data"]] == [DEPLOYMENT]
    async with fleet.client(api_key=key) as client:
        with pytest.raises(Forbidden, match="needs user") as refusal:
            await client.generate(text="a", sampling={"max_tokens": 2})
        assert refusal.value.metadata["role"] == "user"
    both = await tenant_key(fleet, "staff", roles=["operator", "user"])
    assert (await Books(fleet, both).post("/v1/chat/completions", chat)).status_code == 200
