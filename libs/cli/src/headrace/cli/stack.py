"""The local stack: Redis and etcd, five kinds of service process, started in order, watched, drained in order.

launcher ─┬─ etcd, valkey          (killed by the kernel when the launcher dies)
          ├─ telemetry, controller, router, gateway     ┐ drain by themselves when the lifeline ends,
          └─ (controller) ── engines                     ┘ even after kill -9 of the launcher
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from headrace.api.control.v1.intent_pb2 import Bundle
from headrace.base.backoff import Backoff
from headrace.base.errors import StartError
from headrace.base.tls import TlsSettings
from headrace.bundle import keys
from headrace.cli.child import Child, Lifeline, free_port, port_is_free, python_module
from headrace.cli.home import Home, StackRecord
from headrace.cli.intent import Wanted, apply, describe_wanted, etcd_client, local_key, other_deployments
from headrace.cli.internal_tls import internal_environ, internal_settings
from headrace.cli.mark import MARK_ENV, kill_marked
from headrace.coord.embedded import EmbeddedEtcd, EmbeddedRedis

DEFAULT_PORT = 8700
DEFAULT_HTTP_PORT = 8701
# The engine is the slowest to come up, so the controller that starts it goes first.
START_ORDER = ("controller", "router", "gateway", "telemetry")
# Gateway first: it stops taking requests and lets answers finish while everything they need still runs.
DRAIN_ORDER = ("gateway", "router", "controller", "telemetry")

ANSWERS_GRACE_S = 60.0
"""How long running answers may take to end: a default answer's 1024 tokens at 20 tokens/s need 51 s."""

# A little above what the services themselves allow: the controller gives its engines 10 s.
GRACE_S = {"gateway": ANSWERS_GRACE_S + 5.0, "controller": 15.0}
OTHER_GRACE_S = 7.0

WATCH_PERIOD_S = 0.2
STEADY_S = 60.0
"""A service that ran this long had a good start: its next restart comes quickly again."""

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StackSettings:
    """How a local stack is started; `port` None takes DEFAULT_PORT, or a free one when that is taken.

    With `tls` its services prove themselves to each other with certificates of an authority in the data folder.
    """

    wanted: Wanted
    port: int | None = None
    tls: bool = False


