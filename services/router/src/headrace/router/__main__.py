"""`python -m headrace.router`."""

from __future__ import annotations

from headrace.observe.log import configure_logging
from headrace.router.app import RouterApp
from headrace.router.settings import RouterSettings
from headrace.rpc.process import run

if __name__ == "__main__":
    configure_logging("router")
    raise SystemExit(
        run("router", RouterSettings, RouterApp, "Headrace router: which replica runs a request, and why.")
    )
