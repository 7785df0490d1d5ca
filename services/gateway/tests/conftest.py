"""A gateway among real processes' worth of neighbours: real etcd, and real gRPC servers that play router and engines.

The neighbours are scripted, the wire is not: what they send, break or withhold goes through grpc.aio both ways.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from headrace.api.common.v1 import answer_pb2
from headrace.api.common.v1.sampling_pb2 import SamplingParams
from headrace.api.control.v1.intent_pb2 import ApiKey, Bundle, Deployment
from headrace.api.engine.v1 import engine_service_pb2 as engine_pb2
from headrace.api.engine.v1 import engine_service_pb2_grpc as engine_grpc
from headrace.api.inference.v1 import inference_service_pb2 as inference_pb2
from headrace.api.inference.v1 import inference_service_pb2_grpc as inference_grpc
from headrace.api.routing.v1 import routing_service_pb2 as routing_pb2
from headrace.api.routing.v1 import routing_service_pb2_grpc as routing_grpc
from headrace.base.deadline import Deadline
from headrace.base.errors import StaleEpoch, Unavailable
from headrace.base.tls import TlsSettings
from headrace.base.tokenizer_digest import tokenizer_digest
from headrace.bundle import intent, keys
from headrace.bundle.bundle import digest
from headrace.coord.embedded import EmbeddedEtcd
from headrace.coord.etcd.client import EtcdClient
from headrace.gateway import metrics
from headrace.gateway.app import GatewayApp
from headrace.gateway.settings import GatewaySettings
from headrace.rpc.client import Peer
from headrace.rpc.server import Server, ServerSettings

KEY = "hr_" + "k" * 43
ONLY_OTHER_KEY = "hr_" + "o" * 43
MODEL = "bytes"
CONTEXT = 32768
EOS = 256
VOCAB = 300
SAID = "The headrace brings steady water to the mill; the wheel turns evenly."


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with one token per byte, so that texts can be cut anywhere; special tokens follow the bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]  # GPT-2's spelling: these bytes stand for themselves
    other = [byte for byte in range(256) if byte not in plain]
    spelled = {byte: chr(byte) for byte in plain} | {byte: chr(256 + n) for n, byte in enumerate(other)}
    backend = Backend(models.BPE({spelled[byte]: byte for byte in range(256)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"])
    folder = tmp_path_factory.mktemp("bytes")
    backend.save(str(folder / "tokenizer.json"))
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
        "{% if messages[0].content == 'refuse' %}{{ raise_exception('will not') }}{% endif %}<|assistant|>"
    )
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", "chat_template": template}))
    (folder / "config.json").write_text(json.dumps({"vocab_size": VOCAB, "max_position_embeddings": CONTEXT}))
    return folder


@pytest.fixture(scope="session")
def bundle(tokenizer_folder: Path) -> Bundle:
    return Bundle(
        model_path=str(tokenizer_folder),
        weights_digest="0" * 32,
        tokenizer_digest=tokenizer_digest(tokenizer_folder),
        display_name="bytes",
        precision="float32",
        max_model_len=CONTEXT,
        engine_version="1",
    )


@pytest.fixture(scope="session")
def etcd_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with EmbeddedEtcd.start(tmp_path_factory.mktemp("etcd")) as etcd:
        yield etcd.endpoint


@dataclass
class Stream:
    """The engine's end of one Attach stream."""

    outgoing: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)
    steps: int = 0
    open: dict[int, engine_pb2.Submit] = field(default_factory=dict)

    def step(self, tokens: dict[int, int] | None = None, *finishes: engine_pb2.Finish, logprobs: Any = ()) -> None:
        """Send the next step."""
        self.steps += 1
        self.raw(self.steps, list(tokens or {}), list((tokens or {}).values()), finishes, logprobs)

    def raw(
        self, number: int, slots: Any, token_ids: Any, finishes: Sequence[engine_pb2.Finish] = (), logprobs: Any = ()
    ) -> None:
        """Send a step as it stands, true or not."""
        for finish in finishes:
            self.open.pop(finish.slot, None)
        step = engine_pb2.Step(step=number, slots=slots, token_ids=token_ids, finishes=finishes, logprobs=logprobs)
        self.outgoing.put_nowait(engine_pb2.AttachResponse(step=step))

    def finish(self, slot: int, reason: str, **fields: Any) -> engine_pb2.Finish:
        """A finish record."""
        value = answer_pb2.FinishReason.Value(f"FINISH_REASON_{reason}")
        return engine_pb2.Finish(slot=slot, reason=value, queue_ms=3.0, prefill_ms=7.0, **fields)

    def break_off(self) -> None:
        """End the stream as a dying process does."""
        self.outgoing.put_nowait(Unavailable("the engine died"))


