"""Hatch build hook: generate the Python code for `protos/` into `src/`; nothing generated is committed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

HERE = Path(__file__).resolve().parent


class ProtoBuildHook(BuildHookInterface):
    """Run protoc before any build of this package, editable installs included."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Generate; a failing protoc fails the build with its own message."""
        generate(HERE)


def generate(root: Path) -> None:
    """Write messages, services and typing stubs for every proto under `protos/` into `root/src`."""
    protos = root.parent.parent / "protos"
    if not protos.is_dir():  # a wheel built from an sdist carries the generated code
        return
    out = root / "src"
    for name in ("headrace/api", "headrace/coord"):
        shutil.rmtree(out / name, ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)
    files = sorted(str(p.relative_to(protos)) for p in protos.rglob("*.proto"))
    bin_dir = Path(sys.executable).parent
    plugins = []
    for plugin in ("protoc-gen-mypy", "protoc-gen-mypy_grpc"):
        found = shutil.which(plugin, path=str(bin_dir)) or shutil.which(plugin)
        if found is None:
            raise SystemExit(f"building headrace-api needs {plugin}: pip install mypy-protobuf")
        plugins.append(f"--plugin={plugin}={found}")
    subprocess.run(
        [
            sys.executable,
            "-m",
            "grpc_tools.protoc",
            f"-I{protos}",
            *plugins,
            f"--python_out={out}",
            f"--grpc_python_out={out}",
            f"--mypy_out=quiet:{out}",
            f"--mypy_grpc_out=quiet:{out}",
            *files,
        ],
        check=True,
    )


if __name__ == "__main__":
    generate(HERE)
