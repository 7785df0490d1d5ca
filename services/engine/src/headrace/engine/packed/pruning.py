"""Old packed models: removed when a new one needs their room, or when nobody has used them for a month.

Whoever has a file mapped holds a shared lock on it, and so has whoever is writing one: what is locked stays. The time
of a file's last use is its access time, which every start sets.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from headrace.base.errors import StartError

log = logging.getLogger(__name__)

MOST_BYTES_VARIABLE = "HEADRACE_CACHE_MAX_BYTES"
MOST_BYTES = 20 << 30
UNUSED_S = 30 * 86400.0
# What a killed engine had begun to write: an hour is longer than any model takes.
UNFINISHED_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    path: Path
    size: int
    used_at: float

    @property
    def unfinished(self) -> bool:
        return self.path.suffix != ".bin"


def most_bytes() -> int:
    """What HEADRACE_CACHE_MAX_BYTES says, 20 GiB without it; StartError when that is no number of bytes."""
    text = os.environ.get(MOST_BYTES_VARIABLE) or str(MOST_BYTES)
    if not text.isdecimal():
        raise StartError(f"{MOST_BYTES_VARIABLE}={text!r} is not a number of bytes")
    return int(text)


def prune(folder: Path, *, wanted: int, most: int, now: float) -> list[Path]:
    """Remove files so that those left and `wanted` bytes are at most `most`, the longest unused first; returns them."""
    files = sorted(_files(folder), key=lambda file: file.used_at)
    total = wanted + sum(file.size for file in files)
    removed = []
    for file in files:
        unused_s = now - file.used_at
        stale = unused_s > (UNFINISHED_S if file.unfinished else UNUSED_S)
        if not stale and (total <= most or file.unfinished):
            continue
        if _remove(file.path):
            log.warning(
                "packed_model_removed: %s: %d bytes, unused for %.0f days", file.path, file.size, unused_s / 86400
            )
            total -= file.size
            removed.append(file.path)
    return removed


def hold(descriptor: int) -> int:
    """A descriptor of the same file that keeps it from being removed until it is closed, or its process ends."""
    held = os.dup(descriptor)
    fcntl.flock(held, fcntl.LOCK_SH)
    return held


def _files(folder: Path) -> Iterator[_File]:
    for path in folder.iterdir():
        if path.suffix == ".lock":
            continue
        try:
            stat = path.stat()
        except FileNotFoundError:  # another engine was faster
            continue
        yield _File(path=path, size=stat.st_size, used_at=max(stat.st_atime, stat.st_mtime))


def _remove(path: Path) -> bool:
    """Whether the file is gone: not while anybody holds it."""
    try:
        with _descriptor(path) as descriptor:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
            return True
    except FileNotFoundError:
        return True
    except BlockingIOError:
        return False


@contextmanager
def _descriptor(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
