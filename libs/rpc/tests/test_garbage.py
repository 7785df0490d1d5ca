"""When a process looks for garbage."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator

import pytest

from headrace.rpc import garbage
from headrace.testkit.eventually import eventually


class Cycle:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)
    garbage.take_back()


def grown_old() -> weakref.ref[Cycle]:
    """A cycle that has ended after it survived the young collections."""
    cycle = Cycle()
    gc.collect()
    return weakref.ref(cycle)


def test_what_the_start_made_is_never_looked_at_again_until_the_end() -> None:
    cycle = Cycle()
    gone = weakref.ref(cycle)
    garbage.set_aside()
    assert gc.get_freeze_count() > 1000
    del cycle
    gc.collect()
    assert gone() is not None
    garbage.take_back()
    assert gone() is None


def test_no_full_collection_begins_by_itself_and_young_garbage_goes() -> None:
    garbage.set_aside()
    full = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            full.append(phase)

    gc.callbacks.append(note)
    try:
        kept = [[] for _ in range(400_000)]  # old ones grow by far more than a quarter
        gone = weakref.ref(Cycle())
        young = [[] for _ in range(garbage.YOUNG[0] + 1)]
    finally:
        gc.callbacks.remove(note)
    assert (full, gone()) == ([], None)
    del kept, young


async def test_cycles_that_grew_old_go_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage, "LEAST_S", 0.01)
    monkeypatch.setattr(garbage, "SHARE", 1.0)
    garbage.set_aside()
    gone = grown_old()
    assert gone() is not None
    collecting = asyncio.create_task(garbage.collect_forever())
    await eventually(lambda: gone() is None)
    collecting.cancel()


@pytest.mark.parametrize(("took_s", "wait_s"), [(0.001, 5.0), (0.025, 5.0), (0.12, 24.0), (2.0, 60.0)])
def test_full_collections_take_no_more_than_their_share_of_the_time(took_s: float, wait_s: float) -> None:
    assert garbage.pause_s(took_s) == wait_s
