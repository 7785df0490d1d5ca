"""One life of one engine: what a fault is held against."""

from __future__ import annotations

from typing import NamedTuple


class Life(NamedTuple):
    """An engine from one start to its end; the same engine started again is another, to be judged afresh."""

    engine_id: str
    epoch: int
