"""Ids in, text out, cut at stop texts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.errors import InvalidRequest
from headrace.text.answer import AnswerText, Piece
from headrace.text.tokenizer import Tokenizer


def told(tokenizer: Tokenizer, ids: list[int], stops: list[str]) -> tuple[str, bool]:
    answer = AnswerText(tokenizer, stops)
    shown = ""
    for token_id in ids:
        piece = answer.push(token_id)
        shown += piece.text
        assert "\ufffd" not in piece.text
        if piece.stopped:
            assert answer.push(token_id) == Piece("", True)
            assert answer.finish() == ""
            return shown, True
    return shown + answer.finish(), False


@pytest.mark.parametrize(
    ("text", "stop"),
    [
        ("the quick brown fox jumps over", "own fox"),
        ("one, two, three", ", t"),
        ("count 12345 end", "34"),
        ("漢字かな交じり文 and more", "な交"),
        ("emoji 👩‍👩‍👧 family 👍🏽!", "👍🏽"),
        ("user\n\nassistant", "\n\n"),
    ],
)
def test_an_answer_ends_before_a_stop_that_spans_tokens(tokenizer: Tokenizer, text: str, stop: str) -> None:
    assert told(tokenizer, tokenizer.encode(text), [stop]) == (text[: text.index(stop)], True)


def test_an_answer_without_its_stop_is_whole(tokenizer: Tokenizer) -> None:
    text = "the quick brown fo"
    assert told(tokenizer, tokenizer.encode(text), ["fox"]) == (text, False)
    assert told(tokenizer, tokenizer.encode(text), []) == (text, False)


def test_a_special_token_as_a_stop_works_by_its_id_and_by_its_text(tokenizer: Tokenizer) -> None:
    stops = ["<|im_start|>", "fox"]
    by_id = [*tokenizer.encode("a brown fo"), 1, *tokenizer.encode("more")]
    assert told(tokenizer, by_id, stops) == ("a brown fo", True)
    assert told(tokenizer, tokenizer.encode("hi <|im_start|>x"), stops) == ("hi ", True)


def test_special_tokens_add_no_text(tokenizer: Tokenizer) -> None:
    ids = [0, *tokenizer.encode("hi"), 2]
    assert told(tokenizer, ids, []) == ("hi", False)


def test_an_answer_cut_in_mid_character_ends_with_a_replacement(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("ok 漢")[:-1]
    assert told(tokenizer, ids, ["ok 漢字"]) == ("ok \ufffd", False)


@given(ids=st.lists(st.integers(17, 49_151), max_size=20))
def test_without_stops_the_text_is_the_decoded_ids(tokenizer: Tokenizer, ids: list[int]) -> None:
    answer = AnswerText(tokenizer)
    assert "".join([*(answer.push(i).text for i in ids), answer.finish()]) == tokenizer.decode(ids)


def test_a_bad_stop_is_refused_under_the_callers_name_for_it(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest) as caught:
        AnswerText(tokenizer, [""], field="stop")
    assert caught.value.field == "stop[0]"


def test_no_stop_is_looked_for_in_the_first_min_tokens(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("a fox, a fox, a fox"), 1, 1, *tokenizer.encode(" end")]
    fox = [n for n in range(len(ids)) if tokenizer.decode([ids[n]]) == " fox"]

    def shown(min_tokens: int) -> tuple[str, bool]:
        answer = AnswerText(tokenizer, ["fox", "<|im_start|>"], min_tokens=min_tokens)
        text = ""
        for token_id in ids:
            piece = answer.push(token_id)
            text += piece.text
            if piece.stopped:
                return text, True
        return text + answer.finish(), False

    assert shown(fox[0]) == ("a ", True)
    assert shown(fox[0] + 1) == ("a fox, a ", True)  # exactly the first one is too early
    assert shown(fox[2] + 1) == ("a fox, a fox, a fox", True)  # at the special token
    assert shown(len(ids) - 3) == ("a fox, a fox, a fox", True)
    assert shown(len(ids)) == ("a fox, a fox, a fox end", False)


def test_a_stop_that_begins_before_min_tokens_does_not_count(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("ab 1 2 3 1 2 3")
    cut = next(n for n in range(1, len(ids)) if tokenizer.decode(ids[:n]).endswith("1"))
    answer = AnswerText(tokenizer, ["1 2"], min_tokens=cut)
    assert "".join(answer.push(token_id).text for token_id in ids) == "ab 1 2 3 "


@pytest.mark.parametrize("stops", [[], ["never said"], ["wheel"]])
def test_tokens_pushed_together_say_what_they_say_one_by_one(tokenizer: Tokenizer, stops: list[str]) -> None:
    ids = list(tokenizer.encode("Steady water 🙂 turns the wheel, and the wheel turns on."))
    alone = AnswerText(tokenizer, stops)
    pieces = [alone.push(token_id) for token_id in ids]
    counted = next((n for n, piece in enumerate(pieces, start=1) if piece.stopped), len(ids))

    together = AnswerText(tokenizer, stops)
    (first, start), (count, rest) = together.push_all(ids[:2]), together.push_all(ids[2:])

    assert start.text + rest.text == "".join(piece.text for piece in pieces)
    assert (first, first + count, rest.stopped) == (2, counted, bool(stops == ["wheel"]))
    assert together.finish() == alone.finish()
