"""Guesses by n-gram against a search that looks at everything."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.core.ngram import NgramIndex, Speculation


def naive(tokens: list[int], count: int, shortest: int, longest: int) -> list[int]:
    """The newest earlier place that ends like `tokens` in as many tokens as possible, and what followed it."""
    for length in range(longest, shortest - 1, -1):
        if length >= len(tokens):
            continue
        for place in range(len(tokens) - 1, length - 1, -1):
            if tokens[place - length : place] == tokens[-length:]:
                following: list[int] = []
                while len(following) < count:
                    following.append([*tokens, *following][place + len(following)])
                return following
    return []


@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=60),
    first=st.integers(1, 60),
    count=st.integers(1, 6),
    lengths=st.tuples(st.integers(1, 4), st.integers(1, 4)).map(sorted),
    strides=st.lists(st.integers(1, 5), min_size=1, max_size=8),
)
def test_guesses_are_those_of_a_search_through_everything(
    tokens: list[int], first: int, count: int, lengths: list[int], strides: list[int]
) -> None:
    shortest, longest = lengths
    index = NgramIndex(shortest=shortest, longest=longest)
    end, stride = min(first, len(tokens)), 0
    while True:
        known = tokens[:end]
        assert index.propose(known, count) == naive(known, count, shortest, longest)
        if end == len(tokens):
            break
        end = min(len(tokens), end + strides[stride % len(strides)])
        stride += 1


def test_the_longest_match_wins_and_of_several_the_newest() -> None:
    index = NgramIndex(shortest=1, longest=3)
    assert index.propose([1, 2, 3, 7, 9, 2, 3, 8, 5, 2, 3], 2) == [8, 5]
    assert NgramIndex(shortest=1, longest=3).propose([1, 2, 3, 7, 9, 3, 8, 1, 2, 3], 2) == [7, 9]


def test_a_repetition_is_guessed_to_go_on() -> None:
    assert NgramIndex(shortest=1, longest=2).propose([4, 5, 6, 5, 6], 5) == [5, 6, 5, 6, 5]
    assert NgramIndex(shortest=2, longest=2).propose([1, 2, 3], 4) == []


def test_asking_twice_for_the_same_tokens_gives_the_same() -> None:
    index = NgramIndex(shortest=1, longest=2)
    assert index.propose([1, 2, 1], 2) == index.propose([1, 2, 1], 2) == [2, 1]


@pytest.mark.parametrize(("change", "name"), [({"shortest": 5}, "prompt_lookup_min"), ({"tokens": 0}, "num_specul")])
def test_bounds_that_cannot_be_are_refused_by_name(change: dict[str, int], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        Speculation(**({"tokens": 4, "longest": 4, "shortest": 2, "most_sequences": 4} | change))
