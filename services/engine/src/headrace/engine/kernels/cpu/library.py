"""The compiled kernels from Python: headrace_cpu.h in ctypes. Calls release the interpreter's lock."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Sequence
from ctypes import POINTER, c_char_p, c_float, c_int32, c_int64, c_void_p
from enum import IntEnum
from pathlib import Path
from typing import Any, ClassVar

from numpy.typing import NDArray

from headrace.engine.kernels.cpu.build import LIBRARY

ABI_VERSION = 2
PANEL = 16  # columns
PAGE = 16  # tokens
MOST_HEAD_DIM = 256
MOST_GROUP = 96  # query heads that share a KV head
# A path and "avx512", "avx2" or "portable" instead of the installed library and the best that the machine runs.
LIBRARY_VARIABLE = "HEADRACE_CPU_LIBRARY"
ISA_VARIABLE = "HEADRACE_CPU_ISA"


class Unavailable(Exception):
    """The native kernels cannot be used here; the text says why."""


class Format(IntEnum):
    """How a matrix is packed; see hr_format."""

    BF16 = 0
    INT8 = 1
    INT4 = 2
    FLOAT = 3


class KvFormat(IntEnum):
    """What the KV cache holds; see hr_kv_format."""

    BF16 = 0
    INT8 = 1


class Finish(IntEnum):
    """What becomes of a product; see hr_finish."""

    STORE = 0
    ADD = 1
    SILU_MUL = 2


class Isa(IntEnum):
    """Which instructions compute; see hr_isa."""

    PORTABLE = 0
    AVX2 = 1
    AVX512 = 2


class Linear(ctypes.Structure):
    """hr_linear."""

    _fields_: ClassVar = [
        ("format", c_int32), ("columns", c_int32), ("depth", c_int32), ("panels", c_int32),
        ("weights", c_void_p), ("scales", c_void_p), ("bias", c_void_p),
    ]  # fmt: skip


class Layer(ctypes.Structure):
    """hr_layer."""

    _fields_: ClassVar = [
        ("input_norm", c_void_p), ("mlp_norm", c_void_p), ("head_norms", c_void_p),
        ("qkv", Linear), ("out", Linear), ("gate_up", Linear), ("down", Linear),
        ("window", c_int32), ("reserved", c_int32),
    ]  # fmt: skip


class ModelSpec(ctypes.Structure):
    """hr_model_spec."""

    _fields_: ClassVar = [
        ("vocabulary", c_int32), ("hidden", c_int32), ("intermediate", c_int32), ("layers", c_int32),
        ("heads", c_int32), ("kv_heads", c_int32), ("head_dim", c_int32), ("block_size", c_int32),
        ("blocks", c_int32), ("rms_eps", c_float), ("rope_factor", c_float), ("kv_format", c_int32),
        ("frequencies", c_void_p), ("layer", POINTER(Layer)), ("final_norm", c_void_p), ("head", Linear),
        ("embedding", c_void_p), ("cache", c_void_p),
    ]  # fmt: skip


class Batch(ctypes.Structure):
    """hr_batch."""

    _fields_: ClassVar = [
        ("rows", c_int32), ("slices", c_int32), ("head_count", c_int32), ("reserved", c_int32),
        ("tokens", c_void_p), ("positions", c_void_p), ("first_row", c_void_p), ("tables", c_void_p),
        ("table_start", c_void_p), ("head_rows", c_void_p), ("logits_row", c_void_p), ("logits", c_void_p),
        ("best", c_void_p),
    ]  # fmt: skip


# A Batch as one pack, for it is filled in every step: a field at a time would cost ten times as much.
BATCH = struct.Struct("@4i9P")


class Attention(ctypes.Structure):
    """hr_attention."""

    _fields_: ClassVar = [
        ("heads", c_int32), ("kv_heads", c_int32), ("head_dim", c_int32), ("block_size", c_int32),
        ("window", c_int32), ("eps", c_float), ("rope_factor", c_float), ("kv_format", c_int32),
        ("qkv", c_void_p), ("head_norms", c_void_p), ("frequencies", c_void_p), ("cache", c_void_p),
        ("out", c_void_p),
    ]  # fmt: skip


_SIGNATURES: dict[str, tuple[Any, Sequence[Any]]] = {
    "hr_abi_version": (c_int32, ()),
    "hr_best_isa": (c_int32, ()),
    "hr_isa_name": (c_char_p, (c_int32,)),
    "hr_pool_create": (c_void_p, (c_int32, c_int32)),
    "hr_pool_destroy": (None, (c_void_p,)),
    "hr_weights_bytes": (c_int64, (c_int32, c_int32, c_int32)),
    "hr_scales_bytes": (c_int64, (c_int32, c_int32)),
    "hr_pack": (None, (c_void_p, c_int32, c_void_p, c_int32, c_int32, c_int32, c_int32, c_void_p, c_void_p)),
    "hr_apply_linear": (None, (c_void_p, POINTER(Linear), c_void_p, c_void_p, c_float, c_int32, c_int32, c_void_p)),
    "hr_apply_attention": (None, (c_void_p, POINTER(Attention), POINTER(Batch))),
    "hr_cache_bytes": (c_int64, (c_int32, c_int32, c_int32, c_int32, c_int32, c_int32)),
    "hr_model_create": (c_void_p, (c_void_p, POINTER(ModelSpec))),
    "hr_model_destroy": (None, (c_void_p,)),
    "hr_step": (None, (c_void_p, POINTER(Batch))),
    "hr_step_logits": (None, (c_void_p, c_void_p, c_int32, c_void_p)),
    "hr_copy_block": (None, (c_void_p, c_int32, c_int32)),
}


def load_library() -> Any:
    """The library with its functions' types set; Unavailable when it is missing, damaged or of another version."""
    path = Path(os.environ.get(LIBRARY_VARIABLE) or LIBRARY)
    if not path.is_file():
        raise Unavailable(
            f"there is no {path.name}: with a C++17 compiler, run python -m headrace.engine.kernels.cpu.build"
        )
    try:
        library = ctypes.CDLL(str(path))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise Unavailable(f"{path} cannot be loaded: {error}") from error
    if library.hr_abi_version() != ABI_VERSION:
        raise Unavailable(f"{path} is of another version: run python -m headrace.engine.kernels.cpu.build")
    return library