Script = Callable[["ScriptedEngine", Stream, engine_pb2.Submit], Awaitable[None]]


class ScriptedEngine(engine_grpc.EngineServiceServicer):
    """Welcomes, then plays `script` for each submission; by default it says SAID, from where the request stands."""

    def __init__(self, engine_id: str, bundle_digest: str, script: Script | None, said: str) -> None:
        self.engine_id = engine_id
        self.epoch = 7
        self.bundle_digest = bundle_digest
        self.script = script
        self.said = said
        self.welcome = True
        self.submits: list[engine_pb2.Submit] = []
        self.cancels: list[int] = []
        self.attached = 0
        self.sent = 0
        self.address = ""
        self.server: Server | None = None

    async def start(self) -> None:
        self.server = Server(ServerSettings(reflection=False), service_name="engine")
        self.server.add(engine_grpc.add_EngineServiceServicer_to_server, self, "headrace.api.engine.v1.EngineService")
        self.address = await self.server.start()

    async def stop(self) -> None:
        """Go away at once."""
        if self.server is not None:
            await self.server.drain(grace_s=0)

    async def Attach(self, requests: AsyncIterator[engine_pb2.AttachRequest], context: Any) -> AsyncIterator[Any]:
        stream = Stream()
        hello = (await anext(aiter(requests))).hello
        if hello.epoch not in (0, self.epoch):
            raise StaleEpoch("restarted")
        self.attached += 1
        reader = asyncio.create_task(self._read(requests, stream))
        try:
            if not self.welcome:
                await asyncio.sleep(60)
            welcome = engine_pb2.Welcome(
                engine_id=self.engine_id, epoch=self.epoch, bundle_digest=self.bundle_digest, vocab_size=VOCAB
            )
            yield engine_pb2.AttachResponse(welcome=welcome)
            while True:
                item = await stream.outgoing.get()
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            self.attached -= 1
            reader.cancel()

    async def _read(self, requests: AsyncIterator[engine_pb2.AttachRequest], stream: Stream) -> None:
        async with asyncio.TaskGroup() as plays:
            async for request in requests:
                if request.HasField("submit"):
                    self.submits.append(request.submit)
                    stream.open |= dict.fromkeys(slots_of(request.submit), request.submit)
                    plays.create_task((self.script or say)(self, stream, request.submit))
                elif request.HasField("cancel"):
                    self.cancels.append(request.cancel.slot)
                    if request.cancel.slot not in stream.open:  # its finish was on its way
                        continue
                    finish = stream.finish(request.cancel.slot, "CANCELLED", error_reason="CANCELLED")
                    stream.step({}, finish)

    def rest(self, submit: engine_pb2.Submit) -> list[int]:
        """The tokens that this engine has yet to say to a request."""
        return list(self.said.encode())[submit.emitted_tokens :]


def slots_of(submit: engine_pb2.Submit) -> range:
    """The slots that a submission opens."""
    return range(submit.slot, submit.slot + max(1, submit.sampling.n))


async def say(engine: ScriptedEngine, stream: Stream, submit: engine_pb2.Submit) -> None:
    """Say the rest, a token a step, and end it as max_tokens or the end token demands."""
    tokens, most = [*engine.rest(submit), EOS], submit.sampling.max_tokens
    last = min(len(tokens), most)
    for token in tokens[: last - 1]:
        stream.step({submit.slot: token})
        await asyncio.sleep(0)
    reason = "STOP" if tokens[last - 1] == EOS else "LENGTH"
    stream.step({submit.slot: tokens[last - 1]}, stream.finish(submit.slot, reason))


