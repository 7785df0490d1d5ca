"""The router's knobs."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.base.settings import knob


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings:
    """Chooses a replica for each request, and says why."""

    address: str = knob("127.0.0.1:0", help="host:port to serve RoutingService on; port 0 picks one")
    metrics_address: str = knob("", help="host:port of the Prometheus endpoint; empty for none")
    redis_url: str = knob(
        "redis://127.0.0.1:6379/0",
        help="Redis that holds the replica board and all routers' bookings",
        env="HEADRACE_REDIS_URL",
    )
    etcd_endpoints: tuple[str, ...] = knob(
        ("127.0.0.1:2379",),
        help="etcd members with the deployments' routing, host:port or https://host:port, comma-separated; "
        "empty: defaults for all",
        env="HEADRACE_ETCD_ENDPOINTS",
    )
    otlp_endpoint: str = knob("", help="host:port that takes traces; empty drops them", env="HEADRACE_OTLP_ENDPOINT")
    freshness_s: float = knob(
        10.0,
        help="oldest heartbeat on which a replica may be chosen, seconds; a deployment may say otherwise",
        least=0.1,
    )
    poll_period_s: float = knob(0.1, help="time between reads of the replica board, seconds", least=0.01, most=5.0)
    retry_after_s: float = knob(
        1.0, help="retry hint when nobody can be chosen, seconds (four heartbeats by default)", least=0.01, most=60.0
    )
    index_blocks: int = knob(1_000_000, help="prefix blocks indexed at most, all replicas together", least=0)
    predicted_s: float = knob(
        5.0, help="seconds for which the prefix of a request just placed counts as cached there", least=0.0, most=60.0
    )
    remembered: int = knob(4096, help="newest requests whose decisions can be explained", least=0, most=1_000_000)
    grace_s: float = knob(5.0, help="longest wait for running calls when draining, seconds", least=0.0)