def chosen_isa(library: Any) -> Isa:
    """The best that this machine runs, or what the environment says; Unavailable for a name that is none."""
    name = os.environ.get(ISA_VARIABLE)
    if not name:
        return Isa(library.hr_best_isa())
    try:
        return Isa[name.upper()]
    except KeyError:
        raise Unavailable(f"{ISA_VARIABLE}={name!r} is not one of {', '.join(i.name.lower() for i in Isa)}") from None


class Pool:
    """Threads with one instruction set; the calling thread is one of them, and works as the others do.

    Only one thread may use a pool at a time. A pool lives until its process ends, or `close`.
    """

    def __init__(self, library: Any, threads: int, isa: Isa) -> None:
        """Unavailable when the machine does not run `isa`."""
        self.library = library
        self.isa = isa
        self.threads = threads
        self.handle = library.hr_pool_create(threads, isa)
        if not self.handle:
            raise Unavailable(f"this machine has no {isa.name}, or the library was compiled without it")

    def close(self) -> None:
        """End its threads. What was made with it must not be used any more."""
        self.library.hr_pool_destroy(self.handle)


def padded(columns: int) -> int:
    """The stride of a row of `columns` floats."""
    return -(-columns // 64) * 64


def address(array: NDArray[Any] | None) -> int | None:
    """Where the array's bytes start; None stays None."""
    return None if array is None else array.ctypes.data
