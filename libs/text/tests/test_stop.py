"""Stop texts against the obvious definition."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.base.errors import InvalidRequest
from headrace.text.stop import StopChecker, Stopped, Text


def cut(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The text before the stop that completes first (of several: the longest), and which it was."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end - len(stop)], stop
    return text, None


def stream(chunks: list[str], stops: list[str]) -> tuple[str, str | None]:
    """What was shown in all, and the stop; checks on the way that nothing shown could belong to a stop."""
    checker = StopChecker(stops)
    shown, arrived = "", ""
    for chunk in chunks:
        result = checker.push(chunk)
        arrived += chunk
        shown += result.text
        if isinstance(result, Stopped):
            return shown, result.stop
        held = arrived[len(shown) :]
        starts = {stop[:n] for stop in stops for n in range(1, len(stop))}
        longest = max((s for s in starts if arrived.endswith(s)), key=len, default="")
        assert held == longest
    return shown + checker.finish(), None


def splits(text: str) -> list[list[str]]:
    """All ways to cut a text in up to three pieces, and one character at a time."""
    cuts = itertools.combinations_with_replacement(range(len(text) + 1), 2)
    return [[text[:a], text[a:b], text[b:]] for a, b in cuts] + [list(text)]


@pytest.mark.parametrize(
    ("text", "stops"),
    [
        ("the quick brown fox jumps", ["own fox"]),
        ("the quick brown fox", ["fox"]),
        ("fox", ["fox"]),
        ("no stop here, only fo", ["fox"]),
        ("ababac ababad", ["ababad"]),
        ("aaaaab", ["aaab", "aab"]),
        ("one\n\ntwo\n\nthree", ["\n\n", "two"]),
        ("漢字を読む👍🏽終わり", ["👍🏽", "読書"]),
        ("xabcy", ["bc", "abc", "c"]),
        ("hello world", ["world peace", "lo wor"]),
        ("nothing", []),
    ],
)
def test_every_split_of_a_text_is_cut_alike(text: str, stops: list[str]) -> None:
    for chunks in splits(text):
        assert stream(chunks, stops) == cut(text, stops), chunks


@settings(max_examples=500)
@given(
    chunks=st.lists(st.text(alphabet="ab漢", max_size=6), max_size=10),
    stops=st.lists(st.text(alphabet="ab漢", min_size=1, max_size=5), max_size=16),
)
def test_any_stream_is_cut_at_the_stop_that_completes_first(chunks: list[str], stops: list[str]) -> None:
    assert stream(chunks, stops) == cut("".join(chunks), stops)


def test_text_that_no_stop_can_begin_in_is_shown_at_once() -> None:
    checker = StopChecker(["</answer-of-a-long-name>"])
    assert checker.push("hello <b") == Text("hello <b")
    assert checker.push("</ans") == Text("")
    assert checker.push("wers") == Text("</answers")


def test_text_held_back_is_given_at_the_end() -> None:
    checker = StopChecker(["fox"])
    assert checker.push("a fo") == Text("a ")
    assert checker.finish() == "fo"
    assert checker.finish() == ""


def test_nothing_follows_a_stop() -> None:
    checker = StopChecker(["x", "y"])
    assert checker.push("axb") == Stopped("a", "x")
    assert checker.push("more y") == Stopped("", "x")
    assert checker.finish() == ""


def test_of_sixteen_stops_that_almost_match_only_the_longest_is_held_back() -> None:
    stops = ["a" * (240 + n) + "b" for n in range(16)]
    checker = StopChecker(stops)
    shown = sum(len(checker.push("a" * 1000).text) for _ in range(30))
    assert shown == 30_000 - 255
    assert len(checker.finish()) == 255


@pytest.mark.parametrize(
    ("stops", "field"),
    [(["a", ""], "sampling.stop[1]"), (["a" * 257], "sampling.stop[0]"), (["a"] * 17, "sampling.stop")],
)
def test_stops_outside_the_limits_are_refused_by_name(stops: list[str], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        StopChecker(stops)
    assert caught.value.field == field
