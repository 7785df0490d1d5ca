"""Models to make bundles of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Hugging Face folder with two weight files; a bundle reads names, sizes and bytes, not tensors."""
    model = tmp_path / "tiny-model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"max_position_embeddings": 2048}))
    (model / "tokenizer.json").write_text("{}")
    (model / "model-00001-of-00002.safetensors").write_bytes(b"weights one")
    (model / "model-00002-of-00002.safetensors").write_bytes(b"weights two")
    return model
