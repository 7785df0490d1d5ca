"""Build hook: compile the CPU kernels beside their Python module, if there is a compiler."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = "src/headrace/engine/kernels/cpu"


class KernelsHook(BuildHookInterface):  # type: ignore[type-arg]
    """Without a compiler the package is installed all the same: the engine then computes with torch, and says so."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """See hatchling."""
        spec = importlib.util.spec_from_file_location("kernels_build", Path(self.root) / FOLDER / "build.py")
        assert spec is not None
        assert spec.loader is not None
        kernels = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(kernels)
        try:
            kernels.build()
        except kernels.BuildError as error:
            self.app.display_warning(
                f"headrace-engine: the CPU kernels were not built, so models compute with torch, at about half the"
                f" speed. Once there is a C++17 compiler: python -m headrace.engine.kernels.cpu.build\n{error}"
            )
            return
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
