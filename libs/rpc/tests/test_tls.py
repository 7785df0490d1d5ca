"""TLS over real sockets: who is let in, what a refused caller hears, and certificates that change while all runs."""

from __future__ import annotations

import asyncio
import os
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from headrace.api.routing.v1 import routing_service_pb2 as routing_pb2
from headrace.api.routing.v1 import routing_service_pb2_grpc as routing_grpc
from headrace.base.deadline import Deadline
from headrace.base.errors import StartError, Unauthenticated, Unavailable
from headrace.base.tls import INTERNAL_NAME, TlsSettings, tls_files
from headrace.cli.certs import Authority, Pair, write_internal
from headrace.cli.internal_tls import internal_environ, internal_settings
from headrace.rpc import rotating_channel
from headrace.rpc.client import Peer
from headrace.rpc.probe import probe
from headrace.rpc.server import Server, ServerSettings
from headrace.rpc.tls import http_server_context
from headrace.testkit.eventually import eventually

ROUTING = "headrace.api.routing.v1.RoutingService"
ASK = routing_pb2.PlaceRequest(deployment="d")


class Routing(routing_grpc.RoutingServiceServicer):
    """Answers; remembers the serial number of each caller's certificate."""

    def __init__(self) -> None:
        self.callers: list[bytes] = []
        self.hold = asyncio.Event()

    async def Place(self, request: Any, context: Any) -> routing_pb2.PlaceResponse:
        self.callers.append(context.auth_context().get("x509_pem_cert", [b""])[0])
        if request.tenant == "waits":
            await self.hold.wait()
        return routing_pb2.PlaceResponse(engine_id="e-1")


@asynccontextmanager
async def serving(tls: TlsSettings | None = None) -> AsyncIterator[tuple[str, Routing]]:
    server, routing = Server(ServerSettings(tls=tls), service_name="test"), Routing()
    server.add(routing_grpc.add_RoutingServiceServicer_to_server, routing, ROUTING)
    address = await server.start()
    await server.set_serving(True)
    try:
        yield address, routing
    finally:
        await server.drain(0)


async def place(peer: Peer, tenant: str = "") -> str:
    stub = routing_grpc.RoutingServiceStub(peer.channel)  # type: ignore[no-untyped-call]
    request = routing_pb2.PlaceRequest(tenant=tenant)
    return str((await peer.unary(stub.Place, request, deadline=Deadline.after(10))).engine_id)


def certificate(settings: TlsSettings) -> bytes:
    return Path(settings.cert_file).read_bytes()


def replace(settings: TlsSettings, content: bytes | None) -> None:
    Path(settings.cert_file).unlink(missing_ok=True)
    if content is not None:
        Path(settings.cert_file).write_bytes(content)


@pytest.fixture
def fleet(tmp_path: Path) -> TlsSettings:
    return write_internal(tmp_path / "fleet")


def outsider(folder: Path, hosts: tuple[str, ...], authority: Authority, trusted: TlsSettings) -> TlsSettings:
    """A caller with a certificate of `authority` for `hosts`, who trusts the fleet."""
    pair = authority.issue(hosts[0], hosts)
    (folder / "o.pem").write_bytes(pair.cert)
    (folder / "o-key.pem").write_bytes(pair.key)
    return TlsSettings(
        cert_file=str(folder / "o.pem"),
        key_file=str(folder / "o-key.pem"),
        ca_file=trusted.ca_file,
        server_name=INTERNAL_NAME,
    )


async def test_the_environment_alone_turns_tls_on_for_server_client_and_probe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_internal(tmp_path)
    for name, value in internal_environ(tmp_path).items():
        monkeypatch.setenv(name, value)
    async with serving() as (address, routing), Peer(address) as peer:
        assert await place(peer) == "e-1"
        assert routing.callers == [(tmp_path / "cert.pem").read_bytes()]
        assert await probe(address, ROUTING)


async def test_a_caller_without_a_certificate_is_refused_and_told_so(fleet: TlsSettings) -> None:
    async with serving(fleet) as (address, routing):
        bare = TlsSettings(ca_file=fleet.ca_file, server_name=INTERNAL_NAME)
        async with Peer(address, tls=bare) as peer:
            with pytest.raises(Unavailable, match="may not accept this side's certificate: none is shown"):
                await place(peer)
        assert routing.callers == []


