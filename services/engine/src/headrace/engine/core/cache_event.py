"""Changes of the cached prefixes, as data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stored:
    """Blocks that became reusable, by hash, in chain order."""

    block_hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Removed:
    """Blocks whose last copy was evicted."""

    block_hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Cleared:
    """All are gone."""


CacheEvent = Stored | Removed | Cleared
