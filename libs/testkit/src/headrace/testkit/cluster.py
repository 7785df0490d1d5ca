"""Real processes for tests: stores, services and engines on private ports, each ended by pid at the end."""

from __future__ import annotations

import asyncio
import re
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from headrace.api.common.v1 import answer_pb2, sampling_pb2
from headrace.api.engine.v1 import engine_service_pb2 as engine_pb
from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.api.inference.v1 import inference_service_pb2_grpc as rpc
from headrace.api.routing.v1 import routing_service_pb2 as routing_pb
from headrace.api.routing.v1 import routing_service_pb2_grpc as routing_grpc
from headrace.base.deadline import Deadline
from headrace.base.tls import TlsSettings
from headrace.bundle.bundle import describe
from headrace.bundle.intent import encode, new_api_key
from headrace.bundle.shipped import shipped_model_path
from headrace.cli.child import Child, Lifeline, free_port, kill_tree, python_module
from headrace.cli.intent import Wanted, apply, grant_key
from headrace.coord.embedded import EmbeddedEtcd, EmbeddedRedis
from headrace.coord.etcd.client import EtcdClient
from headrace.coord.redis.replica_board import ReplicaBoard
from headrace.coord.redis.store import open_redis
from headrace.rpc.client import Peer
from headrace.testkit.eventually import eventually

DEPLOYMENT = "test"
PREFIX_CACHE_KEY = bytes(range(32)).hex()
"""Of all clusters: gateway, engines and a test that computes hashes itself agree on it."""


