"""The controller's knobs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from headrace.base.settings import knob


class ProvisionerName(Enum):
    """Who runs the engine processes."""

    LOCAL = "local"
    EXTERNAL = "external"


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerSettings:
    """Desired replicas made real."""

    address: str = knob("127.0.0.1:8720", help="host:port to serve ControlService on")
    metrics_address: str = knob("", help="host:port for Prometheus metrics; empty: none")
    etcd_endpoints: tuple[str, ...] = knob(
        ("127.0.0.1:2379",),
        help="etcd members, host:port or https://host:port, comma-separated",
        env="HEADRACE_ETCD_ENDPOINTS",
    )
    redis_url: str = knob("redis://127.0.0.1:6379/0", help="Redis with the heartbeats", env="HEADRACE_REDIS_URL")
    otlp_endpoint: str = knob(
        "", help="host:port that takes OTLP traces; empty: spans are dropped", env="HEADRACE_OTLP_ENDPOINT"
    )
    provisioner: ProvisionerName = knob(
        ProvisionerName.LOCAL, help="local: engines are processes of this machine; external: something else runs them"
    )
    data_dir: str = knob("headrace-data", help="folder for the records and logs of local engines")
    period_s: float = knob(1.0, help="seconds between looks when nothing changes", least=0.05, most=60)
    action_timeout_s: float = knob(10.0, help="seconds one start or stop may take", least=0.1)
    leader_ttl_s: int = knob(
        10, help="seconds after which another controller may lead when this one is silent", least=2, most=300
    )
    drain_s: float = knob(45.0, help="seconds after which a draining engine is killed; above the engine's own grace")
    longest_restart_s: float = knob(60.0, help="longest wait before a crashed engine is started again", least=0.5)
    stop_engines_on_exit: bool = knob(
        False, help="stop all engines of data_dir when told to stop; for a stack with one controller, on one machine"
    )
    exit_grace_s: float = knob(
        10.0, help="seconds engines may drain when the controller stops them at its end", least=0
    )

    def __post_init__(self) -> None:
        if not self.etcd_endpoints:
            raise ValueError("etcd_endpoints names no etcd member; give at least one host:port")
