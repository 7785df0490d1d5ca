"""Engines killed and frozen under every kind of answer, and what of a client's secrets gets anywhere."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import psutil
import pytest

from headrace.api.common.v1 import answer_pb2, sampling_pb2
from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.api.telemetry.v1 import telemetry_service_pb2 as telemetry_pb
from headrace.api.telemetry.v1 import telemetry_service_pb2_grpc as telemetry_rpc
from headrace.base.deadline import Deadline
from headrace.base.errors import HeadraceError
from headrace.cli.child import free_port
from headrace.rpc.client import Peer
from headrace.rpc.ids import new_request_id
from headrace.testkit.books import the_row, with_id
from headrace.testkit.cluster import DEPLOYMENT, Client, Cluster
from headrace.testkit.eventually import eventually

PATIENCE_S = 90.0
ANSWER = 240
PROMPT_CANARY, KEY_CANARY = "Zanzibarquux", "hr_Canarycanarycanarycanarycanarycanarycanary1"
SCHEMA = {
    "type": "object",
    "properties": {
        "names": {"type": "array", "items": {"type": "string", "minLength": 4, "maxLength": 4}, "minItems": 25,
                  "maxItems": 25}
    },
    "required": ["names"],
    "additionalProperties": False,
}  # fmt: skip


class Follower:
    """One answer being read; each of its n answers apart."""

    def __init__(self, client: Client, sampling: dict[str, Any], request_id: str = "") -> None:
        self.request_id = request_id or new_request_id()
        self.texts: dict[int, str] = {}
        self.tokens: dict[int, list[int]] = {}
        self.finished: answer_pb2.AnswerFinished | None = None
        self.events = 0
        request = pb.GenerateRequest(model=DEPLOYMENT, text="tell me", sampling=sampling_pb2.SamplingParams(**sampling))
        self.task = asyncio.create_task(self._read(client, request))

    async def _read(self, client: Client, request: pb.GenerateRequest) -> None:
        metadata = with_id(client, self.request_id)
        async with client.peer.stream(
            client.stub.Generate, request, deadline=Deadline.after(PATIENCE_S), metadata=metadata
        ) as events:
            async for event in events:
                self.events += 1
                if event.WhichOneof("event") == "delta":
                    delta = event.delta
                    self.texts[delta.index] = self.texts.get(delta.index, "") + delta.text
                    self.tokens.setdefault(delta.index, []).extend(delta.token_ids)
                elif event.WhichOneof("event") == "finished":
                    self.finished = event.finished

    def count(self) -> int:
        """Tokens read."""
        return sum(map(len, self.tokens.values()))

    @property
    def end(self) -> answer_pb2.AnswerFinished:
        assert self.finished is not None
        return self.finished


async def test_an_engine_killed_under_plain_guided_and_threefold_answers_costs_each_a_pause_only(
    fleet: Cluster,
) -> None:
    plain = {"max_tokens": ANSWER, "ignore_eos": True}
    threefold = plain | {"n": 3, "temperature": 1.0, "seed": 5}
    guided = {"max_tokens": 2000, "seed": 6, "constraint": sampling_pb2.Constraint(json_schema=json.dumps(SCHEMA))}
    # Slow enough that nothing ends before the second engine, which is not, has started.
    fleet.start_engine("a", simulate_itl_ms=150)
    beats = await fleet.until_ready("a")
    async with fleet.client() as client:
        broken = [Follower(client, sampling) for sampling in (plain, threefold, guided)]
        await eventually(lambda: all(each.count() >= 8 for each in broken), within_s=30)
        fleet.start_engine("b", simulate_itl_ms=1)
        await fleet.until_ready("b")
        os.kill(beats["a"].pid, signal.SIGKILL)
        await asyncio.gather(*(each.task for each in broken))
        whole = [Follower(client, sampling) for sampling in (plain, threefold, guided)]
        await asyncio.gather(*(each.task for each in whole))

    for moved, unbroken in zip(broken, whole, strict=True):
        assert moved.end.attempts >= 2
        assert moved.tokens == unbroken.tokens, "no gap, no repeat, and the same seeds"
        assert moved.texts == unbroken.texts
        assert moved.end.usage == unbroken.end.usage
        row = await the_row(fleet, moved.request_id)
        assert (row.model, row.bundle_digest, row.outcome) == (DEPLOYMENT, fleet.bundle_digest, "OK")
        assert row.prompt_tokens == moved.end.usage.prompt_tokens
        assert row.output_tokens == moved.end.usage.completion_tokens == moved.count()
        assert sum(a.output_tokens for a in row.attempts) == row.output_tokens, "each token is counted at one attempt"
        assert [a.engine_id for a in row.attempts] == ["a"] + ["b"] * (len(row.attempts) - 1)
    names = json.loads(broken[2].texts[0])["names"]
    assert [len(name) for name in names] == [4] * 25
    assert [len(broken[1].tokens[index]) for index in range(3)] == [ANSWER] * 3


async def test_while_one_engine_is_frozen_the_others_streams_go_on_and_its_own_move(fleet: Cluster) -> None:
    for engine_id in ("a", "b"):
        fleet.start_engine(engine_id, simulate_itl_ms=25, max_num_seqs=16)
    await fleet.until_ready("a", "b")
    async with fleet.client() as client:
        streams = [Follower(client, {"max_tokens": 2000, "ignore_eos": True}) for _ in range(16)]
        await eventually(lambda: all(stream.count() >= 3 for stream in streams))
        assert all(fleet.metric(e, "headrace_engine_sequences_open") for e in ("a", "b")), "both have some"
        processes = [psutil.Process(fleet.children["a"].pid)]
        processes += processes[0].children()
        for process in processes:
            process.suspend()
        try:
            before = [stream.count() for stream in streams]
            await asyncio.sleep(0.3)  # what was on its way when it froze has come
            frozen = [stream for stream in streams if stream.count() - before[streams.index(stream)] < 3]
            others = [stream for stream in streams if stream not in frozen]
            stood, went = [s.count() for s in frozen], [s.count() for s in others]
            await eventually(lambda: any(s.count() > n for s, n in zip(frozen, stood, strict=True)), within_s=30)
            # 2 x keepalive_s, 80 steps, lie between the frost and the first token elsewhere.
            assert all(s.count() >= n + 10 for s, n in zip(others, went, strict=True)), "others did not wait"
            await eventually(lambda: all(s.count() > n for s, n in zip(frozen, stood, strict=True)), within_s=30)
        finally:
            for stream in streams:
                stream.task.cancel()
            await asyncio.gather(*(stream.task for stream in streams), return_exceptions=True)
            for process in processes:
                process.resume()
    assert frozen
    assert others
    await eventually(lambda: fleet.metric("gateway", "headrace_gateway_open_slots") == 0)


async def test_neither_key_nor_prompt_is_in_any_log_span_or_file_and_engines_see_no_credential(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_LOG_LEVEL", "debug")
    cluster.api_key = KEY_CANARY
    await cluster.start_stores()
    for kind in ("telemetry", "router", "gateway"):
        cluster.start_service(kind)
    real = f"127.0.0.1:{free_port()}"
    async with _listening_in(real) as wire:
        cluster.start_engine("a", address=real, advertise=wire.address, simulate_itl_ms=1)
        await cluster.until_serving("telemetry", "router", "gateway")
        await cluster.until_ready("a")
        async with cluster.client() as client:
            answer = await client.generate(
                text=f"Say {PROMPT_CANARY}.", sampling={"max_tokens": 8, "stop": [PROMPT_CANARY]}
            )
            for mistaken in (
                {"text": PROMPT_CANARY, "sampling": {"temperature": 9.0}},
                {"text": "x", "sampling": {"constraint": sampling_pb2.Constraint(json_schema="{" + PROMPT_CANARY)}},
                {"text": PROMPT_CANARY * 4000},
                {"text": PROMPT_CANARY, "model": "unknown"},
            ):
                with pytest.raises(HeadraceError):
                    await client.generate(**mistaken)
        async with cluster.client(api_key=KEY_CANARY[:-1] + "2") as stranger:
            with pytest.raises(HeadraceError):
                await stranger.generate(text=PROMPT_CANARY)
        await the_row(cluster, answer.started.request_id if answer.started else "")
        spans = await eventually(lambda: _spans(cluster), within_s=15)
    assert b"/headrace.api.engine.v1.EngineService/Attach" in wire.heard, "headers can be read on that wire"
    assert KEY_CANARY.encode() not in wire.heard
    assert not _secrets(spans.encode())
    for child in cluster.children.values():
        await asyncio.to_thread(child.stop)
    files = [path for path in cluster.folder.rglob("*") if path.is_file()]
    assert any(path.name == "gateway.log" and b'"debug"' in path.read_bytes() for path in files)
    assert [path.name for path in files if _secrets(path.read_bytes())] == []


def _secrets(data: bytes) -> list[str]:
    return [secret for secret in (PROMPT_CANARY, KEY_CANARY[3:-1]) if secret.encode() in data]


async def _spans(cluster: Cluster) -> str:
    """All spans telemetry has, as text, once those of the engine are among them; "" before."""
    async with Peer(cluster.addresses["telemetry"]) as peer:
        stub, deadline = telemetry_rpc.TelemetryServiceStub(peer.channel), Deadline.after(10)
        traces = await peer.unary(stub.ListTraces, telemetry_pb.ListTracesRequest(limit=1000), deadline=deadline)
        found = [
            str(await peer.unary(stub.GetTrace, telemetry_pb.GetTraceRequest(trace_id=t.trace_id), deadline=deadline))
            for t in traces.traces
        ]
    text = "\n".join(found)
    return text if "engine.sequence" in text else ""


class Wire:
    """What went to an engine, byte by byte."""

    def __init__(self) -> None:
        self.address = ""
        self.heard = bytearray()


@asynccontextmanager
async def _listening_in(target: str) -> AsyncIterator[Wire]:
    """A proxy before `target` that keeps all that is sent to it."""
    wire = Wire()
    host, _, port = target.rpartition(":")

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kept: bytearray | None) -> None:
        while data := await reader.read(65_536):
            if kept is not None:
                kept.extend(data)
            writer.write(data)
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_reader, to_writer = await asyncio.open_connection(host, int(port))
        await asyncio.gather(copy(reader, to_writer, wire.heard), copy(to_reader, writer, None), return_exceptions=True)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    wire.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield wire
    finally:
        server.close()
