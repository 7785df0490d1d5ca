"""The HTTP edge on the wire: what no client library hides."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from headrace.base.errors import StartError
from headrace.gateway.app import GatewayApp
from headrace.gateway.http.reply import encoded
from headrace.gateway.settings import GatewaySettings

KEY = "hr_" + "k" * 43
SAID = "The headrace brings steady water to the mill; the wheel turns evenly."
CHAT = {"model": "bytes", "messages": [{"role": "user", "content": "Say it."}]}


@dataclass
class Answered:
    """One response as it came over the wire."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        """The one envelope."""
        content = json.loads(self.body)
        assert set(content) == {"error"}
        assert set(content["error"]) == {"message", "type", "param", "code"}
        error: dict[str, Any] = content["error"]
        return error

    @property
    def events(self) -> list[str]:
        """The data of each event."""
        assert self.body.endswith(b"\n\n")
        blocks = self.body.decode().removesuffix("\n\n").split("\n\n")
        assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
        return [block.removeprefix("data: ") for block in blocks]


class Wire:
    """A client of raw HTTP."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self.host, self.port = host, int(port)

    @asynccontextmanager
    async def open(self, **options: Any) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        if "sock" not in options:
            options |= {"host": self.host, "port": self.port}
        reader, writer = await asyncio.open_connection(**options)
        try:
            async with asyncio.timeout(20):
                yield reader, writer
        finally:
            writer.close()
            try:
                await writer.wait_closed()
            except ConnectionError:
                pass

    async def ask(self, method: str, path: str, body: Any = None, *, key: str = KEY, **headers: str) -> Answered:
        async with self.open() as (reader, writer):
            writer.write(self.request(method, path, body, key=key, **headers))
            return await self.answered(reader)

    @staticmethod
    def request(method: str, path: str, body: Any = None, *, key: str = KEY, **headers: str) -> bytes:
        content = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        given = {"host": "test", "content-length": str(len(content)), "authorization": f"Bearer {key}"}
        given |= {name.replace("_", "-"): value for name, value in headers.items()}
        head = "".join(f"{name}: {value}\r\n" for name, value in given.items() if value)
        return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + content

    @staticmethod
    async def answered(reader: asyncio.StreamReader) -> Answered:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {n.lower(): v for n, _, v in (line.partition(": ") for line in head[1:] if line)}
        if "content-length" in headers:
            body = await reader.readexactly(int(headers["content-length"]))
        else:
            body = b""
            while size := int(await reader.readuntil(b"\r\n"), 16):
                body += (await reader.readexactly(size + 2))[:-2]
            await reader.readexactly(2)
        return Answered(int(head[0].split()[1]), headers, body)


@pytest.fixture
async def wire(world: Any) -> Wire:
    await world.gateway(http_address="127.0.0.1:0", max_message_bytes=1 << 16, stalled_reader_s=1.0)
    return Wire(world.app.http_address)


def gateway_app(world: Any, **settings: Any) -> GatewayApp:
    """A gateway that is not started yet."""
    given = {"address": "127.0.0.1:0", "http_address": "127.0.0.1:0", "etcd_endpoints": (world.etcd_endpoint,)}
    return GatewayApp(GatewaySettings(**(given | settings)))


async def test_content_types_say_what_comes(world: Any, wire: Wire) -> None:
    await world.engine("e-1")

    whole = await wire.ask("POST", "/v1/chat/completions", CHAT)
    stream = await wire.ask("POST", "/v1/chat/completions", CHAT | {"stream": True})
    refused = await wire.ask("POST", "/v1/chat/completions", CHAT | {"stream": True, "top_p": 7})

    assert whole.headers["content-type"] == refused.headers["content-type"] == "application/json"
    assert stream.headers["content-type"].startswith("text/event-stream")
    assert (stream.headers["x-accel-buffering"], stream.headers["cache-control"]) == ("no", "no-cache")
    assert (whole.status, stream.status, refused.status) == (200, 200, 400)
    assert stream.events[-1] == "[DONE]"
    assert all(json.loads(event)["object"] == "chat.completion.chunk" for event in stream.events[:-1])


async def test_whoever_has_no_key_learns_nothing_of_the_protocol(wire: Wire) -> None:
    for path in ("/v1/chat/completions", "/v1/completions"):
        unknown = await wire.ask("POST", path, b"no json", key="hr_x")
        assert (unknown.status, unknown.error["code"]) == (401, "invalid_api_key")
    assert (await wire.ask("GET", "/v1/models", authorization="")).status == 401


async def test_a_body_beyond_the_limit_is_refused_with_the_limit(wire: Wire) -> None:
    large = json.dumps(CHAT | {"user": "x" * (1 << 17)}).encode()

    declared = await wire.ask("POST", "/v1/chat/completions", large)
    chunks = b"".join(b"8000\r\n" + large[n : n + 0x8000] + b"\r\n" for n in range(0, 0x20000, 0x8000))
    chunked = wire.request("POST", "/v1/chat/completions", content_length="", transfer_encoding="chunked") + chunks
    async with wire.open() as (reader, writer):
        writer.write(chunked + b"0\r\n\r\n")
        undeclared = await wire.answered(reader)
        writer.write(wire.request("GET", "/healthz"))
        after = await wire.answered(reader)

    assert (declared.status, declared.error["code"]) == (413, "request_too_large")
    assert str(1 << 16) in declared.error["message"]
    assert undeclared.status == 413
    assert after.status == 200, "the connection goes on"