class ScriptedRouter(routing_grpc.RoutingServiceServicer):
    """Chooses the first engine that is not excluded; remembers what it was asked."""

    def __init__(self) -> None:
        self.engines: list[ScriptedEngine] = []
        self.asked: list[routing_pb2.PlaceRequest] = []
        self.released: list[tuple[str, int]] = []
        self.reports: list[routing_pb2.ReleaseRequest] = []
        self.refusals: list[Exception] = []
        self.placements: dict[str, tuple[str, int, str]] = {}
        self.retry_after_s = 30.0
        self.address = ""
        self.server: Server | None = None

    async def start(self) -> None:
        self.server = Server(ServerSettings(reflection=False), service_name="router")
        self.server.add(
            routing_grpc.add_RoutingServiceServicer_to_server, self, "headrace.api.routing.v1.RoutingService"
        )
        self.address = await self.server.start()

    async def stop(self) -> None:
        if self.server is not None:
            await self.server.drain(grace_s=0)

    async def Place(self, request: routing_pb2.PlaceRequest, context: Any) -> routing_pb2.PlaceResponse:
        self.asked.append(request)
        if self.refusals:
            raise self.refusals.pop(0)
        known = self.placements | {e.engine_id: (e.engine_id, e.epoch, e.address) for e in self.engines}
        for engine_id, epoch, address in known.values():
            if not any((x.engine_id, x.epoch) == (engine_id, epoch) for x in request.exclusions):
                return routing_pb2.PlaceResponse(engine_id=engine_id, epoch=epoch, address=address)
        raise Unavailable("no replica is eligible", retry_after_s=self.retry_after_s)

    async def Release(self, request: routing_pb2.ReleaseRequest, context: Any) -> routing_pb2.ReleaseResponse:
        self.released.append((request.request_id, request.attempt))
        self.reports.append(request)
        return routing_pb2.ReleaseResponse()


@dataclass
class Heard:
    """One answer as a client heard it."""

    started: list[answer_pb2.AnswerStarted] = field(default_factory=list)
    deltas: list[answer_pb2.AnswerDelta] = field(default_factory=list)
    finished: list[answer_pb2.AnswerFinished] = field(default_factory=list)

    def add(self, event: Any) -> None:
        kind = event.WhichOneof("event")
        if kind != "finished":
            assert not self.finished, "nothing may follow the last message"
        getattr(self, "deltas" if kind == "delta" else kind).append(getattr(event, kind))

    @property
    def text(self) -> str:
        return self.texts.get(0, "")

    @property
    def texts(self) -> dict[int, str]:
        """By index; an answer without any delta has none."""
        found: dict[int, str] = {}
        for delta in self.deltas:
            found[delta.index] = found.get(delta.index, "") + delta.text
        return found

    @property
    def token_ids(self) -> list[int]:
        return self.tokens_of(0)

    def tokens_of(self, index: int) -> list[int]:
        return [token for delta in self.deltas if delta.index == index for token in delta.token_ids]

    @property
    def ends(self) -> list[tuple[int, str, int]]:
        """Index, reason and number of tokens of each answer."""
        name = answer_pb2.FinishReason.Name
        choices = self.finished[0].choices
        return [(c.index, name(c.finish_reason).removeprefix("FINISH_REASON_"), c.completion_tokens) for c in choices]

    @property
    def reason(self) -> str:
        return answer_pb2.FinishReason.Name(self.finished[0].finish_reason).removeprefix("FINISH_REASON_")


