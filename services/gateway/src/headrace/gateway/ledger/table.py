"""The slots of all running requests: one file mapped into memory, and what a dead process left in it."""

from __future__ import annotations

import mmap
import os
from collections import deque
from pathlib import Path

from headrace.base.errors import StartError
from headrace.gateway.core.account import SLOT_BYTES, Damaged, Entry, Slot, read_slot
from headrace.observe.log import get_logger

log = get_logger(__name__)

FILE_NAME = "slots"
_MAGIC = b"headrace slots 1"
_PAGE = 4096
_ZEROS = bytes(1 << 20)


class SlotTable:
    """`count` slots, handed out and given back on the event loop.

    The file is written full of zeros before it is mapped: a store into a hole of a file on a full disk would be
    answered with SIGBUS, which ends the process.
    """

    def __init__(self, mapping: mmap.mmap, count: int) -> None:
        self._mapping = mapping
        memory = memoryview(mapping)
        self._free = deque(Slot(memory[at : at + SLOT_BYTES]) for at in _places(count))
        self._lasting = set(map(id, self._free))
        self._slots = tuple(self._free)  # keeps the ids above theirs

    @classmethod
    def in_memory(cls, count: int) -> SlotTable:
        """A table that ends with the process."""
        return cls(mmap.mmap(-1, _PAGE + count * SLOT_BYTES), count)

    @classmethod
    def on_disk(cls, folder: Path, count: int) -> SlotTable:
        """A new, empty table in place of the one in `folder`, which must have been read before. Raises OSError."""
        path, fresh = folder / FILE_NAME, folder / f"{FILE_NAME}.new"
        size = _PAGE + count * SLOT_BYTES
        with open(fresh, "w+b") as file:
            file.write(_MAGIC)
            for written in range(len(_MAGIC), size, len(_ZEROS)):
                file.write(_ZEROS[: size - written])
            file.flush()
            os.fsync(file.fileno())
            mapping = mmap.mmap(file.fileno(), size)
        os.replace(fresh, path)
        _sync_folder(folder)
        return cls(mapping, count)

    @property
    def free(self) -> int:
        """How many slots nobody has."""
        return len(self._free)

    def take(self) -> Slot | None:
        """A free slot; None when there is none."""
        return self._free.popleft() if self._free else None

    def lasts(self, slot: Slot) -> bool:
        """Whether it is one of this table's."""
        return id(slot) in self._lasting

    def give_back(self, slot: Slot) -> None:
        """Take a freed slot back; one that is not of this table is let go."""
        if self.lasts(slot):
            self._free.append(slot)

    def sync(self) -> None:
        """Write changed pages to the disk, and wait for it: what follows a power cut needs it, a kill does not."""
        self._mapping.flush()


def read_table(folder: Path) -> list[Entry]:
    """What the process before this one left in its slots; StartError for a file of another version."""
    path = folder / FILE_NAME
    if not path.exists():
        return []
    data = memoryview(path.read_bytes())
    if bytes(data[: len(_MAGIC)]) != _MAGIC:
        raise StartError(f"{path} was written by another version; run that one until it has nothing to deliver")
    entries, damaged = [], 0
    for at in _places((len(data) - _PAGE) // SLOT_BYTES):
        try:
            entry = read_slot(data[at : at + SLOT_BYTES])
        except Damaged:
            damaged += 1
            continue
        if entry is not None:
            entries.append(entry)
    if damaged:
        log.error("ledger_slots_damaged", slots=damaged, likely="a power cut", path=str(path))
    return entries


def private_slot() -> Slot:
    """A slot of no table."""
    return Slot(memoryview(bytearray(SLOT_BYTES)))


def _places(count: int) -> range:
    return range(_PAGE, _PAGE + count * SLOT_BYTES, SLOT_BYTES)


def _sync_folder(folder: Path) -> None:
    """Make a rename last."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
