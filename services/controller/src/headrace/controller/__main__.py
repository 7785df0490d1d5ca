"""`python -m headrace.controller`"""

from __future__ import annotations

from headrace.controller.app import ControllerApp
from headrace.controller.settings import ControllerSettings
from headrace.observe.log import configure_logging
from headrace.rpc.process import run

if __name__ == "__main__":
    configure_logging("controller")
    raise SystemExit(
        run("controller", ControllerSettings, ControllerApp, "Starts and stops engines until observed equals desired.")
    )
