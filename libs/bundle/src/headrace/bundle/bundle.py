"""Bundles: everything that decides an answer, under one digest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from google.protobuf import json_format

from headrace.api.control.v1.intent_pb2 import Bundle
from headrace.base.errors import InvalidRequest, StartError
from headrace.base.gguf_metadata import read_gguf_metadata
from headrace.base.tokenizer_digest import folder_tokenizer_digest, gguf_tokenizer_digest
from headrace.bundle.intent import validate_bundle


def describe(
    model_path: str | Path,
    *,
    precision: str = "float32",
    max_model_len: int | None = None,
    display_name: str | None = None,
    sampling_defaults: Mapping[str, str] | None = None,
) -> Bundle:
    """The bundle of a .gguf file or a Hugging Face folder; StartError says in one line why it cannot be one.

    `max_model_len` defaults to the model's own limit and may not pass it; `display_name` to the model's own name.
    Reads all weights once, at about 1 GB/s.
    """
    path = Path(model_path).absolute()
    model = _read_model(path)
    own_limit = model.max_model_len
    limit = max_model_len or own_limit
    if limit is None:
        raise StartError(f"{path} does not say its context limit: give max_model_len")
    if own_limit is not None and limit > own_limit:
        raise StartError(f"max_model_len={limit} passes the model's own limit of {own_limit} tokens")
    bundle = Bundle(
        model_path=str(path),
        weights_digest=_weights_digest(model.weight_files),
        tokenizer_digest=model.tokenizer_digest,
        display_name=display_name or model.name,
        precision=precision,
        max_model_len=limit,
        engine_version=_engine_version(),
        sampling_defaults=sampling_defaults or {},
    )
    try:
        validate_bundle(bundle)
    except InvalidRequest as error:
        raise StartError(error.message) from error
    return bundle


def digest(bundle: Bundle) -> str:
    """BLAKE2b-128 hex over all fields but `model_path`, as sorted JSON without the fields at their default.

    So a field added later does not change the digests of bundles that leave it out.
    """
    fields = json_format.MessageToDict(bundle, preserving_proto_field_name=True)
    fields.pop("model_path", None)
    canonical = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(canonical.encode(), digest_size=16, person=b"headrace-bundle").hexdigest()


def verify(bundle: Bundle) -> None:
    """StartError unless the files at `model_path` are the ones the bundle was made of."""
    path = Path(bundle.model_path)
    model = _read_model(path)
    if model.tokenizer_digest != bundle.tokenizer_digest:
        raise StartError(f"{path} does not hold the bundle's tokenizer: it has changed, or is another model")
    if _weights_digest(model.weight_files) != bundle.weights_digest:
        raise StartError(f"{path} does not hold the bundle's weights: they have changed, or are another model's")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model:
    """What a bundle takes from the files; `weight_files` by the name under which the digest counts them."""

    name: str
    max_model_len: int | None
    tokenizer_digest: str
    weight_files: Mapping[str, Path]


def _read_model(path: Path) -> _Model:
    if path.is_dir():
        return _read_folder(path)
    if not path.is_file():
        raise StartError(f"there is no model at {path}")
    metadata = read_gguf_metadata(path)
    context = metadata.get(f"{metadata.get('general.architecture')}.context_length")
    return _Model(
        name=str(metadata.get("general.name") or path.stem),
        max_model_len=context if isinstance(context, int) else None,
        tokenizer_digest=gguf_tokenizer_digest(metadata),
        weight_files={"model.gguf": path},  # a lone file under a fixed name: renaming it makes no other model
    )


def _read_folder(folder: Path) -> _Model:
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            raise StartError(f"{folder} is no model folder: it has no {name}")
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise StartError(f"{folder} is no model folder: it has no *.safetensors")
    config_file = folder / "config.json"
    try:
        config: Any = json.loads(config_file.read_bytes())
        context = config.get("max_position_embeddings")
    except (ValueError, AttributeError) as error:
        raise StartError(f"{config_file} does not hold a JSON object") from error
    return _Model(
        name=folder.name,
        max_model_len=context if isinstance(context, int) else None,
        tokenizer_digest=folder_tokenizer_digest(folder),
        # config.json says how the weights are used: another rope_theta is another model.
        weight_files={file.name: file for file in (config_file, *weights)},
    )


def _weights_digest(files: Mapping[str, Path]) -> str:
    """Over the names, sizes and contents; each content is hashed on its own."""
    identity = []
    for name, path in sorted(files.items()):
        try:
            with path.open("rb") as file:
                content = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
                identity.append([name, file.tell(), content])
        except OSError as error:
            raise StartError(f"cannot read {path}: {error.strerror}") from error
    return hashlib.blake2b(json.dumps(identity).encode(), digest_size=16).hexdigest()


def _engine_version() -> str:
    """The packages of Headrace are released together, so this one's version is the engine's."""
    return version("headrace-bundle")
