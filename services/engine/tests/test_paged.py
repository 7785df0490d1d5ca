from __future__ import annotations

import pytest
import torch

from headrace.engine.core.sampling_plan import SamplingPlan
from headrace.engine.core.step import SequenceSlice
from headrace.engine.kernels.reference.paged_attention import KvCache, paged_attention, write_kv
from headrace.engine.layers.attention import PADDED_TOKENS_PER_GROUP, WINDOWED_CHUNK, plan_attention

HEADS, KV_HEADS, HEAD_DIM, BLOCK, BLOCKS, LAYERS = 6, 2, 8, 16, 96, 2
SENTINEL = 1e9
PLAN = SamplingPlan(max_tokens=1)


def ragged_batch(shapes: list[tuple[int, int]]) -> list[SequenceSlice]:
    """Slices of (start, new tokens), over shuffled blocks, with a block to spare at the end of each table."""
    free = torch.randperm(BLOCKS).tolist()
    batch = []
    for i, (start, count) in enumerate(shapes):
        table = [free.pop() for _ in range(-(-(start + count) // BLOCK) + 1)]
        batch.append(
            SequenceSlice(sequence_id=i, token_ids=[0] * count, start=start, block_table=table, samples=True, plan=PLAN)
        )
    return batch


def slots_of(piece: SequenceSlice, first: int, last: int) -> list[int]:
    return [piece.block_table[p // BLOCK] * BLOCK + p % BLOCK for p in range(first, last)]


def dense_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None) -> torch.Tensor:
    """The textbook, in float64: the queries are the last of the sequence, and see the `window` keys up to their own."""
    k, v = (x.double().repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) / HEAD_DIM**0.5
    ages = torch.arange(len(k) - len(q), len(k)).unsqueeze(1) - torch.arange(len(k))
    hidden = (ages < 0) | (ages >= (window or len(k)))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v).flatten(1)


RAGGED = [
    [(0, 1)],
    [(0, 16), (15, 1), (16, 1), (0, 17)],
    [(0, 33), (32, 1), (31, 1), (33, 1), (1, 16), (16, 17), (40, 2)],
    [(n, 1) for n in (0, 1, 15, 16, 17, 31, 32, 33, 100, 200)],
    [(200, 1), (0, 64), (7, 9), (199, 1), (64, 64), (3, 1)],
    [(0, 2 * WINDOWED_CHUNK + 1), (30, WINDOWED_CHUNK + 5)],
]


@pytest.mark.parametrize("window", [None, 1, 5, 16, 32, 1000])
@pytest.mark.parametrize("shapes", RAGGED)
def test_paged_attention_equals_dense_attention_and_writes_only_its_own_slots(
    shapes: list[tuple[int, int]], window: int | None
) -> None:
    torch.manual_seed(len(shapes))
    batch = ragged_batch(shapes)
    cache = KvCache.zeros(
        layers=LAYERS, slots=BLOCKS * BLOCK, kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=torch.float32
    )
    cache.keys.fill_(SENTINEL)
    cache.values.fill_(SENTINEL)
    for piece in batch:  # earlier steps
        past = slots_of(piece, 0, piece.start)
        cache.keys[1, past] = torch.randn(len(past), KV_HEADS, HEAD_DIM)
        cache.values[1, past] = torch.randn(len(past), KV_HEADS, HEAD_DIM)
    before = cache.keys.clone(), cache.values.clone()
    rows = sum(len(piece.token_ids) for piece in batch)
    q, k, v = (torch.randn(rows, n, HEAD_DIM) for n in (HEADS, KV_HEADS, KV_HEADS))

    plan = plan_attention(batch, BLOCK, torch.float32, window)
    write_kv(cache, 1, plan, k, v)
    out = paged_attention(q, cache, 1, plan)

    row = 0
    for piece in batch:
        end = piece.start + len(piece.token_ids)
        context, mine = slots_of(piece, 0, end), slice(row, row + len(piece.token_ids))
        expected = dense_attention(q[mine], cache.keys[1, context], cache.values[1, context], window)
        torch.testing.assert_close(out[mine].double(), expected, rtol=1e-5, atol=1e-5)
        before[0][1, context[piece.start :]] = k[mine]
        before[1][1, context[piece.start :]] = v[mine]
        row = mine.stop
    assert torch.equal(cache.keys, before[0])
    assert torch.equal(cache.values, before[1])


def test_garbage_in_unused_slots_never_reaches_a_sequence_even_when_it_is_not_a_number() -> None:
    torch.manual_seed(9)
    batch = ragged_batch([(20, 1), (3, 1), (0, 5)])
    q, k, v = (torch.randn(7, n, HEAD_DIM) for n in (HEADS, KV_HEADS, KV_HEADS))
    outputs = []
    for garbage in (0.0, torch.nan):
        cache = KvCache.zeros(layers=1, slots=BLOCKS * BLOCK, kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=torch.float32)
        cache.keys.fill_(garbage)
        cache.values.fill_(garbage)
        for piece in batch:
            past = slots_of(piece, 0, piece.start)
            cache.keys[0, past] = cache.values[0, past] = 0.5
        plan = plan_attention(batch, BLOCK, torch.float32)
        write_kv(cache, 0, plan, k, v)
        outputs.append(paged_attention(q, cache, 0, plan))
    assert torch.equal(*outputs)


def test_keys_that_no_query_sees_are_not_even_read() -> None:
    """They may lie in blocks that a windowed model will one day give back."""
    batch = ragged_batch([(100, 1), (0, WINDOWED_CHUNK + 40), (60, 3)])
    plan = plan_attention(batch, BLOCK, torch.float32, 20)
    assert plan.groups[0].slots.tolist() == slots_of(batch[0], 81, 101)
    first, second, third = plan.chunks
    assert first.slots.tolist() == slots_of(batch[1], 0, WINDOWED_CHUNK)
    assert second.slots.tolist() == slots_of(batch[1], WINDOWED_CHUNK - 19, WINDOWED_CHUNK + 40)
    assert third.slots.tolist() == slots_of(batch[2], 41, 63)


def test_sequences_of_very_different_length_are_not_padded_to_the_longest() -> None:
    batch = ragged_batch([(5, 1), (PADDED_TOKENS_PER_GROUP + 100, 1), (6, 1), (PADDED_TOKENS_PER_GROUP + 90, 1)])
    groups = plan_attention(batch, BLOCK, torch.float32).groups
    assert [group.rows.tolist() for group in groups] == [[1, 3], [2, 0]]
    assert [group.length for group in groups] == [PADDED_TOKENS_PER_GROUP + 101, 7]