class LocalStack:
    """One running stack on one data folder."""

    def __init__(self, home: Home, settings: StackSettings, progress: Progress) -> None:
        self.home = home
        self.settings = settings
        self.progress = progress
        self.children: dict[str, Child] = {}
        self.addresses: dict[str, str] = {}
        self.http_address = ""
        self.metrics: dict[str, str] = {}
        self.api_key = ""
        self._prefix_cache_key = secrets.token_hex(32)  # gateway and engines must agree; nobody else may know
        self.replicas = 0
        self._lifeline: Lifeline | None = None
        self._etcd: EmbeddedEtcd | None = None
        self._redis: EmbeddedRedis | None = None

    async def start(self) -> None:
        """Take the data folder and start everything up to the gateway; StartError leaves nothing running."""
        self.home.create()
        self.home.lock()
        try:
            port = self._gateway_port()
            for name in await asyncio.to_thread(kill_marked, self.home.mark):
                self.progress(f"ended {name}, left over from an earlier stack")
            self.home.clear_past()
            if self.settings.tls:
                await asyncio.to_thread(_make_certificates, self.home.tls)
            self._lifeline = Lifeline()
            await self._write_intent(await self._start_stores())
            self._start_services(port)
            self._publish()
        except BaseException:
            await self.stop()
            raise

    @property
    def tls(self) -> TlsSettings | None:
        """How its services are called; None: as the environment says."""
        return internal_settings(self.home.tls) if self.settings.tls else None

    def _gateway_port(self) -> int:
        if self.settings.port is not None:
            if not port_is_free(self.settings.port):
                raise StartError(f"--port {self.settings.port} is taken on 127.0.0.1: choose another or leave it out")
            return self.settings.port
        return DEFAULT_PORT if port_is_free(DEFAULT_PORT) else free_port()

    def _http_port(self, taken: int) -> int:
        return DEFAULT_HTTP_PORT if taken != DEFAULT_HTTP_PORT and port_is_free(DEFAULT_HTTP_PORT) else free_port()

    async def _start_stores(self) -> Bundle:
        """Start etcd and Redis; meanwhile read the model's weights once, for its bundle."""
        etcd, redis, bundle = await asyncio.gather(
            asyncio.to_thread(EmbeddedEtcd.start, self.home.path),
            asyncio.to_thread(EmbeddedRedis.start, self.home.path),
            asyncio.to_thread(describe_wanted, self.settings.wanted),
            return_exceptions=True,
        )
        # Each is kept as soon as it runs, so that a failure of another still ends it.
        self._etcd = etcd if isinstance(etcd, EmbeddedEtcd) else None
        self._redis = redis if isinstance(redis, EmbeddedRedis) else None
        for outcome in (bundle, etcd, redis):
            if isinstance(outcome, BaseException):
                raise outcome
        assert self._etcd is not None
        assert self._redis is not None
        assert isinstance(bundle, Bundle)
        self.addresses |= {"etcd": self._etcd.endpoint, "redis": f"127.0.0.1:{self._redis.port}"}
        self.progress("etcd and redis are up")
        return bundle

    async def _write_intent(self, bundle: Bundle) -> None:
        async with etcd_client([self.addresses["etcd"]]) as etcd:
            # A controller that was killed still holds the lead until its lease ends, 10 s after etcd's start. It is
            # known to be gone, as is everything else of an earlier stack, so nobody has to wait for that.
            for candidate in (await etcd.range(keys.LEADERS)).entries:
                await etcd.delete(candidate)
            self.api_key = await local_key(etcd, self.home)
            deployment = await apply(etcd, self.settings.wanted, bundle=bundle)
            others = await other_deployments(etcd, deployment.name)
        self.replicas = deployment.replicas
        self.progress(f"wanted: {deployment.replicas} x {deployment.name}")
        for other in others:
            self.progress(f"wanted since an earlier `headrace up` or `apply`: {other}")

    def _start_services(self, gateway_port: int) -> None:
        self.http_address = f"127.0.0.1:{self._http_port(gateway_port)}"
        for name in START_ORDER:
            self.addresses[name] = f"127.0.0.1:{gateway_port if name == 'gateway' else free_port()}"
            self.metrics[name] = f"127.0.0.1:{free_port()}"
        for name in START_ORDER:
            self.children[name] = Child(
                name=name,
                command=python_module(f"headrace.{name}"),
                environ=self._environ(name),
                log_path=self.home.logs / f"{name}.log",
                lifeline=self._lifeline,
            )
            self.children[name].start()

    def _environ(self, name: str) -> Mapping[str, str]:
        assert self._redis is not None
        own = {
            "gateway": {
                "HEADRACE_GATEWAY_GRACE_S": str(ANSWERS_GRACE_S),
                "HEADRACE_GATEWAY_HTTP_ADDRESS": self.http_address,
                "HEADRACE_GATEWAY_DATA_DIR": str(self.home.path / "gateway"),
                "HEADRACE_GATEWAY_TELEMETRY_ADDRESS": self.addresses["telemetry"],
            },
            "telemetry": {"HEADRACE_TELEMETRY_DATA_DIR": str(self.home.path / "telemetry")},
            "controller": {
                "HEADRACE_CONTROLLER_DATA_DIR": str(self.home.path),
                "HEADRACE_CONTROLLER_STOP_ENGINES_ON_EXIT": "true",
            },
        }
        tls = internal_environ(self.home.tls) if self.settings.tls else {}
        return (
            {
                MARK_ENV: self.home.mark,
                "HEADRACE_ETCD_ENDPOINTS": self.addresses["etcd"],
                "HEADRACE_REDIS_URL": self._redis.url,
                "HEADRACE_OTLP_ENDPOINT": self.addresses["telemetry"],
                "HEADRACE_ROUTER_ADDRESSES": self.addresses["router"],
                "HEADRACE_PREFIX_CACHE_KEY": self._prefix_cache_key,
                f"HEADRACE_{name.upper()}_ADDRESS": self.addresses[name],
                f"HEADRACE_{name.upper()}_METRICS_ADDRESS": self.metrics[name],
            }
            | tls
            | own.get(name, {})
        )

    def _publish(self) -> None:
        processes = {name: c.pid for name, c in self.children.items()}
        assert self._etcd is not None
        assert self._redis is not None
        processes |= {"etcd": self._etcd.pid, "redis": self._redis.pid}
        self.home.write_record(
            StackRecord(
                pid=os.getpid(),
                create_time=psutil.Process().create_time(),
                addresses=self.addresses,
                metrics=self.metrics,
                processes=processes,
                create_times=_create_times(processes),
                tls_folder=str(self.home.tls) if self.settings.tls else "",
            )
        )

    async def watch(self) -> None:
        """Restart services that end by themselves, with growing delays, until cancelled.

        StartError when Redis or etcd is gone: they hold the stack's memory and are not brought back empty.
        """
        restarts = {name: Restart(child) for name, child in self.children.items()}
        while True:
            await asyncio.sleep(WATCH_PERIOD_S)
            for name, store in (("etcd", self._etcd), ("redis", self._redis)):
                if store is not None and not store.running:
                    raise StartError(f"{name} ended by itself: see {self.home.logs / name}.log")
            for restart in restarts.values():
                said = restart.look(time.monotonic())
                if said:
                    self.progress(said)
                    self._publish()

    def failed_start(self) -> str | None:
        """What a service that ended before the stack was ready said; None when all run."""
        for name, service in self.children.items():
            if not service.alive:
                return f"{name} could not start: {service.last_words()}"
        return None

    async def stop(self) -> list[str]:
        """Drain in order, then end the stores; returns what had to be killed. Nothing of the stack runs afterwards."""
        killed = []
        for name in DRAIN_ORDER:
            service = self.children.get(name)
            if service is None or not service.alive:
                continue
            more = ": running answers end first; Ctrl-C again cuts them off" if name == "gateway" else ""
            self.progress(f"draining {name}{more}")
            if not await asyncio.to_thread(service.stop, GRACE_S.get(name, OTHER_GRACE_S)):
                killed.append(name)
        # Engines whose controller could not stop them; the lifeline alone would let them outlive us for a while.
        killed += await asyncio.to_thread(kill_marked, self.home.mark)
        for store in (self._redis, self._etcd):
            if store is not None:
                await asyncio.to_thread(store.stop)
        if self._lifeline is not None:
            self._lifeline.cut()
            self._lifeline = None
        self.home.clear_record()
        self.home.release()
        return killed

    def hurry(self) -> None:
        """Kill what still drains; a `stop` that waits for it goes on at once."""
        kill_marked(self.home.mark)


class Restart:
    """One service's restarts: when it ended, when it is due again."""

    def __init__(self, service: Child) -> None:
        self._service = service
        self._backoff = Backoff(first_s=0.5, longest_s=10.0)
        self._due: float | None = None
        self._started = time.monotonic()

    def look(self, now: float) -> str:
        """Start it again when it has ended and its delay is over; returns what happened, for people, or ""."""
        service = self._service
        if service.alive:
            return ""
        if self._due is None:
            if now - self._started > STEADY_S:
                self._backoff.reset()
            delay = self._backoff.next_s()
            self._due = now + delay
            return f"{service.name} ended ({service.last_words()}): starting it again in {delay:.1f} s"
        if now < self._due:
            return ""
        self._due, self._started = None, now
        service.start()
        return f"{service.name} was started again, as process {service.pid}"


def _make_certificates(folder: Path) -> None:
    from headrace.cli.certs import write_internal  # loads a library that is needed with --tls only

    write_internal(folder)


def _create_times(processes: Mapping[str, int]) -> dict[str, float]:
    times = {}
    for name, pid in processes.items():
        try:
            times[name] = psutil.Process(pid).create_time()
        except psutil.NoSuchProcess:
            continue
    return times
