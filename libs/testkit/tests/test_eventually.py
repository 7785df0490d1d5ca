"""The wait all tests stand on."""

from __future__ import annotations

import time

import pytest

from headrace.testkit.eventually import eventually


async def test_the_first_truthy_result_is_returned() -> None:
    results = iter([0, "", None, 7, 8])
    assert await eventually(lambda: next(results), every_s=0) == 7


async def test_a_check_may_be_async_and_may_assert() -> None:
    tries = 0

    async def check() -> str:
        nonlocal tries
        tries += 1
        assert tries == 3, "not yet"
        return "done"

    assert await eventually(check, every_s=0) == "done"


async def test_giving_up_tells_the_last_result_and_keeps_to_the_bound() -> None:
    began = time.monotonic()
    with pytest.raises(AssertionError, match=r"not within 0\.05 s; last: \[\]"):
        await eventually(list, within_s=0.05)
    assert time.monotonic() - began < 5

    def never() -> bool:
        raise AssertionError("still 3 left")

    with pytest.raises(AssertionError, match="still 3 left"):
        await eventually(never, within_s=0.01)


async def test_other_errors_are_not_swallowed() -> None:
    def broken() -> bool:
        raise ValueError("a bug in the check")

    with pytest.raises(ValueError, match="a bug"):
        await eventually(broken)
