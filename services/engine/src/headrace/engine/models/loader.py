"""From a path to a model in memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from headrace.base.errors import StartError
from headrace.engine.models.checkpoint import Checkpoint
from headrace.engine.models.decoder import Decoder
from headrace.engine.models.gguf import GgufCheckpoint
from headrace.engine.models.hf_folder import HfFolder
from headrace.engine.models.weights import load_weights

_MOST_NAMED = 3  # of the weights that nobody reads

PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def open_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint at `path`: a Hugging Face folder or a GGUF file."""
    if path.is_dir():
        return HfFolder(path)
    if path.is_file():
        return GgufCheckpoint(path)
    raise StartError(f"no model at {path}: give a GGUF file, or a folder with config.json and safetensors")


def load_model(path: Path, precision: str) -> Decoder:
    """The model at `path`, computing in `precision`; StartError when it cannot be loaded."""
    dtype = PRECISIONS.get(precision)
    if dtype is None:
        raise StartError(f"precision {precision!r} is not supported, only {' and '.join(PRECISIONS)}")
    checkpoint = open_checkpoint(path)
    model = Decoder(checkpoint.config, load_weights(checkpoint, dtype))
    refuse_unread(path, checkpoint.unread())
    return model


def refuse_unread(path: Path, unread: Sequence[str]) -> None:
    """Weights left over belong to a model that computes something else: its answers would be plausible and wrong."""
    if unread:
        names = ", ".join(unread[:_MOST_NAMED]) + (", ..." if len(unread) > _MOST_NAMED else "")
        raise StartError(f"{path} has {len(unread)} weights that its architecture and configuration do not: {names}")
