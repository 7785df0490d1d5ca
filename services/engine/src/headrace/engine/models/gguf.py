"""Weights from a GGUF file (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).

Our own table of tensors instead of gguf.GGUFReader, which takes 2 s on the shipped model, all of it in 98,052 strings
of metadata that are not weights.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from headrace.base.errors import StartError
from headrace.base.gguf_metadata import Value, read_gguf_metadata
from headrace.engine.models.config import ModelConfig, config_from_gguf
from headrace.engine.models.dequantize import block_format, dequantize

_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_STRING, _ARRAY = 8, 9
_WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_MOST_DIMENSIONS = 4  # GGML_MAX_DIMS
_FIRST_KEY = 24  # past magic, version, tensor count, key count

_TOP_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
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
    """An open GGUF file of a Llama model; its bytes are mapped, not read."""

    def __init__(self, path: Path) -> None:
        """StartError when the file is damaged or holds another kind of model."""
        metadata = read_gguf_metadata(path)
        with open(path, "rb") as file:
            # Copy-on-write, because torch wants writable memory; nothing ever writes to it.
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        try:
            self._tensors = _tensor_table(data, metadata)
        except (struct.error, UnicodeDecodeError) as error:
            raise StartError(f"{path} is not a usable GGUF file: its tensor table is damaged") from error
        self._path = path
        self._bytes = torch.frombuffer(data, dtype=torch.uint8)
        self._config = self._read_config(metadata)

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
        if name.endswith((".q_proj", ".k_proj")):
            heads = self._config.num_heads if name.endswith(".q_proj") else self._config.num_kv_heads
            raw = _rotary_halves_apart(raw.view(info.shape[0], -1), heads)
        dequantize(info.kind, raw, out)

    def _info(self, name: str) -> TensorInfo:
        info = self._tensors.get(f"{name}.weight")
        if info is None:
            raise StartError(f"{self._path} has no tensor {name}.weight")
        return info

    def _read_config(self, metadata: Mapping[str, Value]) -> ModelConfig:
        if metadata.get("split.count", 0) not in (0, 1):
            raise StartError(f"{self._path} is one part of a split GGUF model: merge it with gguf-split first")
        rope: tuple[float, ...] = ()
        if "rope_freqs.weight" in self._tensors:  # llama3's context extension, one divisor per frequency
            info = self._info("rope_freqs")
            divisors = torch.empty(info.shape)
            dequantize(info.kind, self._bytes[info.offset : info.offset + info.size], divisors)
            rope = tuple(divisors.tolist())
        try:
            return config_from_gguf(
                metadata,
                vocab_size=self._info("token_embd").shape[0],
                tied="output.weight" not in self._tensors,
                rope=rope,
            )
        except (StartError, TypeError, ValueError, ZeroDivisionError) as error:  # values of the wrong kind, too
            raise StartError(f"{self._path}: {error}") from error


def gguf_name(name: str) -> str:
    """What GGUF calls the weight that Hugging Face calls `name`."""
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    _, _, layer, part = name.split(".", 3)  # model.layers.N.part
    return f"blk.{layer}.{_LAYER_NAMES[part]}"


def _rotary_halves_apart(rows: Tensor, heads: int) -> Tensor:
    """Undo llama.cpp's row order of q and k, where the two numbers of a rotary pair are neighbours.

    Left as it is, the model talks gibberish (transformers#31766). Rows are still packed bytes here.
    """
    return rows.view(heads, -1, 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)


def _tensor_table(data: mmap.mmap, metadata: Mapping[str, Value]) -> dict[str, TensorInfo]:
    """Tensors by name; struct.error when the table leaves the file, StartError when a tensor does."""
    entries: dict[str, tuple[tuple[int, ...], int, int]] = {}
    at = _after_metadata(data)
    for _ in range(_U64.unpack_from(data, 8)[0]):
        name_end = _after_string(data, at)
        rank = _U32.unpack_from(data, name_end)[0]
        if rank > _MOST_DIMENSIONS:  # before struct is asked for a made-up number of them
            raise struct.error("too many dimensions")
        *shape, kind, offset = struct.unpack_from(f"<{rank}QIQ", data, name_end + 4)
        entries[data[at + 8 : name_end].decode()] = (tuple(reversed(shape)), kind, offset)
        at = name_end + 4 + 8 * rank + 12
    alignment = metadata.get("general.alignment", 32)
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


def _after_string(data: mmap.mmap, at: int) -> int:
    return at + 8 + int(_U64.unpack_from(data, at)[0])


def _after_metadata(data: mmap.mmap) -> int:
    """Where the tensor table begins; the keys before it were checked by read_gguf_metadata."""
    at = _FIRST_KEY
    for _ in range(_U64.unpack_from(data, 16)[0]):
        at = _after_string(data, at)
        at = _after_value(data, at + 4, _U32.unpack_from(data, at)[0])
    return at


def _after_value(data: mmap.mmap, at: int, kind: int) -> int:
    if kind == _STRING:
        return _after_string(data, at)
    if kind != _ARRAY:
        return at + _WIDTHS[kind]
    item_kind, count = struct.unpack_from("<IQ", data, at)
    if item_kind != _STRING:
        return at + 12 + int(count) * _WIDTHS[item_kind]
    at += 12
    length_of = _U64.unpack_from
    for _ in range(count):  # 49,152 tokens, 48,900 merges
        at += 8 + length_of(data, at)[0]
    return at
