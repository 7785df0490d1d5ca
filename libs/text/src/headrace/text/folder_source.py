"""The tokenizer of a Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from headrace.base.errors import StartError
from headrace.base.tokenizer_digest import folder_tokenizer_digest
from headrace.text.source import TokenizerSource


def read_folder_source(folder: Path) -> TokenizerSource:
    """Everything text needs from `folder`: tokenizer.json, and what the files beside it add."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise StartError(f"{folder} has no tokenizer.json")
    try:
        backend = Backend.from_file(str(file))
    except Exception as error:  # the library raises bare Exception for anything it cannot read
        raise StartError(f"cannot read {file}: {error}") from error
    backend.no_truncation()  # saved training settings must not shorten or fill a prompt
    backend.no_padding()
    config = _read_json(folder / "config.json")
    settings = _read_json(folder / "tokenizer_config.json")
    generation = _read_json(folder / "generation_config.json")
    names = _token_names(settings)
    bos_id = backend.token_to_id(names["bos_token"]) if "bos_token" in names else None
    return TokenizerSource(
        backend=backend,
        vocab_size=int(config.get("vocab_size") or backend.get_vocab_size()),
        bos_id=bos_id,
        eos_ids=_eos_ids(backend, names, generation, config),
        adds_bos=_adds_bos(backend, settings, bos_id),
        chat_template=_chat_template(folder, settings),
        template_tokens=names,
        max_model_len=config.get("max_position_embeddings"),
        digest=folder_tokenizer_digest(folder),
    )


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_bytes())
    except ValueError as error:
        raise StartError(f"{file} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise StartError(f"{file} does not hold a JSON object")
    return content


def _token_names(settings: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and its like by name; each is a text, or an object with the text as `content`."""
    found = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = settings.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[name] = text
    return found


def _eos_ids(
    backend: Backend, names: Mapping[str, str], generation: Mapping[str, Any], config: Mapping[str, Any]
) -> frozenset[int]:
    """The ids that end an answer: generation_config.json decides, then config.json; the named token always ends one."""
    given = generation.get("eos_token_id", config.get("eos_token_id"))
    ids = set(given if isinstance(given, list) else [given]) - {None}
    ids |= {backend.token_to_id(names["eos_token"])} - {None} if "eos_token" in names else set()
    return frozenset(ids)


def _adds_bos(backend: Backend, settings: Mapping[str, Any], bos_id: int | None) -> bool:
    """An explicit setting wins; without one, what the tokenizer itself puts before an empty text."""
    if bos_id is None:
        return False
    explicit = settings.get("add_bos_token")
    return bool(explicit) if explicit is not None else backend.encode("").ids[:1] == [bos_id]


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """chat_template.jinja, else the one in tokenizer_config.json; of several named ones, "default"."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template if isinstance(template, str) else None
