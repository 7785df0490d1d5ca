"""The gateway as a process: its traces, its start, its end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from headrace.base.deadline import Deadline
from headrace.coord.embedded import EmbeddedEtcd
from headrace.observe import tracing
from headrace.rpc.client import Peer

NAME = "headrace.api.inference.v1.InferenceService"
SAID = "The headrace brings steady water to the mill; the wheel turns evenly."


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """Every span that ends in this process, whatever tracing the services in it have started."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("test")
    monkeypatch.setattr(tracing, "_current", lambda: tracer)
    return exporter


async def test_one_trace_holds_the_gateways_steps_and_reaches_router_and_engine(world: Any, spans: Any) -> None:
    engine = await world.engine("e-1")
    client = await world.gateway()

    heard = await client.generate()

    by_name = {span.name: span for span in spans.get_finished_spans()}
    root = by_name["gateway.Generate"]
    for name in ("gateway.tokenize", "gateway.place", "gateway.stream"):
        assert by_name[name].parent.span_id == root.context.span_id
    assert by_name["router.Place"].parent.span_id == by_name["gateway.place"].context.span_id
    trace_id, span_id = engine.submits[0].traceparent.split("-")[1:3]
    assert heard.started[0].trace_id == trace_id == f"{root.context.trace_id:032x}"
    assert span_id == f"{by_name['gateway.stream'].context.span_id:016x}"
    assert root.attributes["gen_ai.usage.output_tokens"] == len(SAID) + 1


def test_the_gateway_does_not_import_torch() -> None:
    code = "import sys, headrace.gateway.app; raise SystemExit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def launch(*flags: str, etcd: str, router: str) -> subprocess.Popen[str]:
    environ = os.environ | {"HEADRACE_ETCD_ENDPOINTS": etcd, "HEADRACE_ROUTER_ADDRESSES": router}
    command = [sys.executable, "-m", "headrace.gateway", *flags]
    return subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


async def test_sigterm_says_not_serving_and_lets_a_running_answer_finish(
    world: Any, make_client: Any, eventually: Any
) -> None:
    goes_on = asyncio.Event()

    async def in_two_parts(engine: Any, stream: Any, submit: Any) -> None:
        stream.step({submit.slot: 65})
        await goes_on.wait()
        stream.step({submit.slot: 66}, stream.finish(submit.slot, "LENGTH"))

    engine = await world.engine("e-1", in_two_parts)
    address, metrics_address = free_address(), free_address()
    flags = ("--address", address, "--metrics-address", metrics_address)
    process = launch(*flags, etcd=world.etcd_endpoint, router=world.router.address)
    async with Peer(address) as peer:
        await eventually(lambda: peer.healthy(NAME, deadline=Deadline.after(1)), within_s=20)
        running = asyncio.ensure_future(make_client(peer).generate())
        await eventually(lambda: engine.submits)

        process.send_signal(signal.SIGTERM)
        await eventually(lambda: not_healthy(peer))
        page = await asyncio.to_thread(lambda: urllib.request.urlopen(f"http://{metrics_address}/").read().decode())
        goes_on.set()

        assert (await running).text == "AB"
    _, log = await asyncio.to_thread(process.communicate, timeout=20)
    assert process.returncode == 0
    assert "headrace_gateway_requests_in_flight 1.0" in page
    assert all(json.loads(line) for line in log.splitlines())
    assert "Say it." not in log
    await eventually(lambda: engine.attached == 0)


async def not_healthy(peer: Peer) -> bool:
    return not await peer.healthy(NAME, deadline=Deadline.after(1))


async def test_a_gateway_started_without_etcd_serves_once_etcd_is_there_and_goes_on_when_it_is_gone(
    world: Any, tmp_path: Path, eventually: Any
) -> None:
    """`world.etcd` has the intent; a second etcd on a known port gets a copy, comes late and leaves early."""
    await world.engine("e-1")
    host_port = free_address()
    starting = asyncio.ensure_future(world.gateway(etcd_endpoint=host_port))
    await eventually(lambda: world.app is not None)
    async with Peer(world.app.address) as peer:
        assert not await peer.healthy(NAME, deadline=Deadline.after(1))
        etcd = await asyncio.to_thread(EmbeddedEtcd.start, tmp_path, int(host_port.rpartition(":")[2]))
        try:
            await world.copy_intent(host_port)
            client = await starting
            await eventually(lambda: answers(client))
        finally:
            await asyncio.to_thread(etcd.stop)
        assert (await client.generate()).text == SAID


async def answers(client: Any) -> bool:
    try:
        return (await client.generate()).text == SAID
    except Exception:
        return False


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--address", "nonsense"), "not host:port"),
        (("--max-attempts", "0"), "--max-attempts"),
        (("--router-addresses", ","), "router_addresses"),
    ],
)
def test_a_setting_that_cannot_be_used_is_one_line_and_status_1(flags: tuple[str, ...], says: str) -> None:
    process = launch(*flags, etcd="127.0.0.1:1", router="127.0.0.1:1")

    _, log = process.communicate(timeout=30)

    assert process.returncode == 1
    assert says in log.splitlines()[-1]
    assert "Traceback" not in log
