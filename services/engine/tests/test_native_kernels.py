"""Every native kernel against numpy, on random shapes, with every instruction set of this machine."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from headrace.engine.kernels.cpu.library import (
    PAGE,
    PANEL,
    Attention,
    Batch,
    Finish,
    Format,
    Isa,
    KvFormat,
    Linear,
    Pool,
    Unavailable,
    address,
    load_library,
    padded,
)

Floats = NDArray[np.float32]

# Relative to the products' own spread: bf16 keeps 8 bits; int8 and int4 are compared with exact products of the
# rounded numbers, so only float32 rounding is left.
TOLERANCE = {Format.FLOAT: 1e-5, Format.BF16: 2e-5, Format.INT8: 1e-5, Format.INT4: 1e-5}
SHAPES = [(1, 1, 1), (1, 16, 64), (2, 17, 3), (7, 64, 63), (5, 33, 65), (13, 130, 200), (33, 100, 129), (200, 49, 96)]


@pytest.fixture(scope="module", params=list(Isa), ids=lambda isa: isa.name.lower())
def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    try:
        pool = Pool(load_library(), 2, request.param)
    except Unavailable as reason:
        pytest.skip(str(reason))
    yield pool
    pool.close()


@dataclass(kw_only=True)
class Packed:
    """A packed matrix, and the numbers that it stands for: [columns, depth]."""

    linear: Linear
    rounded: Floats
    arrays: list[Any]


def bf16(x: Floats) -> Floats:
    """Rounded to the nearest bf16, ties to even."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)).astype(np.uint32).view(np.float32)


