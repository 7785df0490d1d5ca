"""The gateway as the command line uses it: one connection, the user's key on each call."""

from __future__ import annotations

import os
import re
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from headrace.api.common.v1 import answer_pb2, sampling_pb2
from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.api.inference.v1 import inference_service_pb2_grpc as rpc
from headrace.base.deadline import Deadline
from headrace.base.errors import StartError
from headrace.base.tls import SYSTEM, TlsSettings
from headrace.cli.home import Home
from headrace.rpc.client import Peer

Event = answer_pb2.AnswerStarted | answer_pb2.AnswerDelta | answer_pb2.AnswerFinished


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Where the gateway is, the key to use, and how its edge is called."""

    address: str
    api_key: str
    tls: TlsSettings = field(default_factory=TlsSettings)


def access(home: Home) -> Access:
    """HEADRACE_GATEWAY and HEADRACE_API_KEY, else those of the stack running on `home`.

    An address that begins with https:// is called over TLS, as HEADRACE_GATEWAY_EDGE_TLS_* say or, without them,
    trusting whom the machine trusts.
    """
    given = os.environ.get("HEADRACE_GATEWAY") or home.running().addresses["gateway"]
    tls = TlsSettings.edge_from_environ()
    address = given.removeprefix("https://").rstrip("/")
    if given.startswith("https://"):
        tls = tls if tls.calls else replace(tls, ca_file=SYSTEM)
        address = address if re.search(r":\d+$", address) else f"{address}:443"
    return Access(address=address, api_key=os.environ.get("HEADRACE_API_KEY") or own_key(home), tls=tls)


def own_key(home: Home) -> str:
    """The key in HEADRACE_KEY_FILE, else the data folder's."""
    path = Path(os.environ.get("HEADRACE_KEY_FILE") or home.key_file)
    try:
        return path.read_text().strip()
    except OSError as error:
        raise StartError(f"cannot read the API key in {path} ({error.strerror}): set HEADRACE_API_KEY") from None


class Gateway:
    """Calls to one gateway."""

    def __init__(self, peer: Peer, given: Access) -> None:
        self._peer = peer
        self._stub = rpc.InferenceServiceStub(peer.channel)
        self._metadata = {"authorization": f"Bearer {given.api_key}"}

    async def models(self, *, deadline: Deadline) -> list[pb.Model]:
        """The deployments this key may use."""
        answer = await self._peer.unary(
            self._stub.ListModels, pb.ListModelsRequest(), deadline=deadline, metadata=self._metadata
        )
        return list(answer.models)

    def generate(
        self, model: str, prompt: str, sampling: sampling_pb2.SamplingParams, *, deadline: Deadline
    ) -> AsyncGenerator[Event, None]:
        """The continuation of a prompt, event by event; close it (`aclosing`) and the call is cancelled."""
        request = pb.GenerateRequest(model=model, text=prompt, sampling=sampling)
        return self._events(self._stub.Generate, request, deadline)

    def chat(
        self,
        model: str,
        messages: Sequence[pb.ChatMessage],
        sampling: sampling_pb2.SamplingParams,
        *,
        deadline: Deadline,
    ) -> AsyncGenerator[Event, None]:
        """The next turn of a conversation, event by event; close it (`aclosing`) and the call is cancelled."""
        request = pb.ChatRequest(model=model, messages=messages, sampling=sampling)
        return self._events(self._stub.Chat, request, deadline)

    async def _events(
        self, method: object, request: pb.GenerateRequest | pb.ChatRequest, deadline: Deadline
    ) -> AsyncGenerator[Event, None]:
        async with self._peer.stream(method, request, deadline=deadline, metadata=self._metadata) as responses:  # type: ignore[arg-type]
            async for response in responses:
                yield getattr(response, response.WhichOneof("event"))


@asynccontextmanager
async def connect(given: Access) -> AsyncIterator[Gateway]:
    """A gateway connection, closed on leaving."""
    async with Peer(given.address, tls=given.tls) as peer:
        yield Gateway(peer, given)


async def first_model(gateway: Gateway, wanted: str | None, *, deadline: Deadline) -> str:
    """`wanted`, or the only (first) deployment there is."""
    if wanted:
        return wanted
    models = await gateway.models(deadline=deadline)
    if not models:
        raise StartError("this key may use no deployment: see `headrace status`")
    return models[0].name