class Cluster:
    """A private stack; start what the test needs. Everything started here ends with `close`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.logs = folder / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)
        self.lifeline = Lifeline()
        self.children: dict[str, Child] = {}
        self.addresses: dict[str, str] = {}
        self.http_addresses: dict[str, str] = {}
        self.metrics_addresses: dict[str, str] = {}
        self.api_key = new_api_key()
        self.engine_spans_to = ""
        """host:port that engines send their spans to; empty: telemetry."""
        self.bundle_digest = ""
        self._bundle_file = folder / "bundle.json"
        self.etcd: EmbeddedEtcd
        self.redis: EmbeddedRedis

    async def start_stores(self, wanted: Wanted | None = None) -> None:
        """etcd and Redis, with one deployment (no replicas unless `wanted` says so) and one API key."""
        self.etcd, self.redis = await asyncio.gather(
            asyncio.to_thread(EmbeddedEtcd.start, self.folder), asyncio.to_thread(EmbeddedRedis.start, self.folder)
        )
        client = EtcdClient([self.etcd.endpoint])
        try:
            deployment = await apply(client, wanted or Wanted(deployment=DEPLOYMENT, replicas=0))
            await grant_key(client, self.api_key, tenant="tests", name="tests")
        finally:
            await client.close()
        self.bundle_digest = deployment.bundle_digest
        self._bundle_file.write_bytes(encode(describe(shipped_model_path())))

    def start_service(self, kind: str, *, name: str | None = None, environ: Mapping[str, str] | None = None) -> Child:
        """A gateway, router, controller or telemetry process; `name` when there are several of a kind."""
        name = name or kind
        self.addresses[name] = f"127.0.0.1:{free_port()}"
        self.metrics_addresses[name] = f"127.0.0.1:{free_port()}"
        routers = ",".join(a for n, a in self.addresses.items() if n.startswith("router"))
        upper = kind.upper()
        settings = {
            "HEADRACE_ETCD_ENDPOINTS": self.etcd.endpoint,
            "HEADRACE_REDIS_URL": self.redis.url,
            "HEADRACE_OTLP_ENDPOINT": self.addresses.get("telemetry", "127.0.0.1:9"),
            "HEADRACE_ROUTER_ADDRESSES": routers,
            "HEADRACE_PREFIX_CACHE_KEY": PREFIX_CACHE_KEY,
            f"HEADRACE_{upper}_ADDRESS": self.addresses[name],
            f"HEADRACE_{upper}_METRICS_ADDRESS": self.metrics_addresses[name],
            "HEADRACE_GATEWAY_HTTP_ADDRESS": self._http_address(name) if kind == "gateway" else "",
            "HEADRACE_GATEWAY_DATA_DIR": str(self.folder / name),
            "HEADRACE_GATEWAY_TELEMETRY_ADDRESS": self.addresses.get("telemetry", ""),
            "HEADRACE_TELEMETRY_DATA_DIR": str(self.folder / "telemetry"),
            "HEADRACE_CONTROLLER_DATA_DIR": str(self.folder),
            "HEADRACE_CONTROLLER_STOP_ENGINES_ON_EXIT": "true",
        }
        return self._start(name, f"headrace.{kind}", settings | dict(environ or {}))

    def _http_address(self, gateway: str) -> str:
        self.http_addresses[gateway] = f"127.0.0.1:{free_port()}"
        return self.http_addresses[gateway]

    def start_engine(self, engine_id: str, **settings: object) -> Child:
        """One replica of the shipped model's bundle, simulated unless `backend` says otherwise."""
        self.metrics_addresses[engine_id] = f"127.0.0.1:{free_port()}"
        given: dict[str, object] = {
            "engine_id": engine_id,
            "deployment": DEPLOYMENT,
            "bundle": self._bundle_file,
            "backend": "simulated",
            "metrics_address": self.metrics_addresses[engine_id],
        } | settings
        environ = {f"HEADRACE_ENGINE_{k.upper()}": str(v) for k, v in given.items()}
        environ["HEADRACE_REDIS_URL"] = self.redis.url
        environ["HEADRACE_PREFIX_CACHE_KEY"] = PREFIX_CACHE_KEY
        environ["HEADRACE_OTLP_ENDPOINT"] = self.engine_spans_to or self.addresses.get("telemetry", "127.0.0.1:9")
        return self._start(engine_id, "headrace.engine", environ)

    def _start(self, name: str, module: str, environ: Mapping[str, str]) -> Child:
        child = Child(
            name=name,
            command=python_module(module),
            environ=environ,
            log_path=self.logs / f"{name}.log",
            lifeline=self.lifeline,
        )
        child.start()
        self.children[name] = child
        return child

    async def until_serving(self, *names: str, within_s: float = 30.0) -> None:
        """Wait until each service says SERVING; fails at once, with its last words, when one has ended."""
        for name in names:
            async with Peer(self.addresses[name], tls=_tls(name)) as peer:

                async def serving(name: str = name, peer: Peer = peer) -> bool:
                    self.assert_alive(name)
                    return await peer.healthy(deadline=Deadline.after(1))

                await eventually(serving, within_s=within_s)

    async def until_ready(self, *engine_ids: str, within_s: float = 60.0) -> dict[str, engine_pb.Heartbeat]:
        """Wait until each engine's newest heartbeat says READY and every live router knows; returns them."""
        found: dict[str, engine_pb.Heartbeat] = {}
        redis = open_redis(self.redis.url)
        try:
            board = ReplicaBoard(redis)

            async def ready() -> bool:
                for engine_id in engine_ids:
                    if engine_id in self.children:
                        self.assert_alive(engine_id)
                for record in (await board.read()).records:
                    beat = engine_pb.Heartbeat.FromString(record.payload)
                    if beat.phase == engine_pb.PHASE_READY:
                        found[beat.engine_id] = beat
                return set(engine_ids) <= set(found)

            await eventually(ready, within_s=within_s)
        finally:
            await redis.aclose()
        for name, child in self.children.items():
            if name.startswith("router") and child.alive:
                await self._until_routed(name, set(engine_ids))
        return found

    async def _until_routed(self, router: str, engine_ids: set[str]) -> None:
        async with Peer(self.addresses[router]) as peer:
            stub = routing_grpc.RoutingServiceStub(peer.channel)

            async def known() -> bool:
                view = await peer.unary(stub.ListReplicas, routing_pb.ListReplicasRequest(), deadline=Deadline.after(5))
                ready = {r.heartbeat.engine_id for r in view.replicas if r.heartbeat.phase == engine_pb.PHASE_READY}
                return engine_ids <= ready

            await eventually(known)

    def assert_alive(self, name: str) -> None:
        """Fail with the process's last words when it has ended."""
        child = self.children[name]
        if not child.alive:
            raise RuntimeError(f"{name} ended with {child.exit_status}: {child.last_words()}")

    def metrics(self, name: str) -> dict[str, float]:
        """Samples of a process's Prometheus endpoint: name{label="value",…} → value."""
        with urllib.request.urlopen(f"http://{self.metrics_addresses[name]}/metrics", timeout=5) as response:
            text = response.read().decode()
        samples: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = ",".join(f'{k}="{v}"' for k, v in sorted(sample.labels.items()))
                samples[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
        return samples

    def metric(self, name: str, pattern: str) -> float:
        """The sum of a process's samples whose whole name matches the regular expression."""
        return sum(v for k, v in self.metrics(name).items() if re.fullmatch(pattern, k))

    @asynccontextmanager
    async def client(self, gateway: str = "gateway", *, api_key: str | None = None) -> AsyncIterator[Client]:
        """A client of one gateway."""
        async with Peer(self.addresses[gateway], tls=_tls(gateway)) as peer:
            yield Client(peer, self.api_key if api_key is None else api_key)

    async def close(self) -> list[str]:
        """End everything started here, and name what did not drain in time and had to be killed."""
        killed = []
        for name in sorted(self.children, key=lambda n: (not n.startswith("gateway"), n)):
            self.children[name].terminate()
        for name, child in self.children.items():
            if not await asyncio.to_thread(child.wait, 10.0):
                killed.append(name)
            kill_tree(child.pid)
        self.lifeline.cut()
        for store in (getattr(self, "redis", None), getattr(self, "etcd", None)):
            if store is not None:
                await asyncio.to_thread(store.stop)
        return killed


class Client:
    """What an application would write against the gateway, with everything the test wants to see kept."""

    def __init__(self, peer: Peer, api_key: str) -> None:
        self.peer = peer
        self.stub = rpc.InferenceServiceStub(peer.channel)
        self.metadata = {"authorization": f"Bearer {api_key}"} if api_key else {}

    async def generate(self, *, deadline: Deadline | None = None, **request: Any) -> Answer:
        """A whole Generate answer; `request` are GenerateRequest fields, `sampling` may be a dict."""
        return await self._answer(self.stub.Generate, pb.GenerateRequest(**_request(request)), deadline)

    async def chat(self, *, deadline: Deadline | None = None, **request: Any) -> Answer:
        """A whole Chat answer."""
        return await self._answer(self.stub.Chat, pb.ChatRequest(**_request(request)), deadline)

    def stream(self, request: pb.GenerateRequest, *, deadline: Deadline | None = None) -> Any:
        """The open stream of a Generate call, as a context manager."""
        return self.peer.stream(
            self.stub.Generate, request, deadline=deadline or Deadline.after(60), metadata=self.metadata
        )

    async def _answer(self, method: Any, request: Any, deadline: Deadline | None) -> Answer:
        answer = Answer()
        until = deadline or Deadline.after(60)
        async with self.peer.stream(method, request, deadline=until, metadata=self.metadata) as events:
            async for event in events:
                answer.take(event)
        return answer


class Answer:
    """What a stream brought, checked for order while it came."""

    def __init__(self) -> None:
        self.started: answer_pb2.AnswerStarted | None = None
        self.finished: answer_pb2.AnswerFinished | None = None
        self.text = ""
        self.token_ids: list[int] = []
        self.messages = 0

    def take(self, event: Any) -> None:
        """Add one event; started comes first and once, finished last and once."""
        kind = event.WhichOneof("event")
        self.messages += 1
        assert self.finished is None, "nothing may follow finished"
        if kind == "started":
            assert self.messages == 1, "started comes first and once"
            self.started = event.started
        elif kind == "delta":
            assert self.started is not None, "deltas come after started"
            self.text += event.delta.text
            self.token_ids.extend(event.delta.token_ids)
        else:
            self.finished = event.finished

    @property
    def end(self) -> answer_pb2.AnswerFinished:
        """The finish record; the stream must have had one."""
        assert self.finished is not None
        return self.finished


def _tls(name: str) -> TlsSettings | None:
    """A gateway is called as its clients call it, whatever services do among themselves."""
    return TlsSettings.edge_from_environ() if name.startswith("gateway") else None


def _request(fields: Mapping[str, Any]) -> dict[str, Any]:
    request = {"model": DEPLOYMENT} | dict(fields)
    if isinstance(request.get("sampling"), dict):
        request["sampling"] = sampling_pb2.SamplingParams(**request["sampling"])
    if isinstance(request.get("token_ids"), list):
        request["token_ids"] = pb.TokenIds(ids=request["token_ids"])
    if "messages" in request:
        request["messages"] = [pb.ChatMessage(role=r, content=c) for r, c in request["messages"]]
    return request


__all__ = ["DEPLOYMENT", "Answer", "Client", "Cluster"]
