"""Whole characters, whatever the ids."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.text.detokenizer import Detokenizer
from headrace.text.tokenizer import Tokenizer

SCRIPTS = ["👩‍👩‍👧 ďábel 漢字", "🇨🇿👍🏽", "안녕하세요 세계", "สวัสดี", "plain text", "e\u0301"]


def streamed(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.push(i) for i in ids), detokenizer.finish()]


@pytest.mark.parametrize("text", SCRIPTS)
def test_characters_are_never_cut(tokenizer: Tokenizer, spaced: Tokenizer, text: str) -> None:
    for each in (tokenizer, spaced):
        pieces = streamed(each, each.encode(text))
        assert "".join(pieces) == text
        assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_comes_with_the_token_that_completes_it(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("漢")
    assert len(ids) > 1
    assert streamed(tokenizer, ids) == [""] * (len(ids) - 1) + ["漢", ""]


def test_an_unfinished_character_is_shown_as_replaced_at_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("ok 漢")[:-1]
    pieces = streamed(tokenizer, ids)
    assert "\ufffd" not in "".join(pieces[:-1])
    assert "".join(pieces) == tokenizer.decode(ids) == "ok \ufffd"


# Ids below 600 hold the special tokens and all single bytes: random text rarely makes broken UTF-8, these do.
ANY_ID = st.one_of(st.integers(0, 600), st.integers(0, 49_300), st.integers())


@settings(max_examples=400)
@given(ids=st.lists(ANY_ID, max_size=40))
def test_any_ids_stream_to_what_they_decode_to(tokenizer: Tokenizer, ids: list[int]) -> None:
    assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids)
    known = [i for i in ids if 0 <= i < 1 << 32]
    assert tokenizer.decode(ids) == tokenizer._backend.decode(known, skip_special_tokens=True)


@settings(max_examples=400)
@given(ids=st.lists(st.integers(-5, 330), max_size=40))
def test_any_ids_stream_to_what_they_decode_to_with_byte_tokens(spaced: Tokenizer, ids: list[int]) -> None:
    assert "".join(streamed(spaced, ids)) == spaced.decode(ids)


@given(text=st.text(alphabet="Hithere \n漢é👍", max_size=20))
def test_byte_tokens_decode_as_the_library_decodes_them(spaced: Tokenizer, text: str) -> None:
    ids = spaced.encode(text)
    assert spaced.decode(ids) == spaced._backend.decode(ids, skip_special_tokens=True)
    assert spaced.decode(ids) == text or text.startswith(" ")  # such a text and the same without it share their ids


def test_a_finished_detokenizer_begins_anew(spaced: Tokenizer) -> None:
    detokenizer = Detokenizer(spaced)
    for _ in range(2):
        assert "".join([*map(detokenizer.push, spaced.encode("Hi there")), detokenizer.finish()]) == "Hi there"
