"""Blocks of quantised weights to floats, in torch: all cores, straight into the memory that keeps the result.

The common types have their own vectorised path; on two cores it is about ten times as fast as gguf's numpy reference,
which serves the rest. Every type gives bit for bit what gguf.quants gives (tests/test_gguf.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.base.errors import StartError

# Weights are converted this many at a time, so that intermediates stay in the cache (4 MB as float32).
CHUNK_WEIGHTS = 1 << 20
# Types left to gguf's numpy code, by its names for them.
_BY_GGUF = ("Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q5_K", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S",
            "IQ1_S", "IQ1_M", "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0", "MXFP4")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFormat:
    """How a tensor type packs weights: `weights` of them in `size` bytes."""

    name: str
    weights: int
    size: int


def block_format(kind: int) -> BlockFormat:
    """The format of GGML type number `kind`; StartError when nobody can read it."""
    if kind in _OWN:
        return _OWN[kind][0]
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    names = {int(GGMLQuantizationType[name]): name for name in _BY_GGUF}
    if kind not in names:
        supported = ", ".join([own.name for own, _ in _OWN.values()] + list(_BY_GGUF))
        raise StartError(f"GGUF tensor type {kind} is not supported; supported: {supported}")
    weights, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    return BlockFormat(name=names[kind], weights=weights, size=size)


def dequantize(kind: int, raw: Tensor, out: Tensor) -> None:
    """Convert the bytes `raw` (uint8, whole blocks) of GGML type `kind` into the contiguous float tensor `out`."""
    fmt = block_format(kind)
    convert = _OWN[kind][1] if kind in _OWN else _numpy_converter(kind)
    blocks = raw.reshape(-1, fmt.size)
    flat = out.view(-1, fmt.weights)
    step = max(1, CHUNK_WEIGHTS // fmt.weights)
    for first in range(0, len(blocks), step):
        part = flat[first : first + step]
        if out.dtype == torch.float32:
            convert(blocks[first : first + step], part)
        else:  # rounded once, from the float32 value
            exact = torch.empty_like(part, dtype=torch.float32)
            convert(blocks[first : first + step], exact)
            part.copy_(exact)


def _halves(blocks: Tensor, first: int, count: int) -> Tensor:
    """`count` float16 numbers from byte `first` of each block, as float32 [blocks, count]."""
    return blocks[:, first : first + 2 * count].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor, out: Tensor) -> None:
    """Low nibbles are the first half of a block, high nibbles the second."""
    half = out.shape[1] // 2
    out[:, :half] = packed & 15
    out[:, half:] = packed >> 4


def _q4_0(blocks: Tensor, out: Tensor) -> None:
    _nibbles(blocks[:, 2:], out)
    out.sub_(8).mul_(_halves(blocks, 0, 1))


def _q4_1(blocks: Tensor, out: Tensor) -> None:
    scale_and_least = _halves(blocks, 0, 2)
    _nibbles(blocks[:, 4:], out)
    out.mul_(scale_and_least[:, :1]).add_(scale_and_least[:, 1:])


def _q8_0(blocks: Tensor, out: Tensor) -> None:
    out.copy_(blocks[:, 2:].view(torch.int8)).mul_(_halves(blocks, 0, 1))


def _q4_k(blocks: Tensor, out: Tensor) -> None:
    """Eight groups of 32: two float16 factors, their 6-bit multiples per group in 12 bytes, then nibbles."""
    factors = _halves(blocks, 0, 2)
    low, middle, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((low & 63, (high & 15) | (low >> 2 & 48)), dim=1) * factors[:, :1]
    least = torch.cat((middle & 63, (high >> 4) | (middle >> 2 & 48)), dim=1) * factors[:, 1:]
    packed = blocks[:, 16:].reshape(-1, 4, 32)
    groups = out.view(-1, 4, 2, 32)
    groups[:, :, 0] = packed & 15
    groups[:, :, 1] = packed >> 4
    out.view(-1, 8, 32).mul_(scales.unsqueeze(2)).sub_(least.unsqueeze(2))


def _q6_k(blocks: Tensor, out: Tensor) -> None:
    """Two halves of 128: low nibbles in 64 bytes, upper bit pairs in 32; an int8 multiple of the scale per 16."""
    low, high = blocks[:, :128].reshape(-1, 2, 64), blocks[:, 128:192].reshape(-1, 2, 32)
    scales = blocks[:, 192:208].view(torch.int8) * _halves(blocks, 208, 1)
    quarters = out.view(-1, 2, 4, 32)
    for quarter in range(4):
        nibbles = low[:, :, quarter % 2 * 32 : quarter % 2 * 32 + 32] >> quarter // 2 * 4 & 15
        quarters[:, :, quarter] = nibbles | (high >> 2 * quarter & 3) << 4
    out.view(-1, 16, 16).sub_(32).mul_(scales.unsqueeze(2))


def _plain(dtype: torch.dtype) -> Callable[[Tensor, Tensor], None]:
    def convert(blocks: Tensor, out: Tensor) -> None:
        out.copy_(blocks.contiguous().view(dtype))

    return convert


def _numpy_converter(kind: int) -> Callable[[Tensor, Tensor], None]:
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize as reference

    def convert(blocks: Tensor, out: Tensor) -> None:
        out.copy_(torch.from_numpy(reference(blocks.numpy(), GGMLQuantizationType(kind))).view_as(out))

    return convert


_OWN: dict[int, tuple[BlockFormat, Callable[[Tensor, Tensor], None]]] = {
    0: (BlockFormat(name="F32", weights=1, size=4), _plain(torch.float32)),
    1: (BlockFormat(name="F16", weights=1, size=2), _plain(torch.float16)),
    2: (BlockFormat(name="Q4_0", weights=32, size=18), _q4_0),
    3: (BlockFormat(name="Q4_1", weights=32, size=20), _q4_1),
    8: (BlockFormat(name="Q8_0", weights=32, size=34), _q8_0),
    12: (BlockFormat(name="Q4_K", weights=256, size=144), _q4_k),
    14: (BlockFormat(name="Q6_K", weights=256, size=210), _q6_k),
    30: (BlockFormat(name="BF16", weights=1, size=2), _plain(torch.bfloat16)),
}
