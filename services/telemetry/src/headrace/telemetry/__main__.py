"""`python -m headrace.telemetry`."""

from __future__ import annotations

from headrace.observe.log import configure_logging
from headrace.rpc.process import run
from headrace.telemetry.app import TelemetryApp
from headrace.telemetry.settings import TelemetrySettings

if __name__ == "__main__":
    configure_logging("telemetry")
    raise SystemExit(
        run(
            "telemetry",
            TelemetrySettings,
            TelemetryApp,
            "Headrace telemetry: keeps traces and answers for them.",
            awaited=False,
        )
    )
