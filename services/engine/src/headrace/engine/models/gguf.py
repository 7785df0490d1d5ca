"""Weights from a GGUF file (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).

Our own table of tensors instead of gguf.GGUFReader, which takes 2 s on the shipped model, all of it in 98,052 strings
of metadata that are not weights.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from headrace.base.errors import StartError
from headrace.base.gguf_metadata import GgufHeader, read_gguf_header
from headrace.engine.models.config import ModelConfig
from headrace.engine.models.config_gguf import config_from_gguf, family_from_gguf
from headrace.engine.models.dequantize import block_format, dequantize

_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_MOST_DIMENSIONS = 4  # GGML_MAX_DIMS
_ROPE_DIVISORS = "rope_freqs.weight"  # llama3's context extension, one divisor per frequency

_TOP_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """One tensor of the file: `shape` is rows first (the file stores it reversed), `offset` counts from its start."""

    shape: tuple[int, ...]
    kind: int
    offset: int
    size: int


class GgufCheckpoint:
    """An open GGUF file; its bytes are mapped, not read."""

    def __init__(self, path: Path) -> None:
        """StartError when the file is damaged or holds another kind of model."""
        header = read_gguf_header(path)
        with open(path, "rb") as file:
            # Copy-on-write, because torch wants writable memory; nothing ever writes to it.
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        try:
            self._tensors = _tensor_table(data, header)
        except (struct.error, UnicodeDecodeError) as error:
            raise StartError(f"{path} is not a usable GGUF file: its tensor table is damaged") from error
        self._path = path
        self._bytes = torch.frombuffer(data, dtype=torch.uint8)
        self._read: set[str] = set()
        self._config = self._read_config(header)

    @property
    def config(self) -> ModelConfig:
        """The model's shape."""
        return self._config

    def read_into(self, name: str, out: Tensor) -> None:
        """See Checkpoint.read_into."""
        info = self._info(gguf_name(name))
        if info.shape != tuple(out.shape):
            raise StartError(f"{self._path}: {name} has shape {info.shape}, expected {tuple(out.shape)}")
        raw = self._bytes[info.offset : info.offset + info.size]
        if self._pairs_adjacent and (".q_proj." in name or ".k_proj." in name):
            heads = self._config.num_heads if ".q_proj." in name else self._config.num_kv_heads
            raw = _rotary_halves_apart(raw.view(info.shape[0], -1), heads)
        dequantize(info.kind, raw, out)

    def unread(self) -> Sequence[str]:
        """See Checkpoint.unread."""
        return sorted(set(self._tensors) - self._read)

    def _info(self, name: str) -> TensorInfo:
        info = self._tensors.get(name)
        if info is None:
            raise StartError(f"{self._path} has no tensor {name}")
        self._read.add(name)
        return info

    def _read_config(self, header: GgufHeader) -> ModelConfig:
        metadata = header.metadata
        if metadata.get("split.count", 0) not in (0, 1):
            raise StartError(f"{self._path} is one part of a split GGUF model: merge it with gguf-split first")
        self._info("token_embd.weight")  # its shape is the vocabulary's
        try:
            self._pairs_adjacent = family_from_gguf(metadata).gguf_pairs_adjacent
            shapes = {name: info.shape for name, info in self._tensors.items()}
            return config_from_gguf(metadata, tensors=shapes, rope_divisors=self._rope_divisors())
        except (StartError, TypeError, ValueError, ZeroDivisionError) as error:  # values of the wrong kind, too
            raise StartError(f"{self._path}: {error}") from error

    def _rope_divisors(self) -> tuple[float, ...]:
        if _ROPE_DIVISORS not in self._tensors:
            return ()
        info = self._info(_ROPE_DIVISORS)
        divisors = torch.empty(info.shape)
        dequantize(info.kind, self._bytes[info.offset : info.offset + info.size], divisors)
        return tuple(divisors.tolist())


def gguf_name(name: str) -> str:
    """What GGUF calls the weight that Hugging Face calls `name`."""
    module, _, kind = name.rpartition(".")
    if module in _TOP_NAMES:
        return f"{_TOP_NAMES[module]}.{kind}"
    _, _, layer, part = module.split(".", 3)  # model.layers.N.part
    return f"blk.{layer}.{_LAYER_NAMES[part]}.{kind}"


def _rotary_halves_apart(rows: Tensor, heads: int) -> Tensor:
    """Undo llama.cpp's row order of q and k, where the two numbers of a rotary pair are neighbours.

    Left as it is, the model talks gibberish (transformers#31766). Rows are still packed bytes here.
    """
    return rows.view(heads, -1, 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)


def _tensor_table(data: mmap.mmap, header: GgufHeader) -> dict[str, TensorInfo]:
    """Tensors by name; struct.error when the table leaves the file, StartError when a tensor does."""
    entries: dict[str, tuple[tuple[int, ...], int, int]] = {}
    at = header.end
    for _ in range(header.tensor_count):
        name_end = at + 8 + int(_U64.unpack_from(data, at)[0])
        rank = _U32.unpack_from(data, name_end)[0]
        if rank > _MOST_DIMENSIONS:  # before struct is asked for a made-up number of them
            raise struct.error("too many dimensions")
        *shape, kind, offset = struct.unpack_from(f"<{rank}QIQ", data, name_end + 4)
        entries[data[at + 8 : name_end].decode()] = (tuple(reversed(shape)), kind, offset)
        at = name_end + 4 + 8 * rank + 12
    alignment = header.metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise StartError(f"general.alignment is {alignment!r}, not a positive integer")
    start = -(-at // alignment) * alignment
    return {
        name: _place(name, shape, kind, start + offset, len(data)) for name, (shape, kind, offset) in entries.items()
    }


def _place(name: str, shape: tuple[int, ...], kind: int, offset: int, file_size: int) -> TensorInfo:
    fmt = block_format(kind)
    weights = 1
    for length in shape:
        weights *= length
    if not shape or shape[-1] % fmt.weights:
        raise StartError(f"tensor {name} of shape {shape} is not made of whole {fmt.name} blocks")
    size = weights // fmt.weights * fmt.size
    if offset + size > file_size:
        raise StartError(f"tensor {name} lies beyond the end of the file: the download is not complete")
    return TensorInfo(shape=shape, kind=kind, offset=offset, size=size)
