"""Weights from a Hugging Face folder: config.json with safetensors, in one file or in shards."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headrace.base.errors import StartError
from headrace.engine.models.config import ModelConfig
from headrace.engine.models.config_hf import config_from_hf

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_STORED = (torch.float32, torch.float16, torch.bfloat16)
# Written by old versions of transformers: the rotary frequencies, which follow from the configuration.
_DERIVED = ".rotary_emb.inv_freq"


class HfFolder:
    """An open folder; each safetensors file is mapped once."""

    def __init__(self, folder: Path) -> None:
        """StartError when a file is missing or damaged, or the architecture is not supported."""
        generation = folder / "generation_config.json"
        try:
            self._config = config_from_hf(
                _json(folder / "config.json"), _json(generation) if generation.is_file() else {}
            )
        except (StartError, AttributeError, TypeError, ValueError, ZeroDivisionError) as error:  # wrong kinds of values
            raise StartError(f"{folder}: {error}") from error
        self._folder = folder
        self._files: dict[str, Any] = {}
        self._file_of = self._weight_map()
        self._read: set[str] = set()

    @property
    def config(self) -> ModelConfig:
        """The model's shape."""
        return self._config

    def read_into(self, name: str, out: Tensor) -> None:
        """See Checkpoint.read_into."""
        file_name = self._file_of.get(name)
        if file_name is None:
            raise StartError(f"{self._folder} has no weight {name}")
        try:
            stored: Tensor = self._open(file_name).get_tensor(name)
        except SafetensorError as error:
            raise StartError(f"{self._folder / file_name} is damaged: {error}") from error
        if stored.shape != out.shape or stored.dtype not in _STORED:
            found, wanted = f"{stored.dtype} {tuple(stored.shape)}", tuple(out.shape)
            raise StartError(
                f"{self._folder}: {name} is {found}, expected float32, float16 or bfloat16 of shape {wanted}"
            )
        out.copy_(stored)
        self._read.add(name)

    def unread(self) -> Sequence[str]:
        """See Checkpoint.unread."""
        harmless = {"lm_head.weight"} if self._config.tied_embeddings else set()
        left = set(self._file_of) - self._read - harmless
        return sorted(name for name in left if not name.endswith(_DERIVED))

    def _weight_map(self) -> dict[str, str]:
        """Weight name to file name."""
        if (self._folder / _SINGLE).is_file():
            return dict.fromkeys(self._open(_SINGLE).keys(), _SINGLE)
        if (self._folder / _INDEX).is_file():
            weight_map = _json(self._folder / _INDEX).get("weight_map")
            if isinstance(weight_map, dict) and all(isinstance(file, str) for file in weight_map.values()):
                return weight_map
            raise StartError(f"{self._folder / _INDEX} has no weight_map of names to files")
        raise StartError(f"{self._folder} has neither {_SINGLE} nor {_INDEX}: only safetensors weights are supported")

    def _open(self, name: str) -> Any:
        if name not in self._files:
            path = self._folder / name
            try:
                self._files[name] = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise StartError(f"cannot read {path}: {error}") from error
        return self._files[name]


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except OSError as error:
        raise StartError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise StartError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise StartError(f"{path} is not a JSON object")
    return value
