"""docker-compose.yml: read, checked against the tree, and lived: each service's own command and environment."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import re
import shutil
import subprocess
import sys
import tomllib
import urllib.request
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.api.common.v1 import answer_pb2
from headrace.api.telemetry.v1 import telemetry_service_pb2 as telemetry_pb
from headrace.api.telemetry.v1 import telemetry_service_pb2_grpc as telemetry_grpc
from headrace.base.deadline import Deadline
from headrace.cli.child import Child, Lifeline, free_port, kill_tree
from headrace.coord.embedded import EmbeddedEtcd, EmbeddedRedis
from headrace.rpc.client import Peer
from headrace.testkit.cluster import Client
from headrace.testkit.eventually import eventually

ROOT = Path(__file__).parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
FIVE = ("gateway", "router", "engine", "controller", "telemetry")
OURS = [name for name, service in SERVICES.items() if "build" in service]

pytestmark = pytest.mark.timeout(180)


# --- read ----------------------------------------------------------------------------------------------------------


def dockerfile(name: str) -> str:
    """A Dockerfile with its continued lines joined."""
    return (ROOT / f"services/{name}/Dockerfile").read_text().replace("\\\n", " ")


def installed_packages(name: str) -> set[str]:
    """Folders that a Dockerfile installs with pip, such as libs/api."""
    return {word.removeprefix("./") for word in dockerfile(name).split() if word.startswith("./libs/")} | {
        word.removeprefix("./") for word in dockerfile(name).split() if word.startswith("./services/")
    }


def requirements(folder: str) -> list[str]:
    project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
    return list(project["dependencies"])


def environment_of(name: str, setting: str) -> str:
    return str(SERVICES[name]["environment"][setting])


def port_in(address: str) -> int:
    return int(address.rpartition(":")[2])


def test_the_five_services_and_all_they_stand_on_are_there() -> None:
    assert set(OURS) == {*FIVE, "setup"}
    images = {name: service["image"].partition(":")[0] for name, service in SERVICES.items() if "build" not in service}
    assert images == {
        "redis": "redis",
        "etcd": "quay.io/coreos/etcd",
        "prometheus": "prom/prometheus",
        "otel-collector": "otel/opentelemetry-collector",
    }
    assert all(":" in service["image"] for name, service in SERVICES.items() if name not in OURS), "pinned by tag"


@pytest.mark.parametrize("name", OURS)
def test_each_service_of_ours_says_how_it_is_built_started_and_set_up(name: str) -> None:
    service = SERVICES[name]
    assert (ROOT / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
    assert service["command"]
    assert all(setting.startswith("HEADRACE_") for setting in service["environment"])
    for needed in service.get("depends_on", {}):
        assert needed in SERVICES
    for volume in service.get("volumes", []):
        assert volume.startswith("/") or volume.partition(":")[0] in COMPOSE["volumes"]


@pytest.mark.parametrize("name", FIVE)
def test_containers_get_the_time_their_service_takes_to_drain(name: str) -> None:
    settings: Any = importlib.import_module(f"headrace.{name}.settings")
    (kind,) = (t for n, t in vars(settings).items() if n == f"{name.title()}Settings")
    own = {f.name: f.default for f in dataclasses.fields(kind)} | {
        setting.removeprefix(f"HEADRACE_{name.upper()}_").lower(): value
        for setting, value in SERVICES[name]["environment"].items()
    }
    # The controller's drain_s is for engines it runs itself; here compose runs them.
    longest = max(float(own.get(grace, 0)) for grace in ("grace_s", *(["drain_s"] if name != "controller" else [])))
    assert float(SERVICES[name]["stop_grace_period"].removesuffix("s")) >= longest + 5


@pytest.mark.parametrize("name", FIVE)
def test_each_dockerfile_copies_and_installs_what_there_is_and_all_that_is_needed(name: str) -> None:
    text = dockerfile(name)
    for sources in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE):
        assert all((ROOT / source).exists() for source in sources.split())
    installed = installed_packages(name)
    assert f"services/{name}" in installed
    for folder in installed:
        for requirement in requirements(folder):
            found = re.match(r"headrace-([a-z]+)", requirement)
            assert not found or f"libs/{found[1]}" in installed, f"{folder} needs {requirement}"
    assert re.search(r"^USER \d+$", text, re.MULTILINE), "not root"
    assert f'CMD ["python", "-m", "headrace.{name}"]' in text
    exposed = set(re.findall(r"\d+", re.search(r"^EXPOSE (.+)$", text, re.MULTILINE)[1]))  # type: ignore[index]
    upper = name.upper()
    for setting in (f"HEADRACE_{upper}_ADDRESS", f"HEADRACE_{upper}_METRICS_ADDRESS"):
        assert str(port_in(environment_of(name, setting))) in exposed


def test_only_the_engines_image_has_torch() -> None:
    for name in FIVE:
        wanted = {r for folder in installed_packages(name) for r in requirements(folder)}
        assert any(r.startswith("torch") for r in wanted) == (name == "engine")
        assert ("install" in dockerfile(name) and "torch==" in dockerfile(name)) == (name == "engine")


def test_prometheus_scrapes_every_service_where_it_serves_metrics() -> None:
    config = yaml.safe_load((ROOT / "deploy/prometheus.yml").read_text())
    (found,) = config["scrape_configs"][0]["dns_sd_configs"]
    assert set(found["names"]) == set(FIVE)
    ports = {port_in(environment_of(name, f"HEADRACE_{name.upper()}_METRICS_ADDRESS")) for name in FIVE}
    assert ports == {found["port"]}


def test_the_collector_takes_spans_where_services_send_them_and_hands_them_to_telemetry() -> None:
    config = yaml.safe_load((ROOT / "deploy/otel-collector.yml").read_text())
    taken = port_in(config["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"])
    sent = {
        s["environment"]["HEADRACE_OTLP_ENDPOINT"]
        for s in SERVICES.values()
        if "HEADRACE_OTLP_ENDPOINT" in s.get("environment", {})
    }
    assert sent == {f"otel-collector:{taken}"}
    served = port_in(environment_of("telemetry", "HEADRACE_TELEMETRY_ADDRESS"))
    assert config["exporters"]["otlp/telemetry"]["endpoint"] == f"telemetry:{served}"
    for kind, names in config["service"]["pipelines"]["traces"].items():
        assert set(names) <= set(config[kind])


@pytest.mark.parametrize("name", ["prometheus", "otel-collector"])
def test_mounted_files_are_there_and_are_the_ones_the_command_reads(name: str) -> None:
    (mount,) = SERVICES[name]["volumes"]
    source, target, mode = mount.split(":")
    assert (ROOT / source).is_file()
    assert mode == "ro"
    assert any(word.endswith(f"={target}") for word in SERVICES[name]["command"])


def test_compose_accepts_the_file_where_its_client_exists() -> None:
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "compose", "version"], capture_output=True, timeout=30).returncode:
        pytest.skip("no docker compose client here")
    checked = subprocess.run(
        [docker, "compose", "-f", str(ROOT / "docker-compose.yml"), "config", "--quiet"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert checked.returncode == 0, checked.stderr


def test_a_wheel_of_the_generated_code_is_whole_when_built_from_a_clean_tree(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "protos", tmp_path / "protos")
    # As .dockerignore has it: what was generated here does not go along.
    shutil.copytree(ROOT / "libs/api", tmp_path / "libs/api", ignore=shutil.ignore_patterns("src", "__pycache__"))
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-index"),
            *("--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path), str(tmp_path / "libs/api")),
        ],
        check=True,
        timeout=60,
    )
    (wheel,) = tmp_path.glob("headrace_api-*.whl")
    content = set(zipfile.ZipFile(wheel).namelist())
    for proto in (ROOT / "protos").rglob("*.proto"):
        stem = str(proto.relative_to(ROOT / "protos").with_suffix(""))
        assert {f"{stem}_pb2.py", f"{stem}_pb2_grpc.py", f"{stem}_pb2.pyi"} <= content
    assert "libs/api/src" in (ROOT / ".dockerignore").read_text().splitlines()


# --- lived ---------------------------------------------------------------------------------------------------------


class Host:
    """The services of the compose file as processes of this machine: names become ports, volumes become folders."""

    def __init__(self, folder: Path, etcd: EmbeddedEtcd, redis: EmbeddedRedis) -> None:
        self._folder = folder
        self._ports: dict[tuple[str, int], int] = {}
        self._etcd = etcd
        self._redis = redis
        self.lifeline = Lifeline()
        self.children: dict[str, Child] = {}

    def address(self, name: str, port: int) -> str:
        """Where `name:port` of the compose network is here."""
        if name == "etcd":
            return self._etcd.endpoint
        if name == "otel-collector":  # hands on to telemetry, as deploy/otel-collector.yml says
            return self.address("telemetry", port_in(environment_of("telemetry", "HEADRACE_TELEMETRY_ADDRESS")))
        return f"127.0.0.1:{self._ports.setdefault((name, port), free_port())}"

    def path(self, name: str, inside: str) -> Path:
        """The folder here of a path inside a container: named volumes are shared, others are its own."""
        mounts: dict[str, Path] = {}
        for volume in SERVICES[name].get("volumes", []):
            source, _, target = (
                volume.rpartition(":") if volume.count(":") < 2 else volume.rsplit(":", 1)[0].partition(":")
            )
            # One without a name is the container's own.
            mounts[target] = self._folder / "volumes" / (source or f"{name}{target}")
        mounts |= {str(mount): self._folder / name / mount.strip("/") for mount in SERVICES[name].get("tmpfs", [])}
        for mount, here in mounts.items():
            if inside == mount or inside.startswith(f"{mount}/"):
                here.mkdir(parents=True, exist_ok=True)
                return here / inside.removeprefix(mount).lstrip("/")
        raise AssertionError(f"{name} uses {inside}, which is on no volume: its file system is read-only")

    def translated(self, name: str, text: str) -> str:
        """A word of a service's command or environment, as it has to be here."""
        if text.startswith("redis://redis:"):
            return self._redis.url
        if text.startswith("/"):
            return str(self.path(name, text))
        text = re.sub(r"\$\{\w+:-(.*?)\}", r"\1", text)  # as compose reads it where the variable is not set
        text = text.replace("$$", "$")  # compose's way to write a $

        def local(found: re.Match[str]) -> str:
            host = found[1] if found[1] in SERVICES else name
            return self.address(host, int(found[2]))

        return re.sub(r"(0\.0\.0\.0|127\.0\.0\.1|\$\(hostname\)|[a-z][a-z-]+):(\d+)\b", local, text)

    def child(self, name: str, command: list[str], *, label: str) -> Child:
        """`command` in the environment of `name`; `python` is this interpreter, found by PATH."""
        environ = {k: self.translated(name, str(v)) for k, v in SERVICES[name]["environment"].items()}
        environ |= {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "PYTHONUNBUFFERED": "1"}
        child = Child(
            name=label,
            command=[self.translated(name, word) for word in command],
            environ=environ,
            log_path=self._folder / f"{label}.log",
            lifeline=self.lifeline,
        )
        self.children[label] = child
        child.start()
        return child

    def start(self, name: str) -> Child:
        return self.child(name, SERVICES[name]["command"], label=name)

    async def until_healthy(self, name: str) -> None:
        """Wait until the service's own health check says so."""
        kind, *command = SERVICES[name]["healthcheck"]["test"]
        assert kind == "CMD"
        while True:
            service = self.children[name]
            assert service.alive, f"{name} ended: {service.last_words()}"
            probe = self.child(name, command, label=f"{name}-probe")
            await asyncio.to_thread(probe.wait, 30.0)
            if probe.exit_status == 0:
                return

    def close(self) -> None:
        for child in self.children.values():
            child.terminate()
        for child in self.children.values():
            child.wait(10.0)
            kill_tree(child.pid)
        self.lifeline.cut()


def fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=5) as response:
        text: str = response.read().decode()
    return text


@pytest.fixture
async def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Host]:
    for name in ("HEADRACE_HOME", "HEADRACE_GATEWAY", "HEADRACE_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    with EmbeddedEtcd.start(tmp_path / "etcd") as etcd, EmbeddedRedis.start(tmp_path / "redis") as redis:
        made = Host(tmp_path, etcd, redis)
        try:
            yield made
        finally:
            made.close()


async def test_the_services_as_compose_starts_them_stream_an_answer_with_the_key_that_setup_made(host: Host) -> None:
    setup = host.start("setup")
    for name in FIVE:
        if "setup" not in SERVICES[name].get("depends_on", {}):
            host.start(name)
    await eventually(lambda: setup.exit_status is not None, within_s=60)
    assert setup.exit_status == 0, setup.last_words()
    host.start("controller")
    for name in FIVE:
        await host.until_healthy(name)

    shown = host.child("controller", ["headrace", "key", "show"], label="key")
    await eventually(lambda: shown.exit_status == 0, within_s=30)
    key = shown.log_path.read_text().strip()
    model = environment_of("engine", "HEADRACE_ENGINE_DEPLOYMENT")
    gateway = host.address("gateway", port_in(environment_of("gateway", "HEADRACE_GATEWAY_ADDRESS")))
    async with Peer(gateway) as peer:
        client = Client(peer, key)
        answer = await client.generate(model=model, text="Once upon a time", sampling={"max_tokens": 8})
    assert answer.started is not None
    request_id = answer.started.request_id
    assert answer.end.finish_reason == answer_pb2.FINISH_REASON_LENGTH
    assert len(answer.token_ids) == 8
    assert answer.text

    telemetry = host.address("telemetry", port_in(environment_of("telemetry", "HEADRACE_TELEMETRY_ADDRESS")))
    async with Peer(telemetry) as peer:
        stub = telemetry_grpc.TelemetryServiceStub(peer.channel)

        async def traced() -> bool:
            request = telemetry_pb.ListTracesRequest(limit=10)
            listed = await peer.unary(stub.ListTraces, request, deadline=Deadline.after(5))
            return any(t.request_id == request_id for t in listed.traces)

        await eventually(traced)
    for name in FIVE:
        metrics = host.address(name, port_in(environment_of(name, f"HEADRACE_{name.upper()}_METRICS_ADDRESS")))
        assert "# TYPE" in await asyncio.to_thread(fetch, f"http://{metrics}/metrics")
