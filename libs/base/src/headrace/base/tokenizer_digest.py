"""What identifies the text side of a model, computed alike by whoever tokenizes and whoever makes bundles."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from headrace.base.errors import StartError
from headrace.base.gguf_metadata import Value, read_gguf_metadata

# Every file of a Hugging Face folder that text reads: the vocabulary, the template, and who ends an answer.
TOKENIZER_FILES = (
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
)


def tokenizer_digest(path: str | Path) -> str:
    """BLAKE2b-128 hex digest of the tokenizer and chat template in a GGUF file or a Hugging Face folder."""
    path = Path(path)
    return folder_tokenizer_digest(path) if path.is_dir() else gguf_tokenizer_digest(read_gguf_metadata(path))


def gguf_tokenizer_digest(metadata: Mapping[str, Value]) -> str:
    """The digest of metadata already read: all its `tokenizer.*` keys."""
    identity = {key: value for key, value in metadata.items() if key.startswith("tokenizer.")}
    return _digest(json.dumps(identity, sort_keys=True).encode())


def folder_tokenizer_digest(folder: Path) -> str:
    """The digest of the TOKENIZER_FILES that `folder` holds, by name and content."""
    found = [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]
    try:
        contents = {file.name: _digest(file.read_bytes()) for file in found}
    except OSError as error:
        raise StartError(f"cannot read {error.filename}: {error.strerror}") from error
    return _digest(json.dumps(contents, sort_keys=True).encode())


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