async def test_a_certificate_of_another_authority_is_refused(fleet: TlsSettings, tmp_path: Path) -> None:
    other = Authority.new("Headrace fleet")
    async with serving(fleet) as (address, routing):
        async with Peer(address, tls=outsider(tmp_path, (INTERNAL_NAME,), other, fleet)) as peer:
            with pytest.raises(Unavailable, match="may not accept this side's certificate"):
                await place(peer)
        assert routing.callers == []


async def test_a_certificate_of_the_right_authority_for_somebody_else_is_refused(
    fleet: TlsSettings, tmp_path: Path
) -> None:
    """Where one authority signs for a whole company."""
    folder = Path(fleet.ca_file).parent
    authority = Authority.parse(_pair(folder))
    async with serving(fleet) as (address, routing):
        async with Peer(address, tls=outsider(tmp_path, ("payroll.example",), authority, fleet)) as peer:
            with pytest.raises(Unauthenticated) as refused:
                await place(peer)
        assert refused.value.reason == "NOT_OF_THE_FLEET"
        assert routing.callers == []


def _pair(folder: Path) -> Pair:
    return Pair(cert=(folder / "ca.pem").read_bytes(), key=(folder / "ca-key.pem").read_bytes())


async def test_a_plain_caller_hears_that_the_server_may_speak_tls(fleet: TlsSettings) -> None:
    async with serving(fleet) as (address, _), Peer(address, tls=TlsSettings()) as peer:
        with pytest.raises(Unavailable, match="it may speak TLS, and this side does not"):
            await place(peer)


async def test_a_tls_caller_hears_that_the_server_is_plain(fleet: TlsSettings) -> None:
    async with serving(TlsSettings()) as (address, _), Peer(address, tls=fleet) as peer:
        with pytest.raises(Unavailable, match="the server speaks no TLS, and this side does"):
            await place(peer)


async def test_a_server_that_is_not_of_the_fleet_is_not_believed(fleet: TlsSettings, tmp_path: Path) -> None:
    impostor = write_internal(tmp_path / "impostor")
    open_door = TlsSettings(cert_file=impostor.cert_file, key_file=impostor.key_file)
    async with serving(open_door) as (address, routing), Peer(address, tls=fleet) as peer:
        with pytest.raises(Unavailable, match=r"not signed by .*ca\.pem"):
            await place(peer)
        assert routing.callers == []


async def test_a_server_of_the_authority_with_another_name_is_not_believed(fleet: TlsSettings, tmp_path: Path) -> None:
    folder = Path(fleet.ca_file).parent
    payroll = outsider(tmp_path, ("payroll.example",), Authority.parse(_pair(folder)), fleet)
    open_door = TlsSettings(cert_file=payroll.cert_file, key_file=payroll.key_file)
    async with serving(open_door) as (address, routing), Peer(address, tls=fleet) as peer:
        with pytest.raises(Unavailable, match=r"does not carry the name headrace\.internal"):
            await place(peer)
        assert routing.callers == []


async def test_an_edge_with_a_certificate_takes_callers_without_one(fleet: TlsSettings) -> None:
    edge = TlsSettings(cert_file=fleet.cert_file, key_file=fleet.key_file)
    async with serving(edge) as (address, routing), Peer(address, tls=TlsSettings(ca_file=fleet.ca_file)) as peer:
        assert await place(peer) == "e-1"
        assert routing.callers == [b""]


