"""`python -m headrace.router`."""

from __future__ import annotations

import gc

from headrace.observe.log import configure_logging
from headrace.router.app import RouterApp
from headrace.router.settings import RouterSettings
from headrace.rpc.process import run

COLLECT_AT = (20_000, 20, 20)
"""Rarer than by default, because a placement makes many small objects and few cycles. The gain is small: 0.711 against
0.735 ms of processor time a placement in five rounds, 64 at a time, and the rounds differ by more."""

if __name__ == "__main__":
    configure_logging("router")
    gc.freeze()
    gc.set_threshold(*COLLECT_AT)
    raise SystemExit(
        run("router", RouterSettings, RouterApp, "Headrace router: which replica runs a request, and why.")
    )