async def test_paths_and_methods_that_are_not_there_are_refused_in_the_same_envelope(wire: Wire) -> None:
    nowhere = await wire.ask("POST", "/v1/embeddings", {})
    method = await wire.ask("GET", "/v1/chat/completions")
    broken = await wire.ask("POST", "/v1/completions", b"{")

    assert (nowhere.status, nowhere.error["code"]) == (404, "unknown_url")
    assert (method.status, method.headers["allow"]) == (405, "POST")
    assert (broken.status, broken.error["param"], broken.error["code"]) == (400, "body", "malformed_json")


async def test_every_response_has_a_request_id(wire: Wire) -> None:
    for path in ("/healthz", "/nowhere", "/v1/models"):
        given = await wire.ask("GET", path, x_request_id="mine-1")
        made = await wire.ask("GET", path, x_request_id="bad id")
        assert given.headers["x-request-id"] == "mine-1"
        assert len(made.headers["x-request-id"]) == 26


async def test_a_stream_that_fails_ends_with_one_event_that_parses_and_no_done(world: Any, wire: Wire) -> None:
    said = 'it broke:\n"badly"\r\n\r\ndata: x'

    async def fail(engine: Any, stream: Any, submit: Any) -> None:
        stream.step({submit.slot: 97})
        stream.step({}, stream.finish(submit.slot, "ERROR", error_reason="BROKE", error_message=said))

    await world.engine("e-1", fail)
    answer = await wire.ask("POST", "/v1/chat/completions", CHAT | {"stream": True})

    *chunks, last = [json.loads(event) for event in answer.events]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "a"
    assert set(last) == {"error"}
    assert last["error"]["code"] == "stream_broken"
    assert "it broke" in last["error"]["message"]


def test_line_ends_that_json_allows_are_escaped_in_events() -> None:
    assert encoded({"a": "\u2028\u2029\u0085\n水"}) == '{"a":"\\u2028\\u2029\\u0085\\n水"}'.encode()


async def test_curl_sees_each_token_as_it_comes(world: Any, wire: Wire) -> None:
    more = asyncio.Event()

    async def wait(engine: Any, stream: Any, submit: Any) -> None:
        stream.step({submit.slot: 97})
        await more.wait()
        stream.step({submit.slot: 98}, stream.finish(submit.slot, "LENGTH"))

    await world.engine("e-1", wait)
    curl = await asyncio.create_subprocess_exec(
        "curl",
        "-sN",
        f"http://{world.app.http_address}/v1/completions",
        *("-H", f"Authorization: Bearer {KEY}", "-H", "Content-Type: application/json"),
        *("-d", json.dumps({"model": "bytes", "prompt": "x", "stream": True})),
        stdout=asyncio.subprocess.PIPE,
    )
    assert curl.stdout is not None
    async with asyncio.timeout(20):
        first = json.loads((await curl.stdout.readline()).removeprefix(b"data: "))
        more.set()
        rest = await curl.stdout.read()
        await curl.wait()

    assert first["choices"][0]["text"] == "a"
    assert rest.endswith(b"data: [DONE]\n\n")


async def test_what_a_slow_client_has_not_read_is_merged(world: Any, wire: Wire, eventually: Any) -> None:
    total = 6000

    async def fast(engine: Any, stream: Any, submit: Any) -> None:
        for n in range(total - 1):
            stream.step({submit.slot: 97 + n % 26})
            if n % 50 == 0:
                await asyncio.sleep(0)
        stream.step({submit.slot: 33}, stream.finish(submit.slot, "LENGTH"))

    engine = await world.engine("e-1", fast)
    ask = {"model": "bytes", "prompt": "x", "max_tokens": total, "ignore_eos": True, "stream": True}
    small = socket.socket()
    small.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
    small.connect((wire.host, wire.port))
    async with wire.open(sock=small) as (reader, writer):
        writer.write(wire.request("POST", "/v1/completions", ask))
        await eventually(lambda: engine.submits and not world.app._pool.open_slots)  # the engine was never held up
        small.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
        answer = await wire.answered(reader)

    chunks = [json.loads(event) for event in answer.events[:-1]]
    assert sum(len(chunk["choices"][0]["text"]) for chunk in chunks) == total
    assert len(chunks) < total / 2


