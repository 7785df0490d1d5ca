"""`python -m headrace.engine`."""

from __future__ import annotations

from headrace.engine.app import EngineApp
from headrace.engine.settings import EngineSettings
from headrace.observe.log import configure_logging
from headrace.rpc.process import run

if __name__ == "__main__":
    configure_logging("engine")
    raise SystemExit(
        run("engine", EngineSettings, EngineApp, "One replica of one model: paged-KV continuous batching over gRPC.")
    )