class Client:
    """A client of the gateway."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.stub = inference_grpc.InferenceServiceStub(peer.channel)

    def stream(self, text: str = "Say it.", *, key: str = KEY, within_s: float = 20.0, **sampling: Any) -> Any:
        request = inference_pb2.GenerateRequest(model=MODEL, text=text, sampling=SamplingParams(**sampling))
        return self.open(self.stub.Generate, request, key=key, within_s=within_s)

    def open(self, method: Any, request: Any, *, key: str = KEY, within_s: float = 20.0) -> Any:
        metadata = {"authorization": f"Bearer {key}"} if key else {}
        return self.peer.stream(method, request, deadline=Deadline.after(within_s), metadata=metadata)

    async def unary(self, method: Any, request: Any, *, key: str = KEY) -> Any:
        metadata = {"authorization": f"Bearer {key}"}
        return await self.peer.unary(method, request, deadline=Deadline.after(20), metadata=metadata)

    async def generate(self, text: str = "Say it.", **options: Any) -> Heard:
        return await self.hear(self.stream(text, **options))

    async def hear(self, stream: Any) -> Heard:
        heard = Heard()
        async with stream as events:
            async for event in events:
                heard.add(event)
        return heard


@dataclass
class World:
    """Everything around one gateway, and the gateway."""

    etcd: EtcdClient
    etcd_endpoint: str
    bundle_digest: str
    stack: AsyncExitStack
    router: ScriptedRouter = field(default_factory=ScriptedRouter)
    app: GatewayApp | None = None

    async def engine(self, engine_id: str, script: Script | None = None, *, said: str = SAID) -> ScriptedEngine:
        engine = ScriptedEngine(engine_id, self.bundle_digest, script, said)
        await engine.start()
        self.stack.push_async_callback(engine.stop)
        self.router.engines.append(engine)
        return engine

    async def gateway(self, **settings: Any) -> Client:
        routers = settings.pop("router_addresses", (self.router.address,))
        etcd = settings.pop("etcd_endpoint", self.etcd_endpoint)
        app = GatewayApp(
            GatewaySettings(
                address="127.0.0.1:0",
                etcd_endpoints=(etcd,),
                router_addresses=routers,
                **({"keepalive_s": 0.5} | settings),
            )
        )
        await app.start()
        running = asyncio.create_task(app.run())
        self.stack.push_async_callback(_end, app, running)
        self.app = app
        peer = await self.stack.enter_async_context(Peer(app.address, tls=TlsSettings.edge_from_environ()))
        await eventually(lambda: peer.healthy("headrace.api.inference.v1.InferenceService", deadline=Deadline.after(1)))
        return Client(peer)

    async def copy_intent(self, endpoint: str) -> None:
        """Write what `etcd` holds into another etcd.

        The gateway in this process has tried that address before and shares its connection, which may be waiting out
        a backoff: hence more than one try.
        """
        other = EtcdClient([endpoint])
        for key, entry in (await self.etcd.range(keys.ROOT)).entries.items():
            await eventually(lambda put=other.put, key=key, value=entry.value: _worked(put(key, value)))
        await other.close()


async def _worked(call: Awaitable[Any]) -> bool:
    try:
        await call
    except Unavailable:
        return False
    return True


async def _end(app: GatewayApp, running: asyncio.Task[None]) -> None:
    running.cancel()
    await asyncio.wait({running})
    await app.drain()


async def eventually(holds: Callable[[], Any], within_s: float = 10.0) -> None:
    """Wait until `holds` (sync or async) is true."""
    async with asyncio.timeout(within_s):
        while True:
            held = holds()
            if await held if asyncio.iscoroutine(held) else held:
                return
            await asyncio.sleep(0.005)


@pytest.fixture
async def world(etcd_endpoint: str, bundle: Bundle) -> AsyncIterator[World]:
    """etcd with two keys and one deployment, a router without engines, no gateway yet."""
    async with AsyncExitStack() as stack:
        etcd = EtcdClient([etcd_endpoint])
        stack.push_async_callback(etcd.close)
        bundle_digest = digest(bundle)
        await etcd.put(keys.bundle_key(bundle_digest), intent.encode(bundle))
        served = Deployment(name=MODEL, bundle_digest=bundle_digest, replicas=1, backend="simulated")
        await etcd.put(keys.deployment_key(MODEL), intent.encode(served))
        for key, only in ((KEY, []), (ONLY_OTHER_KEY, ["other"])):
            record = ApiKey(tenant="t", name="test", created_at="2026-01-01T00:00:00Z", deployments=only)
            await etcd.put(keys.api_key_key(intent.hash_api_key(key)), intent.encode(record))
        world = World(etcd=etcd, etcd_endpoint=etcd_endpoint, bundle_digest=bundle_digest, stack=stack)
        await world.router.start()
        stack.push_async_callback(world.router.stop)
        yield world


@pytest.fixture(name="eventually")
def eventually_fixture() -> Any:
    return eventually


@pytest.fixture
def gauges() -> Callable[[], dict[str, float]]:
    """The gateway's gauges now."""

    def read() -> dict[str, float]:
        found = {"in_flight": metrics.IN_FLIGHT, "open_slots": metrics.OPEN_SLOTS}
        found["connections"] = metrics.ATTACH_CONNECTIONS
        return {name: gauge.collect()[0].samples[0].value for name, gauge in found.items()}

    return read


@pytest.fixture
def make_client() -> type[Client]:
    return Client
