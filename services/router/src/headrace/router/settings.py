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
        "redis://127.0.0.1:6379/0", help="Redis that holds the replica board", env="HEADRACE_REDIS_URL"
    )
    otlp_endpoint: str = knob("", help="host:port that takes traces; empty drops them", env="HEADRACE_OTLP_ENDPOINT")
    freshness_s: float = knob(10.0, help="oldest heartbeat on which a replica may be chosen, seconds", least=0.1)
    poll_period_s: float = knob(0.1, help="time between reads of the replica board, seconds", least=0.01, most=5.0)
    retry_after_s: float = knob(
        1.0, help="retry hint when nobody can be chosen, seconds (four heartbeats by default)", least=0.01, most=60.0
    )
    grace_s: float = knob(5.0, help="longest wait for running calls when draining, seconds", least=0.0)
