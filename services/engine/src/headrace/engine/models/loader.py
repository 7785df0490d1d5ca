"""From a path to a model in memory."""

from __future__ import annotations

from pathlib import Path

import torch

from headrace.base.errors import StartError
from headrace.engine.models.checkpoint import Checkpoint
from headrace.engine.models.gguf import GgufCheckpoint
from headrace.engine.models.hf_folder import HfFolder
from headrace.engine.models.llama import Llama, load_llama

PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def open_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint at `path`: a Hugging Face folder or a GGUF file."""
    if path.is_dir():
        return HfFolder(path)
    if path.is_file():
        return GgufCheckpoint(path)
    raise StartError(f"no model at {path}: give a GGUF file, or a folder with config.json and safetensors")


def load_model(path: Path, precision: str) -> Llama:
    """The model at `path`, computing in `precision`; StartError when it cannot be loaded."""
    dtype = PRECISIONS.get(precision)
    if dtype is None:
        raise StartError(f"precision {precision!r} is not supported, only {' and '.join(PRECISIONS)}")
    return load_llama(open_checkpoint(path), dtype)