async def test_a_new_certificate_is_shown_and_used_without_a_restart(
    fleet: TlsSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both sides take it over; a call that was running then ends well, on its own connection."""
    monkeypatch.setattr(rotating_channel, "LOOK_PERIOD_S", 0.0)
    folder = Path(fleet.ca_file).parent
    async with serving(fleet) as (address, routing), Peer(address, tls=fleet) as peer:
        running = asyncio.create_task(place(peer, tenant="waits"))
        await eventually(lambda: routing.callers)
        first = certificate(fleet)
        assert await _shown(address, fleet) == _der(first)

        write_internal(folder)
        second = certificate(fleet)
        assert await place(peer) == "e-1"

        assert await _shown(address, fleet) == _der(second)
        assert routing.callers == [first, second]
        routing.hold.set()
        assert await running == "e-1"


async def _shown(address: str, fleet: TlsSettings) -> bytes:
    """The certificate that a new connection gets to see."""
    context = ssl.create_default_context(cafile=fleet.ca_file)
    context.load_cert_chain(fleet.cert_file, fleet.key_file)
    context.set_alpn_protocols(["h2"])
    host, _, port = address.rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port), ssl=context, server_hostname=INTERNAL_NAME)
    shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.transport.abort()
    return bytes(shown)


def _der(pem: bytes) -> bytes:
    return ssl.PEM_cert_to_DER_cert(pem.decode())


async def test_files_that_do_not_belong_together_leave_the_last_good_pair_in_force(
    fleet: TlsSettings, tmp_path: Path
) -> None:
    """Such as in the moment between the replacing of a certificate and that of its key."""
    before = certificate(fleet)
    async with serving(fleet) as (address, _):
        stranger = write_internal(tmp_path / "stranger")
        replace(fleet, certificate(stranger))
        files = tls_files(fleet)
        assert files.current().cert == before
        assert "are no certificate with its key" in files.fault
        replace(fleet, None)
        assert files.current().cert == before
        replace(fleet, before)
        async with Peer(address, tls=fleet) as peer:
            assert await place(peer) == "e-1"
        assert files.fault == ""


async def test_old_channels_are_closed_once_their_calls_have_ended(
    fleet: TlsSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rotating_channel, "LOOK_PERIOD_S", 0.0)
    monkeypatch.setattr(rotating_channel, "RETIRED_PERIOD_S", 0.01)
    async with serving(fleet) as (address, _), Peer(address, tls=fleet) as peer:
        assert await place(peer) == "e-1"
        channel: Any = peer.channel
        old = channel.current().channel
        write_internal(Path(fleet.ca_file).parent)
        assert await place(peer) == "e-1"
        await eventually(lambda: _is_shut(old))


def test_a_process_that_has_called_over_tls_exits_at_once(fleet: TlsSettings) -> None:
    """A channel or call left to the interpreter's end would cost it two seconds."""
    script = """
import asyncio, sys, time
from pathlib import Path
from headrace.base.deadline import Deadline
from headrace.cli.internal_tls import internal_settings
from headrace.rpc.client import Peer
from headrace.rpc.server import Server, ServerSettings

async def main():
    tls = internal_settings(Path(sys.argv[1]))
    server = Server(ServerSettings(tls=tls), service_name="test")
    async with Peer(await server.start(), tls=tls) as peer:
        await server.set_serving(True)
        assert await peer.healthy(deadline=Deadline.after(5))
    await server.drain(0)

asyncio.run(main())
print(time.time())
"""
    command = [sys.executable, "-c", script, str(Path(fleet.ca_file).parent)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert time.time() - float(ran.stdout.splitlines()[-1]) < 1.5


def _is_shut(channel: grpc.aio.Channel) -> bool:
    try:
        return channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN
    except grpc.aio.UsageError:
        return True


async def test_an_http_server_shows_a_new_certificate_without_a_restart(fleet: TlsSettings) -> None:
    edge = TlsSettings(cert_file=fleet.cert_file, key_file=fleet.key_file)
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=http_server_context(edge))
    async with server:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        for _ in range(2):
            assert await _shown(address, fleet) == _der(certificate(fleet))
            write_internal(Path(fleet.ca_file).parent)


@pytest.mark.parametrize("missing", ["CERT_FILE", "KEY_FILE", "CA_FILE"])
def test_half_of_the_settings_is_an_error_that_names_the_other_half(tmp_path: Path, missing: str) -> None:
    environ = internal_environ(tmp_path)
    del environ[f"HEADRACE_TLS_{missing}"]
    with pytest.raises(StartError, match=f"HEADRACE_TLS_{missing}"):
        TlsSettings.from_environ(environ)
    with pytest.raises(StartError, match="KEY_FILE"):
        TlsSettings.edge_from_environ({"HEADRACE_GATEWAY_EDGE_TLS_CERT_FILE": "/c.pem"})


@pytest.mark.parametrize("content", [b"", b"no PEM", None])
@pytest.mark.parametrize("file", ["ca.pem", "cert.pem", "key.pem"])
async def test_files_that_are_no_good_are_one_clear_line_at_the_start(
    tmp_path: Path, file: str, content: bytes | None
) -> None:
    write_internal(tmp_path)
    if content is None:
        (tmp_path / file).unlink()
    else:
        (tmp_path / file).write_bytes(content)
    with pytest.raises(StartError, match=file):
        await Server(ServerSettings(tls=internal_settings(tmp_path)), service_name="test").start()


def test_private_keys_are_readable_by_their_owner_alone(tmp_path: Path) -> None:
    write_internal(tmp_path)
    for name in ("ca-key.pem", "key.pem"):
        assert os.stat(tmp_path / name).st_mode & 0o077 == 0
