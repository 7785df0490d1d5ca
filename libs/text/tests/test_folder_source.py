"""Hugging Face folders."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from headrace.base.errors import InvalidRequest, StartError
from headrace.text.tokenizer import Message, Tokenizer, load_tokenizer


@pytest.fixture
def folder(spaced_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(spaced_folder, tmp_path / "model"))


def edit(file: Path, **changes: Any) -> None:
    content = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({k: v for k, v in (content | changes).items() if v is not None}))


def test_a_folder_says_what_the_model_is(spaced: Tokenizer) -> None:
    assert spaced.vocab_size == 320  # the embedding's rows, not the tokenizer's entries
    assert spaced.max_model_len == 512
    assert spaced.bos_id == 1
    assert spaced.eos_ids == {2}


def test_the_shipped_tokenizer_saved_as_a_folder_gives_the_same_ids(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer._backend.save(str(tmp_path / "tokenizer.json"))
    again = load_tokenizer(tmp_path)
    text = "Call 555-1234, naïve 漢字 <|im_end|>"
    assert again.encode(text) == tokenizer.encode(text)
    assert again.decode(again.encode(text)) == text
    assert again.special_id("<|im_end|>") == 2


def test_texts_come_back_from_a_tokenizer_that_puts_a_space_first(spaced: Tokenizer) -> None:
    for text in ("Hi there", "the\nthe", "Hi 漢字 🇨🇿"):
        ids = spaced.encode(text)
        assert ids[0] == 1
        assert spaced.decode(ids) == text


def test_inside_a_prompt_no_space_is_put_first(spaced: Tokenizer) -> None:
    """Equal to what the library gives for the whole prompt at once, where contents hold no special token."""
    backend = type(spaced._backend).from_str(spaced._backend.to_str())  # matches special tokens in text
    rendered = "<s>user\nHi there<|end|>\nassistant\nthe<|end|>\n"
    ids = spaced.encode_chat([Message("user", " Hi there\n"), Message("assistant", "the")])
    assert ids == backend.encode(rendered, add_special_tokens=False).ids


def test_tokens_that_take_the_space_beside_them_do_so(folder: Path) -> None:
    edit(
        folder / "tokenizer_config.json",
        chat_template="{{ messages[0].content }} <m><|end|>  {{ messages[0].content }}",
    )
    tokenizer = load_tokenizer(folder)
    backend = type(tokenizer._backend).from_str(tokenizer._backend.to_str())
    expected = backend.encode("the <m><|end|>  the", add_special_tokens=False).ids
    assert tokenizer.encode_chat([Message("user", "the")])[1:] == expected


def test_saved_truncation_and_padding_do_not_touch_a_prompt(folder: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    content["truncation"] = {"max_length": 3, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    content["padding"] = {
        "strategy": {"Fixed": 64},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<unk>",
    }
    (folder / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.decode(tokenizer.encode("Hi the the the the")) == "Hi the the the the"
    assert len(tokenizer.encode("Hi the")) < 10


def test_generation_config_decides_which_ids_end_an_answer(folder: Path) -> None:
    edit(folder / "generation_config.json", eos_token_id=[7, 9])
    assert load_tokenizer(folder).eos_ids == {2, 7, 9}


def test_bos_is_added_as_the_post_processor_does_where_no_setting_says(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", add_bos_token=None)
    assert load_tokenizer(folder).encode("Hi")[0] != 1
    processor = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
    }
    edit(folder / "tokenizer.json", post_processor=processor)
    assert load_tokenizer(folder).encode("Hi")[:2].count(1) == 1
    edit(folder / "tokenizer_config.json", add_bos_token=False)
    assert load_tokenizer(folder).encode("Hi")[0] != 1


def test_the_template_file_wins_and_a_named_default_is_found(folder: Path) -> None:
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "the"}]
    edit(folder / "tokenizer_config.json", chat_template=named)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.decode(tokenizer.encode_chat([Message("user", "x")])) == "the"
    (folder / "chat_template.jinja").write_text("Hi")
    tokenizer = load_tokenizer(folder)
    assert tokenizer.decode(tokenizer.encode_chat([Message("user", "x")])) == "Hi"


def test_a_model_without_a_template_says_so(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", chat_template=None)
    with pytest.raises(InvalidRequest, match="no chat template") as caught:
        load_tokenizer(folder).encode_chat([Message("user", "x")])
    assert caught.value.reason == "NO_CHAT_TEMPLATE"


def test_the_digest_follows_every_file_that_text_reads(folder: Path) -> None:
    digests = {load_tokenizer(folder).digest}
    edit(folder / "generation_config.json", eos_token_id=3)
    digests.add(load_tokenizer(folder).digest)
    (folder / "chat_template.jinja").write_text("Hi")
    digests.add(load_tokenizer(folder).digest)
    (folder / "README.md").write_text("not read")
    digests.add(load_tokenizer(folder).digest)
    assert len(digests) == 3


def test_broken_folders_are_one_clear_line(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"has no tokenizer\.json"):
        load_tokenizer(tmp_path)
    (folder / "config.json").write_text("{")
    with pytest.raises(StartError, match=r"config\.json is not JSON"):
        load_tokenizer(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(StartError, match="does not hold a JSON object"):
        load_tokenizer(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(StartError, match=r"cannot read .*tokenizer\.json"):
        load_tokenizer(folder)


def test_a_decoder_of_another_kind_of_model_is_refused(folder: Path) -> None:
    edit(folder / "tokenizer.json", decoder={"type": "WordPiece", "prefix": "##", "cleanup": True})
    with pytest.raises(StartError, match=r"decoder \(WordPiece\)"):
        load_tokenizer(folder)
