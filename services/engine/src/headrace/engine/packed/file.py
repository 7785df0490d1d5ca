"""The file of a packed model: a header that says what it is, then the arrays, mapped where they lie."""

from __future__ import annotations

import json
import mmap
import os
import struct
import time
import weakref
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from headrace.engine.models.config import ModelConfig
from headrace.engine.packed.layout import LAYOUT_VERSION, Place
from headrace.engine.packed.pruning import hold

MAGIC: Final = b"hrpacked"
_PREFIX = struct.Struct("<8sQ")
_PAGE = 4096
_MOST_HEADER = 16 << 20

Bytes = NDArray[np.uint8]


class Damaged(Exception):
    """The file is not a whole packed model of this layout."""


class PackedModel:
    """A packed model in memory: its config, its precision and its arrays by name."""

    def __init__(
        self, config: ModelConfig, precision: str, data: Bytes, places: dict[str, Place], held: int | None = None
    ) -> None:  # fmt: skip
        """`held` is the descriptor that keeps the file from being removed; it is closed with the model."""
        self.config = config
        self.precision = precision
        self._data = data
        self._places = places
        if held is not None:
            weakref.finalize(self, os.close, held)

    def array(self, name: str) -> Bytes | None:
        """The bytes of one array, None when the model has no such array."""
        place = self._places.get(name)
        return None if place is None else self._data[place.offset : place.offset + place.size]


def header(config: ModelConfig, precision: str, places: dict[str, Place]) -> bytes:
    """The bytes before the arrays: a whole number of pages."""
    shape = asdict(config)
    shape["eos_ids"] = sorted(config.eos_ids)
    text = json.dumps({
        "layout": LAYOUT_VERSION, "precision": precision, "config": shape,
        "places": {name: (place.offset, place.size) for name, place in places.items()},
    }).encode()  # fmt: skip
    length = -(-(_PREFIX.size + len(text)) // _PAGE) * _PAGE
    return (_PREFIX.pack(MAGIC, len(text)) + text).ljust(length, b"\0")


def open_file(path: Path) -> PackedModel:
    """Map the file read-only: nothing is read before it is used. FileNotFoundError, or Damaged.

    The file counts as used from now on, and is not removed while the model lives.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        prefix = file.read(_PREFIX.size)
        if len(prefix) < _PREFIX.size:
            raise Damaged(f"{path} is cut off")
        magic, length = _PREFIX.unpack(prefix)
        if magic != MAGIC or length > _MOST_HEADER:
            raise Damaged(f"{path} is not a packed model")
        text = file.read(length)
        start = -(-(_PREFIX.size + length) // _PAGE) * _PAGE
        if size <= start:
            raise Damaged(f"{path} is cut off")
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        held = hold(file.fileno())
    try:
        if os.fstat(held).st_nlink == 0:  # removed before it was held
            raise FileNotFoundError(path)
        _mark_used(held)
        return _parse(json.loads(text), np.frombuffer(mapped, dtype=np.uint8, offset=start), held)
    except (ValueError, KeyError, TypeError) as error:
        os.close(held)
        raise Damaged(f"{path}: {error}") from error
    except OSError:
        os.close(held)
        raise


def _mark_used(descriptor: int) -> None:
    with suppress(PermissionError):  # another user's file, in a shared folder
        os.utime(descriptor, ns=(time.time_ns(), os.fstat(descriptor).st_mtime_ns))


def _parse(values: dict[str, Any], data: Bytes, held: int) -> PackedModel:
    if values["layout"] != LAYOUT_VERSION:
        raise ValueError(f"layout {values['layout']} instead of {LAYOUT_VERSION}")
    shape = values["config"]
    shape["eos_ids"] = frozenset(shape["eos_ids"])
    shape["rope_divisors"], shape["windows"] = tuple(shape["rope_divisors"]), tuple(shape["windows"])
    places = {name: Place(offset=offset, size=size) for name, (offset, size) in values["places"].items()}
    if any(place.offset + place.size > len(data) for place in places.values()):
        raise ValueError("an array lies beyond the end")
    return PackedModel(ModelConfig(**shape), values["precision"], data, places, held)