async def test_a_client_that_takes_nothing_is_cut_off(world: Any, wire: Wire, eventually: Any, gauges: Any) -> None:
    async def endless(engine: Any, stream: Any, submit: Any) -> None:
        while submit.slot not in engine.cancels:
            stream.step(dict.fromkeys([submit.slot], 97))
            await asyncio.sleep(0.0002)

    await world.engine("e-1", endless)
    with socket.socket() as dead:
        dead.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        dead.connect((wire.host, wire.port))
        ask = {"model": "bytes", "prompt": "x", "max_tokens": 32000, "stream": True, "logprobs": None, "n": 1}
        dead.sendall(wire.request("POST", "/v1/completions", ask))
        await eventually(lambda: gauges()["in_flight"] == 1)
        await eventually(lambda: gauges()["in_flight"] == 0, within_s=20)


async def test_health_is_asked_without_a_key_and_readiness_ends_before_the_server_does(
    world: Any, wire: Wire, eventually: Any
) -> None:
    more = asyncio.Event()

    async def wait(engine: Any, stream: Any, submit: Any) -> None:
        stream.step({submit.slot: 97})
        await more.wait()
        stream.step({submit.slot: 98}, stream.finish(submit.slot, "LENGTH"))

    await world.engine("e-1", wait)
    assert (await wire.ask("GET", "/healthz", authorization="")).status == 200
    assert json.loads((await wire.ask("GET", "/readyz", authorization="")).body) == {"status": "ready"}
    async with wire.open() as (reader, writer), wire.open() as (watching, watcher):
        writer.write(wire.request("POST", "/v1/chat/completions", CHAT | {"stream": True}))
        await reader.readuntil(b'"content":"a"')
        draining = asyncio.create_task(world.app._http.drain(grace_s=20))
        await eventually(lambda: world.app._http._app.refusing)
        watcher.write(wire.request("GET", "/readyz"))
        ready = await wire.answered(watching)
        watcher.write(wire.request("POST", "/v1/chat/completions", CHAT))
        refused = await wire.answered(watching)
        more.set()
        rest = await reader.read()
        await draining

    assert (ready.status, json.loads(ready.body)) == (503, {"status": "draining"})
    assert (refused.status, refused.error["code"], refused.headers["retry-after"]) == (503, "draining", "1")
    assert b"data: [DONE]\n\n" in rest
    with pytest.raises(ConnectionRefusedError):
        await wire.ask("GET", "/healthz")


async def test_a_stream_that_outlasts_the_grace_is_told_so(world: Any, wire: Wire) -> None:
    async def hang(engine: Any, stream: Any, submit: Any) -> None:
        stream.step({submit.slot: 97})

    await world.engine("e-1", hang)
    async with wire.open() as (reader, writer):
        writer.write(wire.request("POST", "/v1/chat/completions", CHAT | {"stream": True}))
        await reader.readuntil(b'"content":"a"')
        await world.app._http.drain(grace_s=0)
        rest = await reader.read()

    assert b'"code": "draining"' in rest
    assert b"[DONE]" not in rest


async def test_a_head_without_end_is_cut_off(wire: Wire) -> None:
    async with wire.open() as (reader, writer):
        writer.write(b"GET /healthz HTTP/1.1\r\nx-long: " + b"y" * (1 << 17))
        answer = await reader.readuntil(b"\r\n")

    assert answer.startswith(b"HTTP/1.1 400 ")


async def test_a_request_that_comes_while_the_gateway_starts_is_told_to_come_back(world: Any) -> None:
    app = gateway_app(world)
    await app.start()
    try:
        wire = Wire(app.http_address)
        assert json.loads((await wire.ask("GET", "/readyz")).body) == {"status": "starting"}
        early = await wire.ask("POST", "/v1/chat/completions", CHAT)
        assert (early.status, early.error["code"]) == (503, "starting")
    finally:
        await app.drain()


async def test_the_edge_speaks_tls_with_a_certificate(world: Any, tmp_path: Path, monkeypatch: Any) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    made = await asyncio.create_subprocess_exec(
        *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
        *("-keyout", key, "-out", cert, "-days", "2", "-subj", "/CN=localhost"),
        *("-addext", "subjectAltName=DNS:localhost"),
        stderr=asyncio.subprocess.DEVNULL,
    )
    assert await made.wait() == 0
    app = gateway_app(world)
    monkeypatch.setenv("HEADRACE_GATEWAY_EDGE_TLS_CERT_FILE", str(cert))
    monkeypatch.setenv("HEADRACE_GATEWAY_EDGE_TLS_KEY_FILE", str(key))
    await app.start()
    trusting = ssl.create_default_context(cafile=str(cert))
    wire = Wire(app.http_address)
    async with wire.open(ssl=trusting, server_hostname="localhost") as (reader, writer):
        writer.write(wire.request("GET", "/healthz"))
        answer = await wire.answered(reader)
    await app.drain()

    assert answer.status == 200


async def test_an_address_that_cannot_be_used_is_one_line_for_the_operator(world: Any, wire: Wire) -> None:
    for match, settings in (
        ("cannot listen", {"http_address": world.app.http_address}),
        ("not host:port", {"http_address": "8701"}),
    ):
        app = gateway_app(world, **settings)
        try:
            with pytest.raises(StartError, match=match):
                await app.start()
        finally:
            await app.drain()
