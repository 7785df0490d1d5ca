"""The gateway's knobs."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.base.prefix import PrefixKey
from headrace.base.settings import knob


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """Who may enter, and the way of one request."""

    address: str = knob("127.0.0.1:8700", help="host:port to serve clients on")
    http_address: str = knob("", help="host:port to serve OpenAI's HTTP protocol on; empty: not served")
    stalled_reader_s: float = knob(30.0, help="seconds after which a client that takes nothing is cut off", least=1)
    metrics_address: str = knob("", help="host:port for Prometheus metrics; empty: none")
    etcd_endpoints: tuple[str, ...] = knob(
        ("127.0.0.1:2379",),
        help="etcd members, host:port or https://host:port, comma-separated",
        env="HEADRACE_ETCD_ENDPOINTS",
    )
    router_addresses: tuple[str, ...] = knob(
        ("127.0.0.1:8710",), help="routers, host:port, comma-separated", env="HEADRACE_ROUTER_ADDRESSES"
    )
    redis_url: str = knob(
        "redis://127.0.0.1:6379/0", help="Redis that holds rates and quotas", env="HEADRACE_REDIS_URL"
    )
    telemetry_address: str = knob(
        "", help="host:port of telemetry, for usage and audit records; empty: they stay in data_dir"
    )
    data_dir: str = knob("", help="folder for usage records not delivered yet; empty: they end with this process")
    otlp_endpoint: str = knob(
        "", help="host:port that takes OTLP traces; empty: spans are dropped", env="HEADRACE_OTLP_ENDPOINT"
    )
    prefix_cache_key: str = knob(
        "",
        help="secret of the prefix hashes, hexadecimal, the same as the engines'; empty: routers count no reuse",
        env="HEADRACE_PREFIX_CACHE_KEY",
    )
    gateway_id: str = knob("", help="this gateway's id in logs and traces; empty: one is made up")
    grace_s: float = knob(10.0, help="seconds running answers may take to finish after SIGTERM", least=0)
    propagation_s: float = knob(0.0, help="seconds between NOT_SERVING and refusing new calls", least=0)
    default_deadline_s: float = knob(300.0, help="seconds a request may take whose client sets no deadline", least=1)
    max_message_bytes: int = knob(4 << 20, help="largest request in bytes", least=1 << 16, most=64 << 20)
    max_attempts: int = knob(3, help="engines one request may try, the first included", least=1, most=10)
    retry_ratio: float = knob(0.1, help="retries allowed per request over 10 s, all requests together", least=0, most=1)
    retry_floor: int = knob(10, help="retries allowed in any 10 s, however few the requests", least=0)
    place_wait_s: float = knob(2.0, help="longest wait in all for a router to find a replica", least=0, most=60)
    resume_wait_s: float = knob(15.0, help="the same for a request that has lost its engine", least=0, most=120)
    place_timeout_s: float = knob(1.0, help="seconds after which another router is asked", least=0.01)
    stall_s: float = knob(10.0, help="seconds without a token after which a running answer moves elsewhere", least=0.1)
    quarantine_s: float = knob(10.0, help="seconds an engine that sent garbage is left alone", least=0)
    suspect_s: float = knob(5.0, help="seconds an engine that was lost is asked last", least=0)
    queue_max_requests: int = knob(1024, help="requests that may wait per deployment while it is full", least=1)
    queue_max_bytes: int = knob(64 << 20, help="memory for the prompts of those that wait", least=1 << 16)
    queue_max_wait_s: float = knob(30.0, help="longest wait for a place, seconds", least=0.1)
    queue_starvation_s: float = knob(
        5.0, help="seconds after which a lower class that waits gets one turn before higher ones", least=0.1
    )
    quota_lease_s: float = knob(
        30.0, help="seconds after which what a dead gateway had reserved of its tenants' limits returns", least=1
    )
    attach_idle_s: float = knob(60.0, help="seconds after which an unused stream to an engine is closed", least=1)
    keepalive_s: float = knob(
        1.0, help="seconds between pings to engines and routers, and for their answer", least=0.1, most=60
    )

    def __post_init__(self) -> None:
        if not self.etcd_endpoints:
            raise ValueError("etcd_endpoints names no etcd member; give at least one host:port")
        if self.prefix_cache_key:
            try:
                PrefixKey.parse(self.prefix_cache_key)
            except ValueError as error:
                raise ValueError(f"prefix_cache_key: {error}") from None
        if not self.router_addresses:
            raise ValueError("router_addresses names no router; give at least one host:port")
