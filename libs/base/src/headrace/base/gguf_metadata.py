"""The key-value section of a GGUF file: tokenizer, chat template, shapes; never the tensors.

Our own ninety lines instead of gguf.GGUFReader, because every process of the stack reads this at its start. Measured
on the shipped model (98 MB, 33 keys, 98,052 strings in its two large arrays): GGUFReader 1.62 s plus 0.07 s of
imports (numpy), this 0.02 s. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from headrace.base.errors import StartError

Scalar = int | float | bool | str
Value = Scalar | tuple[int, ...] | tuple[float, ...] | tuple[bool, ...] | tuple[str, ...]

_STRING, _ARRAY = 8, 9
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader:
    """Everything before the tensors: `metadata` in file order, arrays as tuples, and what the tensor table needs."""

    metadata: Mapping[str, Value]
    tensor_count: int
    end: int  # offset of the first byte after the metadata, where the tensor table begins


def read_gguf_metadata(path: str | Path) -> Mapping[str, Value]:
    """Every key of the file, in file order; arrays are tuples. StartError when it is no whole GGUF file."""
    return read_gguf_header(path).metadata


def read_gguf_header(path: str | Path) -> GgufHeader:
    """The metadata and where it ends, read once. StartError when it is no whole GGUF file."""
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Section(data).read()
    except OSError as error:
        raise StartError(f"cannot read the model file {path}: {error.strerror}") from error
    except (ValueError, struct.error) as error:  # ValueError: also an empty file, text that is not UTF-8
        raise StartError(f"{path} is not a usable GGUF file: {error}") from error


class _Section:
    """A cursor over the mapped file."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0

    def read(self) -> GgufHeader:
        if self._data[:4] != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        version = _U32.unpack_from(self._data, 4)[0]
        if version not in (2, 3):  # 1 had 32-bit counts; a big-endian file shows up here too
            raise ValueError(f"version {version} is not supported, only 2 and 3 in little-endian order")
        self._at = 8  # past magic and version
        tensor_count, count = self._u64(), self._u64()
        values = {}
        for _ in range(count):
            key = self._strings(1)[0]
            values[key] = self._value(self._u32())
        return GgufHeader(metadata=values, tensor_count=tensor_count, end=self._at)

    def _value(self, kind: int) -> Value:
        if kind == _STRING:
            return self._strings(1)[0]
        if kind != _ARRAY:
            scalar: Scalar = self._numbers(kind, 1)[0]
            return scalar
        item_kind = self._u32()
        count = self._u64()
        return tuple(self._strings(count)) if item_kind == _STRING else self._numbers(item_kind, count)

    def _strings(self, count: int) -> list[str]:
        """`count` strings; locals only, because the two large arrays pass here 98,052 times."""
        data, at, size = self._data, self._at, len(self._data)
        length_of = _U64.unpack_from
        texts = []
        for _ in range(count):
            start = at + 8
            at = start + length_of(data, at)[0]
            if at > size:
                raise ValueError("it ends inside a text: the download is not complete")
            texts.append(data[start:at].decode())
        self._at = at
        return texts

    def _numbers(self, kind: int, count: int) -> tuple[int, ...] | tuple[float, ...]:
        if kind not in _FORMATS:
            raise ValueError(f"value type {kind} is not known")
        width = struct.calcsize("<" + _FORMATS[kind])
        if count * width > len(self._data) - self._at:  # before struct allocates for a made-up count
            raise ValueError("it ends inside a value: the download is not complete")
        numbers = struct.unpack_from(f"<{count}{_FORMATS[kind]}", self._data, self._at)
        self._at += count * width
        return numbers

    def _u32(self) -> int:
        self._at += 4
        return int(_U32.unpack_from(self._data, self._at - 4)[0])

    def _u64(self) -> int:
        self._at += 8
        return int(_U64.unpack_from(self._data, self._at - 8)[0])
