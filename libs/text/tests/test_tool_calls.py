"""Calls are told from text however an answer is cut, and nothing of a text is lost that is no call."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.errors import InvalidRequest
from headrace.text.tokenizer import Message, Tokenizer
from headrace.text.tool_calls import BareCall, Finder, MarkedCalls, Piece, ToolCall

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
WEATHER = ToolCall("weather", '{"city": "Köln"}')


def heard(finder: Finder, *texts: str) -> list[Piece]:
    """All pieces, neighbouring texts joined."""
    found: list[Piece] = []
    for piece in [p for text in texts for p in finder.push(text)] + finder.finish():
        if found and isinstance(piece, str) and isinstance(found[-1], str):
            found[-1] += piece
        else:
            found.append(piece)
    return found


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        (CALL, [WEATHER]),
        (f"Let me look.\n{CALL}\n{CALL}\n", ["Let me look.", WEATHER, WEATHER]),
        ("no call, <tool_", ["no call, <tool_"]),
        ("a < b \n", ["a < b \n"]),
        ('<tool_call>{"name": 1}</tool_call>', ['<tool_call>{"name": 1}</tool_call>']),
        ('<tool_call>{"name": "cut', ['<tool_call>{"name": "cut']),
        (
            '<tool_call>{"name": "f", "arguments": [1]}</tool_call>x',
            ['<tool_call>{"name": "f", "arguments": [1]}</tool_call>x'],
        ),
        ('<tool_call>{"name": "now"}</tool_call>', [ToolCall("now", "{}")]),
    ],
)
def test_calls_and_text_are_the_same_however_the_answer_is_cut(text: str, pieces: list[Piece]) -> None:
    assert heard(MarkedCalls(), text) == pieces
    assert heard(MarkedCalls(), *text) == pieces
    for at in range(len(text)):
        assert heard(MarkedCalls(), text[:at], text[at:]) == pieces


@given(st.text(alphabet="<tol_cal>/ {}\n", max_size=60), st.integers(0, 60))
def test_text_without_calls_comes_through_as_it_was(text: str, at: int) -> None:
    assert "".join(str(piece) for piece in heard(MarkedCalls(), text[:at], text[at:])) == text or "<tool_call>" in text


def test_a_text_that_must_be_one_call_is_one() -> None:
    assert heard(BareCall(), '{"name":"weather",', '"arguments":{"city":"Köln"}}') == [WEATHER]
    assert heard(BareCall(), '{"name":"wea') == ['{"name":"wea']


def test_tools_are_refused_where_the_template_knows_of_none(tokenizer: Tokenizer) -> None:
    tool = json.dumps({"type": "function", "function": {"name": "f"}})
    for messages, tools, field in (
        ([Message("user", "x")], [tool], "tools"),
        ([Message("assistant", "", (WEATHER,))], [], "messages[0].tool_calls"),
        ([Message("user", "x"), Message("tool", "y")], [], "messages[1].role"),
    ):
        with pytest.raises(InvalidRequest) as refused:
            tokenizer.encode_chat(messages, tools)
        assert (refused.value.field, refused.value.reason) == (field, "TOOLS_NOT_SUPPORTED")
