"""The prefix index: who has what, never more than is known, never more than fits."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from hashlib import blake2b

import pytest

from headrace.router.core.block_table import BlockTable
from headrace.router.core.overlap import NOTHING, Overlap
from headrace.router.core.prefix_index import MAX_PREDICTED, SLICE, Heard, PrefixIndex
from headrace.router.core.replica import EngineId

A, B, C = EngineId("a"), EngineId("b"), EngineId("c")


def chain(name: str, blocks: int, *, after: Sequence[bytes] = ()) -> list[bytes]:
    """Hashes of a prompt that goes on from `after` in its own way."""
    parent = after[-1] if after else b""
    hashes = list(after)
    for at in range(blocks):
        parent = blake2b(parent + name.encode() + bytes([at % 256]), digest_size=16).digest()
        hashes.append(parent)
    return hashes


def index_of(*engines: EngineId, max_blocks: int = 1000, predicted_s: float = 5.0) -> PrefixIndex:
    """An index in which the engines (epoch 1) have reported an empty cache."""
    index = PrefixIndex(max_blocks, predicted_s)
    for engine in engines:
        index.begin(engine, 1)
        assert index.snapshot(engine, 1, [], 0) is Heard.APPLIED
    return index


def cached(index: PrefixIndex, hashes: Sequence[bytes], now: float = 0.0) -> dict[EngineId, int]:
    return {engine: overlap.blocks for engine, overlap in index.overlap(hashes, now).items()}


def predicted(index: PrefixIndex, hashes: Sequence[bytes], now: float = 0.0) -> dict[EngineId, int]:
    return {engine: overlap.predicted_blocks for engine, overlap in index.overlap(hashes, now).items()}


def test_every_engines_longest_cached_prefix_is_found_in_one_pass_the_longest_first():
    system = chain("system", 4)
    prompt = chain("question", 6, after=system)
    index = index_of(A, B, C)
    index.stored(A, 1, system, 1)
    index.stored(B, 1, prompt[:7], 1)
    index.stored(C, 1, chain("other", 9), 1)
    overlaps = index.overlap(prompt, 0.0)
    assert list(overlaps.items()) == [(B, Overlap(1, 7, 0)), (A, Overlap(1, 4, 0))]
    assert (len(overlaps), C in overlaps, overlaps.of(C), overlaps.get(C)) == (2, False, NOTHING, None)
    assert (index.indexed_blocks(A), index.indexed_blocks(B), index.indexed_blocks(C), len(index)) == (4, 7, 9, 16)


def test_an_evicted_middle_block_ends_the_prefix_there_and_its_return_mends_it():
    prompt = chain("x", 8)
    index = index_of(A)
    index.stored(A, 1, prompt, 1)
    index.removed(A, 1, [prompt[3]], 2)
    assert cached(index, prompt) == {A: 3}
    index.stored(A, 1, [prompt[3]], 3)
    assert cached(index, prompt) == {A: 8}
    index.removed(A, 1, [prompt[0]], 4)
    assert cached(index, prompt) == {}


def test_an_engine_that_lost_a_middle_block_is_not_in_it_again_however_the_others_go_on():
    prompt = chain("x", 8)
    has = {A: 8, B: 4, C: 8, EngineId("d"): 6}
    index = index_of(*has)
    for engine, blocks in has.items():
        index.stored(engine, 1, prompt[:blocks], 1)
    index.removed(A, 1, [prompt[2]], 2)
    assert dict(index.overlap(prompt, 0.0)) == {e: Overlap(1, n, 0) for e, n in (has | {A: 2}).items()}


def test_a_flush_leaves_nothing_and_the_next_event_counts_on():
    prompt = chain("x", 8)
    index = index_of(A, B)
    for engine in (A, B):
        index.stored(engine, 1, prompt, 1)
    assert index.cleared(A, 1, 2) is Heard.APPLIED
    assert (cached(index, prompt), index.indexed_blocks(A)) == ({B: 8}, 0)
    assert index.stored(A, 1, prompt[:2], 3) is Heard.APPLIED
    assert cached(index, prompt) == {A: 2, B: 8}


def test_a_gap_is_zero_reuse_until_the_next_snapshot():
    prompt = chain("x", 8)
    index = index_of(A)
    index.stored(A, 1, prompt[:4], 1)
    assert index.stored(A, 1, prompt[4:], 3) is Heard.GAP
    assert (cached(index, prompt), index.indexed_blocks(A), index.lives_in_doubt) == ({}, 0, 1)
    assert index.removed(A, 1, prompt[:1], 4) is Heard.GAP, "what follows a gap is as unsure as the gap"
    assert index.position(A, 1) is None
    assert index.snapshot(A, 1, prompt[1:], 4) is Heard.APPLIED
    assert (cached(index, prompt), cached(index, prompt[1:]), index.lives_in_doubt) == ({}, {A: 7}, 0)


def test_a_life_without_a_snapshot_is_in_doubt():
    index = PrefixIndex(100)
    index.begin(A, 1)
    assert index.stored(A, 1, chain("x", 2), 1) is Heard.GAP
    assert (index.in_doubt(A), index.lives_in_doubt, index.in_doubt(B)) == (True, 1, True)


def test_a_broken_stream_is_zero_reuse_until_it_goes_on_where_it_was():
    prompt = chain("x", 4)
    index = index_of(A)
    index.stored(A, 1, prompt[:2], 1)
    index.suspend(A, 1)
    assert (cached(index, prompt), index.position(A, 1)) == ({}, 1)
    assert index.stored(A, 1, prompt[:2], 1) is Heard.REPEATED
    assert cached(index, prompt) == {A: 2}
    index.suspend(A, 1)
    assert index.stored(A, 1, prompt[2:], 2) is Heard.APPLIED
    assert cached(index, prompt) == {A: 4}
    index.suspend(A, 1)
    assert index.stored(A, 1, prompt[:2], 1) is Heard.REPEATED
    assert cached(index, prompt) == {}, "an older one than the last does not show that nothing is missing"


def test_a_restart_in_place_drops_the_old_lifes_blocks_and_late_events_of_it_change_nothing():
    prompt = chain("x", 4)
    index = index_of(A)
    index.stored(A, 1, prompt, 1)
    index.begin(A, 2)
    assert (cached(index, prompt), index.indexed_blocks(A)) == ({}, 0)
    assert index.stored(A, 1, prompt, 2) is Heard.LATE
    assert index.snapshot(A, 1, prompt, 2) is Heard.LATE
    assert index.snapshot(A, 2, prompt[:1], 1) is Heard.APPLIED
    assert index.overlap(prompt, 0.0)[A] == Overlap(epoch=2, blocks=1, predicted_blocks=0)
    index.predict(A, 1, prompt, 0.0)
    index.suspend(A, 1)
    index.begin(A, 2)
    assert index.overlap(prompt, 0.0)[A] == Overlap(epoch=2, blocks=1, predicted_blocks=0)


def test_a_forgotten_engine_leaves_no_entry_also_after_late_events():
    prompt = chain("x", 400)
    index = index_of(A, B, max_blocks=100_000)
    index.stored(A, 1, prompt, 1)
    index.stored(B, 1, prompt[:100], 1)
    index.predict(A, 1, chain("y", 3), 0.0)
    index.forget(A)
    assert index.stored(A, 1, chain("z", 5), 2) is Heard.LATE
    assert index.snapshot(A, 1, chain("z", 5), 2) is Heard.LATE
    assert (cached(index, prompt), index.indexed_blocks(A), index.predicted_blocks) == ({B: 100}, 0, 0)
    while index.tidy():
        pass
    assert len(index) == 100
    index.forget(A)
    index.begin(C, 1)
    index.snapshot(C, 1, prompt[:2], 1)
    assert cached(index, prompt) == {B: 100, C: 2}, "whoever takes its place starts with nothing"


def test_a_large_snapshot_is_applied_in_slices_and_counts_only_when_complete():
    prompt = chain("x", SLICE * 3)
    index = index_of(A, max_blocks=100_000)
    index.stored(A, 1, chain("old", 2), 1)
    slices = index.snapshot_in_slices(A, 1, prompt, 9)
    for at in range(3):
        next(slices)
        assert (cached(index, prompt), cached(index, chain("old", 2)), at) == ({}, {}, at)
    assert next(slices, "end") == "end"
    assert cached(index, prompt) == {A: 3 * SLICE}
    assert index.stored(A, 1, [], 10) is Heard.APPLIED


def test_a_snapshot_whose_engine_leaves_meanwhile_changes_nothing_more():
    prompt = chain("x", SLICE * 3)
    index = index_of(A, max_blocks=100_000)
    slices = index.snapshot_in_slices(A, 1, prompt, 9)
    next(slices)
    index.forget(A)
    while index.tidy():
        pass
    index.begin(B, 1)
    index.snapshot(B, 1, [], 0)
    assert next(slices, "end") == "end"
    assert (cached(index, prompt), index.indexed_blocks(B), len(index)) == ({}, 0, 0)


def test_siblings_see_what_the_first_of_them_will_bring():
    system = chain("system", 4)
    prompt = chain("q1", 2, after=system)
    sibling = chain("q2", 2, after=system)
    index = index_of(A, B)
    index.stored(A, 1, prompt[:1], 1)
    index.predict(A, 1, prompt, 0.0)
    assert index.overlap(sibling, 4.9)[A] == Overlap(1, 1, 3)
    assert index.overlap(sibling, 5.0)[A] == Overlap(1, 1, 0)
    assert index.predicted_blocks == 0


def test_a_prediction_ends_when_it_came_true_and_does_not_outlive_the_blocks_eviction():
    prompt = chain("x", 4)
    index = index_of(A)
    index.predict(A, 1, prompt, 0.0)
    index.stored(A, 1, prompt[:3], 1)
    assert index.overlap(prompt, 0.1)[A] == Overlap(1, 3, 1)
    index.removed(A, 1, prompt[:1], 2)
    assert cached(index, prompt, 0.1) == {}
    index.predict(A, 1, prompt[:2], 3.0)
    assert index.overlap(prompt, 3.0)[A] == Overlap(1, 0, 4)


def test_a_failed_attempts_prediction_goes_and_its_siblings_stays():
    prompt = chain("x", 4)
    index = index_of(A, B)
    for now in (0.0, 1.0):
        index.predict(A, 1, prompt, now)
    index.predict(B, 1, prompt, 1.0)
    index.withdraw(A, 1, prompt)
    assert predicted(index, prompt, 1.0) == {A: 4, B: 4}
    assert predicted(index, prompt, 5.5) == {A: 4, B: 4}
    index.withdraw(A, 1, prompt)
    assert predicted(index, prompt, 1.0) == {B: 4}
    for epoch in (1, 2):
        index.withdraw(A, epoch, prompt)
        index.withdraw(C, epoch, prompt)
    assert predicted(index, prompt, 1.0) == {B: 4}


@pytest.mark.parametrize("doubt", ["gap", "broken", "flushed", "restarted"])
def test_predictions_of_a_life_in_doubt_count_as_nothing(doubt: str):
    prompt = chain("x", 4)
    index = index_of(A)
    index.predict(A, 1, prompt, 0.0)
    match doubt:
        case "gap":
            index.stored(A, 1, [], 5)
        case "broken":
            index.suspend(A, 1)
        case "flushed":
            index.cleared(A, 1, 1)
        case _:
            index.begin(A, 2)
    assert predicted(index, prompt) == {}
    index.predict(A, 1, prompt, 0.0)
    assert predicted(index, prompt) == ({A: 4} if doubt == "flushed" else {})


def test_predictions_are_bounded_and_the_oldest_end_first():
    index = index_of(A, max_blocks=10 * MAX_PREDICTED)
    for n in range(300):
        index.predict(A, 1, chain(str(n), 250), float(n) / 1000)
    assert index.predicted_blocks <= MAX_PREDICTED
    assert predicted(index, chain("0", 250), 0.3) == {}
    assert predicted(index, chain("299", 250), 0.3) == {A: 250}


def test_the_least_recently_stored_or_matched_blocks_leave_first():
    index = index_of(A, B, max_blocks=12)
    old, hot, new = chain("old", 4), chain("hot", 4), chain("new", 6)
    for n, hashes in enumerate((hot, old), 1):
        index.stored(A, 1, hashes, n)
    index.stored(B, 1, old[:1], 1)
    assert cached(index, hot) == {A: 4}
    index.stored(A, 1, new, 3)
    assert (len(index), index.evicted) == (12, 2)
    assert cached(index, hot) == {A: 4}
    assert cached(index, new) == {A: 6}
    assert cached(index, old) == {A: 2, B: 1}, "its end leaves before its beginning"
    assert (index.indexed_blocks(A), index.indexed_blocks(B)) == (12, 1)


def test_a_match_keeps_a_prefix_and_its_beginning_longest():
    index = index_of(A, max_blocks=12)
    matched, other = chain("matched", 6), chain("other", 4)
    for n, hashes in enumerate((matched, other), 1):
        index.stored(A, 1, hashes, n)
    assert cached(index, matched) == {A: 6}
    index.stored(A, 1, chain("new", 8), 3)
    assert (cached(index, other), cached(index, matched)) == ({}, {A: 4})


def test_a_slot_that_comes_back_starts_at_zero_also_when_its_blocks_were_evicted_before_they_were_swept_out():
    table = BlockTable(5000)
    gone, stays = table.open(), table.open()
    table.add(gone, chain("gone", 3000))
    table.retire(gone)
    table.add(stays, chain("stays", 4500))
    assert table.evicted > 0
    while table.tidy():
        pass
    assert (table.open(), table.count(gone)) == (gone, 0)
    assert table.count(stays) == len(table)


def test_a_hundred_thousand_distinct_blocks_stay_under_the_cap_in_number_and_in_bytes():
    index = index_of(A, max_blocks=8192)
    blocks = 0
    for n in range(1, 1001):
        hashes = [blake2b(b"%d-%d" % (n, at), digest_size=16).digest() for at in range(100)]
        index.stored(A, 1, hashes, n)
        blocks += 100
    assert (len(index), index.evicted) == (index.indexed_blocks(A), blocks - len(index))
    assert 8000 <= len(index) <= 8192
    size = sum(sys.getsizeof(part) + sum(map(sys.getsizeof, part)) for part in index._table._parts)
    assert size <= 300 * 8192, f"{size / 8192:.0f} bytes a block"


def test_a_thousand_engines_with_one_prefix_take_one_entry_a_block():
    prompt = chain("x", 3)
    engines = [EngineId(f"e{n}") for n in range(1000)]
    index = index_of(*engines)
    for engine in engines:
        index.predict(engine, 1, prompt, 0.0)
    assert index.predicted_blocks == 3
    for engine in engines:
        index.stored(engine, 1, prompt, 1)
    overlaps = index.overlap(prompt, 0.0)
    assert (len(index), index.predicted_blocks, len(overlaps)) == (3, 0, 1000)
    assert set(overlaps.values()) == {Overlap(1, 3, 0)}
    for engine in engines:
        index.removed(engine, 1, prompt[1:], 2)
    assert (len(index), set(index.overlap(prompt, 0.0).values())) == (1, {Overlap(1, 1, 0)})


def test_flushes_without_end_do_not_widen_the_index():
    index = index_of(A, max_blocks=100_000)
    for n in range(3000):
        index.stored(A, 1, chain(str(n), 1), 2 * n + 1)
        index.cleared(A, 1, 2 * n + 2)
    assert index._table.slots < 600, "slots come back once they are swept out"
    while index.tidy():
        pass
    assert len(index) == 0


def test_an_index_without_room_follows_and_knows_nothing():
    prompt = chain("x", 3)
    index = index_of(A, max_blocks=0)
    index.predict(A, 1, prompt, 0.0)
    assert index.stored(A, 1, prompt, 1) is Heard.APPLIED
    assert (dict(index.overlap(prompt, 0.0)), len(index), index.predicted_blocks) == ({}, 0, 0)


def test_an_empty_chain_overlaps_nobody():
    index = index_of(A)
    index.predict(A, 1, [], 0.0)
    index.withdraw(A, 1, [])
    assert dict(index.overlap([], 0.0)) == {}
