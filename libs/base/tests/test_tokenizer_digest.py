"""The text side's identity."""

from __future__ import annotations

from pathlib import Path

from headrace.base.tokenizer_digest import TOKENIZER_FILES, gguf_tokenizer_digest, tokenizer_digest


def test_each_file_that_text_reads_counts_and_no_other_does(tmp_path: Path) -> None:
    digests = {tokenizer_digest(tmp_path)}
    for name in TOKENIZER_FILES:
        (tmp_path / name).write_text("{}")
        digests.add(tokenizer_digest(tmp_path))
    (tmp_path / "README.md").write_text("hello")
    digests.add(tokenizer_digest(tmp_path))
    assert len(digests) == 1 + len(TOKENIZER_FILES)
    assert all(len(digest) == 32 for digest in digests)


def test_in_gguf_only_tokenizer_keys_count_whatever_their_order() -> None:
    base = {"tokenizer.a": ("x", "y"), "tokenizer.b": 1}
    assert gguf_tokenizer_digest(base) == gguf_tokenizer_digest({**dict(reversed(base.items())), "general.name": "n"})
    assert gguf_tokenizer_digest(base) != gguf_tokenizer_digest({**base, "tokenizer.b": 2})
    assert gguf_tokenizer_digest(base) != gguf_tokenizer_digest({**base, "tokenizer.a": ("x,y",)})