def pack(pool: Pool, format: Format, *parts: Floats, bias: Floats | None = None) -> Packed:
    """`parts` as one matrix whose panels take turns."""
    library, depth = pool.library, parts[0].shape[1]
    panels = sum(-(-len(part) // PANEL) for part in parts)
    weights = np.full(library.hr_weights_bytes(format, panels, depth), 0xAA, dtype=np.uint8)
    scales = np.full(library.hr_scales_bytes(format, panels), 0xAA, dtype=np.uint8)
    for i, part in enumerate(parts):
        library.hr_pack(
            pool.handle, format, address(part), len(part), depth, i, len(parts), address(weights), address(scales),
        )  # fmt: skip
    linear = Linear(
        format=format, columns=len(parts[0]) if len(parts) == 1 else panels * PANEL, depth=depth, panels=panels,
        weights=address(weights), scales=address(scales), bias=address(bias),
    )  # fmt: skip
    rounded = unpack(format, weights, scales, panels, depth)
    return Packed(linear=linear, rounded=rounded, arrays=[weights, scales, bias, parts])


def unpack(format: Format, weights: NDArray[np.uint8], scales: NDArray[np.uint8], panels: int, depth: int) -> Floats:
    """The numbers in packed arrays, [panels * 16, depth], by the layouts that headrace_cpu.h describes."""
    if format is Format.FLOAT:
        return weights.view(np.float32).reshape(panels, depth, PANEL).transpose(0, 2, 1).reshape(-1, depth)
    if format is Format.BF16:
        pairs = weights.view(np.uint16).reshape(panels, -1, PANEL, 2).transpose(0, 2, 1, 3).reshape(panels * PANEL, -1)
        return (pairs.astype(np.uint32) << 16).view(np.float32)[:, :depth]
    if format is Format.INT8:
        quads = weights.reshape(panels, -1, PANEL, 4).transpose(0, 2, 1, 3).reshape(panels * PANEL, -1)
        return ((quads.astype(np.float32) - 128) * scales.view(np.float32)[:, None])[:, :depth]
    groups = weights.reshape(panels, -1, 640)
    packed = groups[:, :, :512].reshape(panels, -1, PANEL, 1, 4)
    nibbles = np.concatenate([packed & 15, packed >> 4], axis=3).transpose(0, 2, 1, 3, 4).reshape(panels * PANEL, -1)
    # [panels, groups of 64, scale or least, half group, lane]
    halves = (
        np.ascontiguousarray(groups[:, :, 512:]).view(np.float16).astype(np.float32).reshape(panels, -1, 2, 2, PANEL)
    )
    steps = halves.transpose(2, 0, 4, 1, 3).reshape(2, panels * PANEL, -1).repeat(32, axis=2)
    return (nibbles.astype(np.float32) * steps[0] + steps[1])[:, :depth]


def rounded_rows(format: Format, x: Floats) -> Floats:
    """Activations as the kernels multiply them."""
    if format is Format.FLOAT:
        return x
    if format is Format.BF16:
        return bf16(x)
    groups = np.pad(x, ((0, 0), (0, -x.shape[1] % 64))).reshape(len(x), -1, 64)
    scale = np.abs(groups).max(axis=2, keepdims=True) / np.float32(127)
    safe = np.where(scale > 0, scale, np.float32(1))
    return (np.rint(groups / safe) * scale).reshape(len(x), -1)[:, : x.shape[1]].astype(np.float32)


def apply(
    pool: Pool, packed: Packed, x: Floats, *, norm: Floats | None = None, finish: Finish = Finish.STORE,
    out: Floats | None = None,
) -> Floats:  # fmt: skip
    x = np.ascontiguousarray(x)
    out = np.zeros((len(x), padded(packed.linear.columns)), dtype=np.float32) if out is None else out
    pool.library.hr_apply_linear(
        pool.handle, ctypes.byref(packed.linear), address(x), address(norm), 1e-5, len(x), finish, address(out)
    )
    return out


def random(seed: int, *shape: int) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("format", list(Format), ids=lambda f: f.name.lower())
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_product_is_that_of_the_rounded_numbers(pool: Pool, format: Format, shape: tuple[int, int, int]) -> None:
    rows, columns, depth = shape
    x, weights = random(1, rows, depth), random(2, columns, depth)
    bias = np.zeros(-(-columns // PANEL) * PANEL, dtype=np.float32)
    bias[:columns] = random(3, columns)
    packed = pack(pool, format, weights, bias=bias)
    out = apply(pool, packed, x)[:, :columns]
    exact = rounded_rows(format, x).astype(np.float64) @ packed.rounded[:columns].astype(np.float64).T + bias[:columns]
    # One step of 1/127 where a value lies between two steps and float rounding decides.
    slack = 0.02 if format in (Format.INT8, Format.INT4) else 0
    assert np.abs(out - exact).max() <= (TOLERANCE[format] + slack) * depth**0.5
    assert np.median(np.abs(out - exact)) <= TOLERANCE[format] * depth**0.5


@pytest.mark.parametrize(("format", "most"), [(Format.BF16, 0.004), (Format.INT8, 0.012), (Format.INT4, 0.09)])
def test_rounding_weights_costs_what_their_bits_allow(pool: Pool, format: Format, most: float) -> None:
    weights = random(4, 64, 256)
    rounded = pack(pool, format, weights).rounded
    assert np.sqrt(((rounded - weights) ** 2).mean()) <= most


@pytest.mark.parametrize("depth", [32, 64, 160])
def test_weights_of_a_4_bit_file_are_kept_exactly(pool: Pool, depth: int) -> None:
    generator = np.random.default_rng(7)
    nibbles = generator.integers(0, 16, (40, depth // 32, 32)).astype(np.float32)
    nibbles[:, :, :2] = 0, 15  # as whoever made the file chose its steps
    steps = 10.0 ** generator.uniform(-4, 1, (40, depth // 32, 1))
    least = (-steps * generator.uniform(1, 14, steps.shape)).astype(np.float16).astype(np.float32)
    weights = (nibbles * steps.astype(np.float16).astype(np.float32) + least).reshape(40, depth)
    weights[3, :32] = least[0, 0, 0]  # no steps at all
    np.testing.assert_array_equal(pack(pool, Format.INT4, weights).rounded[:40], weights)


@pytest.mark.parametrize("format", [Format.INT8, Format.INT4], ids=lambda f: f.name.lower())
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("rows", [1, 4, 9])
def test_the_largest_products_of_integers_are_not_cut_off(pool: Pool, format: Format, sign: int, rows: int) -> None:
    x, weights = np.full((rows, 128), sign, dtype=np.float32), np.ones((40, 128), dtype=np.float32)
    weights[:, ::32] = 0  # the least of each half group: all others are the largest nibble, 15
    packed = pack(pool, format, weights)
    out = apply(pool, packed, x)[:, :40]
    np.testing.assert_allclose(out, rounded_rows(format, x) @ packed.rounded[:40].T, rtol=1e-5)
    np.testing.assert_allclose(out, np.full((rows, 40), sign * 124), rtol=0.01)


@pytest.mark.parametrize("format", list(Format), ids=lambda f: f.name.lower())
def test_a_row_is_the_same_to_the_bit_whatever_stands_beside_it(pool: Pool, format: Format) -> None:
    x, weights = random(5, 131, 200), random(6, 150, 200)
    packed = pack(pool, format, weights)
    together = apply(pool, packed, x)
    for first, last in ((0, 1), (3, 5), (7, 20), (64, 131)):
        np.testing.assert_array_equal(apply(pool, packed, x[first:last]), together[first:last])


def test_one_thread_computes_the_same_bits_as_three(pool: Pool) -> None:
    x, weights = random(7, 20, 96), random(8, 400, 96)
    results = []
    for threads in (1, 3):
        other = Pool(pool.library, threads, pool.isa)
        results.append(apply(other, pack(other, Format.BF16, weights), x))
        other.close()
    np.testing.assert_array_equal(*results)


def test_instruction_sets_agree_on_integer_products() -> None:
    library = load_library()
    x, weights = random(9, 6, 100), random(10, 40, 100)
    found = []
    for isa in Isa:
        try:
            pool = Pool(library, 1, isa)
        except Unavailable:
            continue
        found.append(apply(pool, pack(pool, Format.INT8, weights), x))
        pool.close()
    for other in found[1:]:
        np.testing.assert_allclose(found[0], other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("format", list(Format), ids=lambda f: f.name.lower())
def test_rows_are_normalised_before_they_are_rounded(pool: Pool, format: Format) -> None:
    x, weights = random(11, 5, 70) * 30, random(12, 20, 70)
    norm = np.zeros(padded(70), dtype=np.float32)
    norm[:70] = random(13, 70)
    packed = pack(pool, format, weights)
    expected = x / np.sqrt((x**2).mean(axis=1, keepdims=True) + 1e-5) * norm[:70]
    np.testing.assert_allclose(
        apply(pool, packed, x, norm=norm)[:, :20],
        rounded_rows(format, expected) @ packed.rounded[:20].T,
        atol=0.3 if format in (Format.INT8, Format.INT4) else 0.1 if format is Format.BF16 else 1e-3,
    )


def test_a_product_can_be_added_to_what_is_there(pool: Pool) -> None:
    x, weights, there = random(14, 9, 48), random(15, 80, 48), random(16, 9, padded(80))
    packed = pack(pool, Format.FLOAT, weights)
    out = apply(pool, packed, x, finish=Finish.ADD, out=there.copy())
    np.testing.assert_allclose(out[:, :80] - there[:, :80], x @ weights.T, atol=1e-4)


def test_gates_and_what_they_multiply_come_from_alternate_panels(pool: Pool) -> None:
    x, gate, up = random(17, 9, 48) * 4, random(18, 50, 48), random(19, 50, 48)
    gate[0] = 1e4 * np.abs(gate[0])  # gates far to both sides
    packed = pack(pool, Format.FLOAT, gate, up)
    out = np.zeros((9, padded(packed.linear.columns)), dtype=np.float32)
    apply(pool, packed, x, finish=Finish.SILU_MUL, out=out)
    gates = (x @ gate.T).astype(np.float64)
    expected = gates / (1 + np.exp(-np.maximum(gates, -700))) * (x @ up.T)
    np.testing.assert_allclose(out[:, :50], expected, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("format", list(Format), ids=lambda f: f.name.lower())
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_a_number_stays_so_and_in_its_row(pool: Pool, format: Format, bad: float) -> None:
    x, weights = random(20, 4, 64), random(21, 32, 64)
    packed = pack(pool, format, weights)
    clean = apply(pool, packed, x)
    x[1, 7] = bad
    out = apply(pool, packed, x)
    assert not np.isfinite(out[1, :32]).any()
    np.testing.assert_array_equal(np.delete(out, 1, axis=0), np.delete(clean, 1, axis=0))


def test_a_row_of_zeros_gives_zeros(pool: Pool) -> None:
    for format in Format:
        assert not apply(pool, pack(pool, format, random(22, 20, 30)), np.zeros((3, 30), dtype=np.float32)).any()


# ---- attention ----


@dataclass(frozen=True, kw_only=True)
class Heads:
    """How a model attends."""

    heads: int
    kv_heads: int
    head_dim: int
    block_size: int = 16
    window: int = 0
    normed: bool = False


LAYOUTS = [
    Heads(heads=9, kv_heads=3, head_dim=64),
    Heads(heads=4, kv_heads=4, head_dim=80),
    Heads(heads=8, kv_heads=1, head_dim=96, block_size=32),
    Heads(heads=8, kv_heads=2, head_dim=128),
    Heads(heads=6, kv_heads=2, head_dim=8),
    Heads(heads=2, kv_heads=1, head_dim=10, normed=True),
    Heads(heads=7, kv_heads=1, head_dim=72, window=21),
    Heads(heads=4, kv_heads=2, head_dim=256, block_size=48),
    Heads(heads=6, kv_heads=2, head_dim=64, window=1),
    Heads(heads=14, kv_heads=2, head_dim=64, window=40, normed=True),
]


def byte_heads(heads: Floats) -> Floats:
    """Rounded to bytes of one scale for each row of a head, itself rounded up to bf16."""
    scale = (np.abs(heads).max(axis=2, keepdims=True) / np.float32(127)).astype(np.float32)
    rounded_up = ((scale.view(np.uint32) + 0xFFFF) & np.uint32(0xFFFF0000)).view(np.float32)
    return np.rint(heads / rounded_up) * rounded_up


class Attending:
    """Sequences with random queries, keys and values: through the kernel in pieces, and in numpy at once."""

    def __init__(self, pool: Pool, shape: Heads, lengths: list[int], kept: KvFormat = KvFormat.BF16) -> None:
        self.pool, self.shape, self.lengths, self.kept = pool, shape, lengths, kept
        self.stride = padded((shape.heads + 2 * shape.kv_heads) * shape.head_dim)
        self.qkv = [random(100 + i, length, self.stride) for i, length in enumerate(lengths)]
        self.norms = random(99, shape.heads + shape.kv_heads, shape.head_dim)
        self.frequencies = np.float32(100.0) ** -(np.arange(shape.head_dim // 2, dtype=np.float32) / shape.head_dim)
        per_sequence = -(-max(lengths) // shape.block_size)
        blocks = per_sequence * len(lengths) + 1
        size = pool.library.hr_cache_bytes(kept, 1, blocks, shape.block_size, shape.kv_heads, shape.head_dim)
        # As sequences before these left it: every number is a NaN.
        self.cache = np.full(size, 0xFF, dtype=np.uint8)
        order = np.random.default_rng(5).permutation(blocks).astype(np.int32)
        self.tables = order[: per_sequence * len(lengths)].reshape(len(lengths), per_sequence)

    def run(self, pieces: list[tuple[int, int, int]]) -> list[Floats]:
        """Attend to the positions `first` to `last` - 1 of each (sequence, first, last), all in one step."""
        shape = self.shape
        qkv = np.concatenate([self.qkv[s][first:last] for s, first, last in pieces])
        positions = np.concatenate([np.arange(first, last) for _, first, last in pieces]).astype(np.int32)
        first_row = np.cumsum([0] + [last - first for _, first, last in pieces]).astype(np.int32)
        starts = np.array([s * self.tables.shape[1] for s, _, _ in pieces], dtype=np.int32)
        out = np.zeros((len(qkv), padded(shape.heads * shape.head_dim)), dtype=np.float32)
        attention = Attention(
            heads=shape.heads, kv_heads=shape.kv_heads, head_dim=shape.head_dim, block_size=shape.block_size,
            window=shape.window, eps=1e-6, rope_factor=1.0, kv_format=self.kept, qkv=address(qkv),
            head_norms=address(self.norms) if shape.normed else None, frequencies=address(self.frequencies),
            cache=address(self.cache), out=address(out),
        )  # fmt: skip
        batch = Batch(
            rows=len(qkv), slices=len(pieces), positions=address(positions), first_row=address(first_row),
            tables=address(self.tables), table_start=address(starts),
        )  # fmt: skip
        self.pool.library.hr_apply_attention(self.pool.handle, ctypes.byref(attention), ctypes.byref(batch))
        return np.split(out[:, : shape.heads * shape.head_dim], first_row[1:-1])

    def expected(self, sequence: int) -> Floats:
        """Plain softmax attention over queries, keys and values as the cache rounds them."""
        shape, length = self.shape, self.lengths[sequence]
        split = [shape.heads, shape.heads + shape.kv_heads]
        used = self.qkv[sequence][:, : (shape.heads + 2 * shape.kv_heads) * shape.head_dim]
        queries, keys, values = np.split(used.reshape(length, -1, shape.head_dim), split, axis=1)
        if shape.normed:
            queries, keys = self._normed(queries, self.norms[: shape.heads]), self._normed(keys, self.norms[split[0] :])
        rounded = byte_heads if self.kept is KvFormat.INT8 else bf16
        queries, keys, values = rounded(self._rotated(queries)), rounded(self._rotated(keys)), rounded(values)
        group = shape.heads // shape.kv_heads
        keys, values = keys.repeat(group, axis=1), values.repeat(group, axis=1)
        scores = np.einsum("qhd,khd->hqk", queries, keys) / np.sqrt(shape.head_dim)
        distance = np.arange(length)[:, None] - np.arange(length)
        seen = (distance >= 0) & ((distance < shape.window) if shape.window else True)
        scores = np.where(seen, scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=2, keepdims=True))
        return np.einsum("hqk,khd->qhd", weights / weights.sum(axis=2, keepdims=True), values).reshape(length, -1)

    def _normed(self, heads: Floats, weights: Floats) -> Floats:
        return heads / np.sqrt((heads**2).mean(axis=2, keepdims=True) + 1e-6) * weights

    def _rotated(self, heads: Floats) -> Floats:
        angles = (np.arange(len(heads), dtype=np.float32)[:, None] * self.frequencies)[:, None]
        first, second = np.split(heads, 2, axis=2)
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=2)


KEPT = pytest.mark.parametrize("kept", list(KvFormat), ids=lambda kept: kept.name.lower())


@KEPT
@pytest.mark.parametrize("shape", LAYOUTS, ids=str)
def test_attention_over_pages_is_plain_attention(pool: Pool, shape: Heads, kept: KvFormat) -> None:
    lengths = [1, 2, 15, 16, 17, 31, 33, 100]
    attending = Attending(pool, shape, lengths, kept)
    results = attending.run([(s, 0, length) for s, length in enumerate(lengths)])
    for sequence, result in enumerate(results):
        # Weights are rounded to bf16, or to 127 steps, before they multiply values of about 1.
        atol = 0.03 if kept is KvFormat.INT8 else 0.02
        np.testing.assert_allclose(result, attending.expected(sequence), atol=atol)


@KEPT
@pytest.mark.parametrize("window", [0, 700])
def test_a_long_context_is_attended_to_in_ranges(pool: Pool, window: int, kept: KvFormat) -> None:
    shape = Heads(heads=1, kv_heads=1, head_dim=16, window=window)
    attending, cut = (Attending(pool, shape, [1100], kept) for _ in range(2))
    whole, expected = attending.run([(0, 0, 1100)])[0], attending.expected(0)
    np.testing.assert_allclose(whole, expected, atol=0.02)
    first = 0
    for position in (511, 512, 513, 1023, 1024, 1099):  # alone, so that its ranges are shared out
        if first < position:
            cut.run([(0, first, position)])
        np.testing.assert_array_equal(cut.run([(0, position, position + 1)])[0][0], whole[position])
        first = position + 1


@KEPT
def test_how_many_threads_share_a_long_context_changes_no_bit(pool: Pool, kept: KvFormat) -> None:
    shape, steps = Heads(heads=2, kv_heads=1, head_dim=16), [(0, 1099, 1100), (1, 700, 705), (2, 0, 20)]
    results = []
    for threads in (1, 2, 5):
        other = Pool(pool.library, threads, pool.isa)
        attending = Attending(other, shape, [1100, 705, 20], kept)
        for first in range(0, 1100, 250):
            attending.run(
                [(s, first, min(first + 250, length)) for s, length in ((0, 1100), (1, 705)) if first < length]
            )
        results.append([attending.run([step]) for step in steps] + [attending.run(steps)])
        other.close()
    for result in results:
        for alone, beside in zip(result[:3], result[3], strict=True):
            np.testing.assert_array_equal(alone[0], beside)
        for one, other_result in zip(results[0][3], result[3], strict=True):
            np.testing.assert_array_equal(one, other_result)


@KEPT
@pytest.mark.parametrize("shape", LAYOUTS, ids=str)
def test_attention_is_the_same_to_the_bit_however_a_sequence_is_cut(pool: Pool, shape: Heads, kept: KvFormat) -> None:
    lengths = [70, 40]
    whole = Attending(pool, shape, lengths, kept)
    expected = whole.run([(0, 0, 70), (1, 0, 40)])
    cut = Attending(pool, shape, lengths, kept)
    got: list[list[Floats]] = [[], []]
    for step in ([(0, 0, 33)], [(0, 33, 34), (1, 0, 16)], [(1, 16, 39), (0, 34, 69)], [(0, 69, 70), (1, 39, 40)]):
        for (sequence, _, _), out in zip(step, cut.run(step), strict=True):
            got[sequence].append(out)
    for sequence in (0, 1):
        np.testing.assert_array_equal(np.concatenate(got[sequence]), expected[sequence])


@KEPT
def test_a_number_that_is_none_stays_in_its_sequence(pool: Pool, kept: KvFormat) -> None:
    shape = Heads(heads=4, kv_heads=2, head_dim=24)
    clean, broken = (Attending(pool, shape, [40, 30], kept) for _ in range(2))
    broken.qkv[0][35] = np.nan
    expected, got = (attending.run([(0, 0, 40), (1, 0, 30)]) for attending in (clean, broken))
    assert np.isnan(got[0][35:]).all()
    np.testing.assert_array_equal(got[0][:32], expected[0][:32])
    np.testing.assert_array_equal(got[1], expected[1])


@KEPT
def test_no_other_block_is_written(pool: Pool, kept: KvFormat) -> None:
    shape = Heads(heads=4, kv_heads=2, head_dim=64)
    attending = Attending(pool, shape, [20, 40], kept)
    attending.run([(0, 0, 20)])
    size = attending.cache.size // (attending.tables.size + 1)
    written = attending.cache.reshape(-1, size).min(axis=1) < 0xFF
    assert set(written.nonzero()[0]) == set(attending.tables[0][: -(-20 // PAGE)])
