"""Packed models kept between starts, in the user's cache folder.

A file is named after everything that decides its content. It is written beside its name and then renamed, so whoever
finds it finds it whole; two engines that start at once wait for each other instead of packing twice.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import mmap
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import numpy as np

from headrace.base.errors import StartError
from headrace.engine.kernels.cpu.library import Pool
from headrace.engine.packed.file import Damaged, PackedModel, header, open_file
from headrace.engine.packed.layout import LAYOUT_VERSION, places, sizes, unsupported
from headrace.engine.packed.pruning import most_bytes, prune

# Standard library: the worker process has no structlog, and these warnings are all that it ever logs.
log = logging.getLogger(__name__)

FOLDER_VARIABLE = "HEADRACE_CACHE_DIR"
_CONFIGS = ("config.json", "generation_config.json")


def cache_folder() -> Path:
    """Where packed models are kept: HEADRACE_CACHE_DIR, or headrace in the user's cache folder."""
    chosen = os.environ.get(FOLDER_VARIABLE)
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace"


class NotNative(Exception):
    """The native kernels cannot run this model; the text says why."""


def packed_model(path: Path, precision: str, block_size: int, pool: Pool, folder: Path | None = None) -> PackedModel:
    """The model at `path`, from the cache or packed now; NotNative, or StartError as the model's loader."""
    folder = folder or cache_folder()
    file = folder / "packed" / f"{_key(path, precision, folder, Path(pool.library._name))}.bin"
    try:
        model = _opened(file)
        if model is None:
            with _alone(file):
                # Another engine may have packed it meanwhile.
                model = _opened(file) or _packed(path, precision, block_size, pool, file)
    except OSError as error:  # no room, or a folder that may not be written: the model is then packed at every start
        log.warning("packed_model_not_kept: %s: %s", file, error)
        model = _packed(path, precision, block_size, pool, None)
    reason = unsupported(model.config, precision, block_size)
    if reason is not None:
        raise NotNative(reason)
    return model


def _opened(file: Path) -> PackedModel | None:
    try:
        return open_file(file)
    except FileNotFoundError:
        return None
    except Damaged as error:
        log.warning("packed_model_damaged: %s", error)
        return None


def _packed(path: Path, precision: str, block_size: int, pool: Pool, file: Path | None) -> PackedModel:
    """Pack the checkpoint into `file`, or into memory without one."""
    # Imported here: torch takes 2 s, and with a file in the cache nobody needs it.
    import torch

    from headrace.engine.models.loader import open_checkpoint, refuse_unread
    from headrace.engine.packed.packing import pack

    torch.set_num_threads(1)  # as when torch computes: conversion gains little from two, and loses all beside others
    checkpoint = open_checkpoint(path)
    config = checkpoint.config
    reason = unsupported(config, precision, block_size)
    if reason is not None:
        raise NotNative(reason)
    where = places(sizes(config, precision, pool.library))
    start = header(config, precision, where)
    size = len(start) + max(place.offset + place.size for place in where.values())
    if file is not None:
        prune(file.parent, wanted=size, most=most_bytes(), now=time.time())
    with _target(file, size) as descriptor:
        os.pwrite(descriptor, start, 0)
        mapped = mmap.mmap(descriptor, size)
        data = np.frombuffer(mapped, dtype=np.uint8, offset=len(start))
        pack(checkpoint, precision, pool, data, where)
        refuse_unread(path, checkpoint.unread())
    made = PackedModel(config, precision, data, where)
    return made if file is None else _opened(file) or made


@contextmanager
def _target(file: Path | None, size: int) -> Iterator[int]:
    """A descriptor of `size` writable bytes that become `file` when the block ends well; of memory without one."""
    if file is None:
        descriptor = os.memfd_create("headrace-packed")
        try:
            os.ftruncate(descriptor, size)
            yield descriptor
        finally:
            os.close(descriptor)
        return
    descriptor, beside = tempfile.mkstemp(prefix=f".{file.stem}.", dir=file.parent)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        os.posix_fallocate(descriptor, 0, size)  # a full disk is an error now, not a bus error later
        yield descriptor
        os.fsync(descriptor)  # a crash must not leave the name on blocks that were never written
        os.replace(beside, file)
    except BaseException:
        os.unlink(beside)
        raise
    finally:
        os.close(descriptor)


@contextmanager
def _alone(file: Path) -> Iterator[None]:
    """Hold the file's lock; the kernel lets go of it when a process dies."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _key(path: Path, precision: str, folder: Path, library: Path) -> str:
    identity = [
        LAYOUT_VERSION,
        version("headrace-engine"),
        code_digest(library),
        precision,
        _weights_digest(path, folder),
    ]
    return hashlib.blake2b(json.dumps(identity).encode(), digest_size=16).hexdigest()


def code_digest(library: Path) -> str:
    """Of the code that packs and reads: the compiled library, and the modules that lay out and name what it packs.

    A number that people have to raise is forgotten one day, and then a file of the old layout is read as one of the
    new: fluent nonsense instead of an error. Hashing half a megabyte takes half a millisecond.
    """
    here = Path(__file__).parent
    digest = hashlib.blake2b(digest_size=16)
    for file in [library, *sorted(here.glob("*.py")), *sorted((here.parent / "models").glob("*.py"))]:
        digest.update(hashlib.blake2b(file.read_bytes(), digest_size=16).digest())
    return digest.hexdigest()


def _weights_digest(path: Path, folder: Path) -> str:
    """Of the contents of the model's files. Hashed once, then remembered under their sizes and times of change."""
    files = _model_files(path)
    stats = [file.stat() for file in files]
    seen = [[file.name, s.st_size, s.st_mtime_ns, s.st_ino] for file, s in zip(files, stats, strict=True)]
    name = hashlib.blake2b(str(path.absolute()).encode(), digest_size=16).hexdigest()
    memory = folder / "digests" / f"{name}.json"
    try:
        known = json.loads(memory.read_bytes())
        if known["seen"] == seen:
            return str(known["digest"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # not there yet, or not ours: it is made anew
    digest = hashlib.blake2b(json.dumps([_content(file) for file in files]).encode(), digest_size=16).hexdigest()
    _remember(memory, json.dumps({"seen": seen, "digest": digest}))
    return digest


def _model_files(path: Path) -> Sequence[Path]:
    if path.is_file():
        return [path]
    files = sorted([*path.glob("*.safetensors"), *(path / name for name in _CONFIGS if (path / name).is_file())])
    if not files:
        raise StartError(f"no model at {path}: give a GGUF file, or a folder with config.json and safetensors")
    return files


def _content(file: Path) -> tuple[str, str]:
    with open(file, "rb") as opened:
        digest = hashlib.file_digest(opened, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    return (file.suffix if file.suffix == ".gguf" else file.name, digest)


def _remember(memory: Path, text: str) -> None:
    try:
        memory.parent.mkdir(parents=True, exist_ok=True)
        descriptor, beside = tempfile.mkstemp(dir=memory.parent)
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        os.replace(beside, memory)
    except OSError as error:
        log.warning("weights_digest_not_kept: %s", error)
