"""`python -m headrace.gateway`."""

from __future__ import annotations

from headrace.gateway.app import GatewayApp
from headrace.gateway.settings import GatewaySettings
from headrace.observe.log import configure_logging
from headrace.rpc.process import run

if __name__ == "__main__":
    configure_logging("gateway")
    raise SystemExit(
        run("gateway", GatewaySettings, GatewayApp, "Headrace gateway: who may enter, and the way of one request.")
    )
