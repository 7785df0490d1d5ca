"""GGUF files other than the shipped one, written for the occasion."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest

from headrace.base.errors import StartError
from headrace.text.token_bytes import _BYTE_OF
from headrace.text.tokenizer import Message, load_tokenizer

LETTERS = sorted(_BYTE_OF, key=_BYTE_OF.__getitem__)  # a token for each byte


def write_gguf(file: Path, *, pre: str | None = "smollm", kind: str = "gpt2", **more: Any) -> Path:
    """A tokenizer of the 256 bytes, two merges, a control token (258) and a user-defined one (259)."""
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_context_length(128)
    writer.add_tokenizer_model(kind)
    if pre:
        writer.add_tokenizer_pre(pre)
    tokens = [*LETTERS, "ab", "abc", "<|end|>", "<think>", "hello", "<s>"]
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 258 + [3, 4, 1, 3])
    writer.add_token_merges(more.get("merges", ["a b", "ab c"]))
    writer.add_eos_token_id(258)
    if more.get("bos"):
        writer.add_bos_token_id(261)
        writer.add_add_bos_token(True)
    if "template" in more:
        writer.add_chat_template(more["template"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return file


def pieces(file: Path, text: str) -> list[str]:
    return [piece for piece, _ in load_tokenizer(file)._backend.pre_tokenizer.pre_tokenize_str(text)]


def test_control_tokens_are_special_and_user_defined_ones_are_text(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_gguf(tmp_path / "m.gguf"))
    ids = tokenizer.encode("abc<think><|end|>")
    assert ids[:2] == [257, 259]
    assert 258 not in ids
    assert tokenizer.decode([257, 258, 259]) == "abc<think>"
    assert tokenizer.special_id("<|end|>") == 258
    assert tokenizer.special_id("<think>") is None
    assert (tokenizer.vocab_size, tokenizer.max_model_len, tokenizer.eos_ids) == (262, 128, {258})


def test_the_begin_of_sequence_id_comes_exactly_once(tmp_path: Path) -> None:
    bare = "{% for m in messages %}{{ m.content }}{% endfor %}"
    for n, template in enumerate((bare, "{{ bos_token }}" + bare)):
        tokenizer = load_tokenizer(write_gguf(tmp_path / f"{n}.gguf", bos=True, template=template))
        assert tokenizer.encode("abc") == [261, 257]
        assert tokenizer.encode_chat([Message("user", "abc")]) == [261, 257]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("smollm", ["a", "Ġ", "1", "2", "3", "4", "ĠX", "Ċ", "Ċ", "y", "'", "LL"]),
        ("gpt-2", ["a", "Ġ1234", "ĠX", "Ċ", "Ċ", "y", "'", "LL"]),
        ("qwen2", ["a", "Ġ", "1", "2", "3", "4", "ĠX", "ĊĊ", "y", "'LL"]),
        ("llama-bpe", ["a", "Ġ", "123", "4", "ĠX", "ĊĊ", "y", "'LL"]),
    ],
)
def test_each_pre_tokenizer_cuts_as_its_model_was_trained(tmp_path: Path, pre: str, expected: list[str]) -> None:
    assert pieces(write_gguf(tmp_path / "m.gguf", pre=pre), "a 1234 X\n\ny'LL") == expected


def test_llama_3_takes_a_whole_word_that_is_a_token_without_merges(tmp_path: Path) -> None:
    assert load_tokenizer(write_gguf(tmp_path / "l.gguf", pre="llama-bpe")).encode("hello") == [260]
    assert len(load_tokenizer(write_gguf(tmp_path / "s.gguf")).encode("hello")) == 5


def test_qwen_composes_characters(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_gguf(tmp_path / "q.gguf", pre="qwen2"))
    assert tokenizer.decode(tokenizer.encode("e\u0301")) == "\u00e9"


def test_what_is_not_supported_is_named(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="pre-tokenizer 'tekken' is not supported"):
        load_tokenizer(write_gguf(tmp_path / "a.gguf", pre="tekken"))
    with pytest.raises(StartError, match="tokenizer kind 'llama' is not supported"):
        load_tokenizer(write_gguf(tmp_path / "b.gguf", kind="llama"))
    with pytest.raises(StartError, match="merges do not fit"):
        load_tokenizer(write_gguf(tmp_path / "c.gguf", merges=["z q"]))


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "llama")
    writer.add_tokenizer_model("gpt2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(StartError, match=r"the GGUF key 'tokenizer\.ggml\.tokens' is missing"):
        load_tokenizer(tmp_path / "m.gguf")


def test_the_digest_changes_with_the_template(tmp_path: Path) -> None:
    digests = {load_tokenizer(write_gguf(tmp_path / f"{t}.gguf", template=t)).digest for t in ("a", "b")}
    assert len(digests) == 2
