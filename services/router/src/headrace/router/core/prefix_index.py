"""Which engine has which prefixes cached, as far as their event streams have said, without doubt.

Every engine life (engine, epoch) is *begun* when it is on the replica board and *forgotten* when it leaves; events of
any other life change nothing. A life is in doubt until its first snapshot, from a gap in its numbering to the next
snapshot, and while its stream is broken; in doubt it counts for nothing. Instants are local monotonic seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum

from headrace.router.core.block_table import BlockTable
from headrace.router.core.overlap import Holder, Overlaps, walk
from headrace.router.core.prediction import Predictions
from headrace.router.core.replica import EngineId

MAX_PREDICTED = 1 << 16
"""Predicted blocks kept at most: 10^6 prompt tokens placed within `predicted_s`, and about 20 MB."""

SLICE = 1000
"""Blocks of a snapshot that are applied at a time: under 1 ms."""


class Heard(Enum):
    """What became of one event."""

    APPLIED = "applied"
    REPEATED = "repeated"  # heard before; the last one heard before ends the doubt that a broken stream had cast
    GAP = "gap"  # something before it was missed: subscribe again, from a snapshot
    LATE = "late"  # of a life that is over, or not begun


class _Life:
    __slots__ = ("engine_id", "epoch", "sequence", "slot", "trusted")

    def __init__(self, engine_id: EngineId, epoch: int, slot: int) -> None:
        self.engine_id = engine_id
        self.epoch = epoch
        self.slot = slot
        self.sequence: int | None = None  # of the last event; None: only a snapshot can go on from here
        self.trusted = False


class PrefixIndex:
    """Cached prefixes of all engines, in at most `max_blocks` entries; hashes have 16 bytes."""

    def __init__(self, max_blocks: int, predicted_s: float = 5.0) -> None:
        self._table = BlockTable(max_blocks)
        self._predictions = Predictions(longest_s=predicted_s, max_blocks=min(max_blocks, MAX_PREDICTED))
        self._lives: dict[EngineId, _Life] = {}
        self._trusted = 0
        self._holders: dict[EngineId, Holder] = {}
        self._by_slot: dict[int, Holder] = {}

    # What it is asked.

    def overlap(self, hashes: Sequence[bytes], now: float) -> Overlaps:
        """How much of the chain `hashes` each engine could reuse. What matched counts as just used."""
        self._predictions.expire(now)
        cached, expected = walk(hashes, self._trusted, self._table.part_of_byte, self._predictions)
        if cached.depths:
            # The end first, so that it also leaves first: without its beginning a prefix is of no use.
            self._table.touch(reversed(hashes[: cached.depths[-1]]))
        return Overlaps(cached, expected, self._holders, self._by_slot)

    def indexed_blocks(self, engine_id: EngineId) -> int:
        """Blocks that count as cached there: none while it is in doubt."""
        life = self._lives.get(engine_id)
        return self._table.count(life.slot) if life and life.trusted else 0

    def in_doubt(self, engine_id: EngineId) -> bool:
        """Whether nothing is known of what is cached there."""
        life = self._lives.get(engine_id)
        return life is None or not life.trusted

    @property
    def lives_in_doubt(self) -> int:
        """Lives that count for nothing at present."""
        return len(self._lives) - self._trusted.bit_count()

    @property
    def predicted_blocks(self) -> int:
        """Predicted blocks."""
        return len(self._predictions)

    @property
    def evicted(self) -> int:
        """Blocks that have left the index because it was full."""
        return self._table.evicted

    def __len__(self) -> int:
        """Blocks indexed; those of lives that are over count until `tidy` has swept them out."""
        return len(self._table)

    # Placements.

    def predict(
        self, engine_id: EngineId, epoch: int, hashes: Sequence[bytes], now: float, known: int | None = None
    ) -> None:
        """A request with this chain was just placed there: it will soon have all of it.

        `known`: how many of the blocks `overlap` has just found cached there, which saves looking at them again.
        """
        life = self._life(engine_id, epoch)
        if life is None or not life.trusted or not hashes:
            return
        self._predictions.expire(now)
        # Never under a block that it has by now: the walk passes over those, and would not find the prediction.
        known = (known or 0) + self._table.prefix(life.slot, hashes[known:] if known else hashes)
        if known < len(hashes):
            self._predictions.add(life.slot, hashes[-1], hashes[known:], now)

    def withdraw(self, engine_id: EngineId, epoch: int, hashes: Sequence[bytes]) -> None:
        """An attempt that `predict` was told of failed; what its siblings predict stays. Unknown ones are no error."""
        life = self._life(engine_id, epoch)
        if life is not None and hashes:
            self._predictions.withdraw(life.slot, hashes[-1])

    # Lives.

    def begin(self, engine_id: EngineId, epoch: int) -> None:
        """This life is on the board, in doubt until its snapshot; another life of the engine is over."""
        known = self._lives.get(engine_id)
        if known and known.epoch == epoch:
            return
        self.forget(engine_id)
        self._lives[engine_id] = _Life(engine_id, epoch, self._table.open())

    def forget(self, engine_id: EngineId) -> None:
        """The engine is gone: nothing of it remains, and what still arrives from it changes nothing."""
        life = self._lives.pop(engine_id, None)
        if life is not None:
            self._doubt(life)
            self._leave_slot(life)
        self.tidy()

    def suspend(self, engine_id: EngineId, epoch: int, *, resumable: bool = True) -> None:
        """Its stream broke: in doubt until it goes on without a gap, or with a snapshot; not `resumable`: only so."""
        life = self._life(engine_id, epoch)
        if life is not None:
            self._doubt(life)
            if not resumable:
                life.sequence = None

    def position(self, engine_id: EngineId, epoch: int) -> int | None:
        """Number of the last event heard of this life; None when only a snapshot can go on from there."""
        life = self._life(engine_id, epoch)
        return None if life is None else life.sequence

    # Events.

    def stored(self, engine_id: EngineId, epoch: int, hashes: Sequence[bytes], sequence: int) -> Heard:
        """It has cached these blocks, in chain order."""
        life = self._life(engine_id, epoch)
        heard = self._hear(life, sequence)
        if life is not None and heard is Heard.APPLIED:
            self._table.add(life.slot, reversed(hashes))
            self._predictions.confirm(life.slot, hashes)
            self._table.tidy()
        return heard

    def removed(self, engine_id: EngineId, epoch: int, hashes: Sequence[bytes], sequence: int) -> Heard:
        """It has evicted these blocks, in any order."""
        life = self._life(engine_id, epoch)
        heard = self._hear(life, sequence)
        if life is not None and heard is Heard.APPLIED:
            self._table.discard(life.slot, hashes)
            self._table.tidy()
        return heard

    def cleared(self, engine_id: EngineId, epoch: int, sequence: int) -> Heard:
        """It has flushed its cache; predictions go, too."""
        life = self._life(engine_id, epoch)
        heard = self._hear(life, sequence)
        if life is not None and heard is Heard.APPLIED:
            self._doubt(life)
            self._leave_slot(life)
            life.slot = self._table.open()
            self._trust(life)
            self._table.tidy()
        return heard

    def snapshot(self, engine_id: EngineId, epoch: int, hashes: Sequence[bytes], sequence: int) -> Heard:
        """It has cached exactly these blocks, the last of them most recently; whatever was known is replaced."""
        for _ in self.snapshot_in_slices(engine_id, epoch, hashes, sequence):
            pass
        life = self._life(engine_id, epoch)
        return Heard.LATE if life is None else Heard.APPLIED

    def snapshot_in_slices(
        self, engine_id: EngineId, epoch: int, hashes: Sequence[bytes], sequence: int
    ) -> Iterator[None]:
        """`snapshot`, with a pause after each slice of it; the life is in doubt until the end is reached."""
        life = self._life(engine_id, epoch)
        if life is None:
            return
        self._doubt(life)
        self._leave_slot(life)
        life.slot = self._table.open()
        life.sequence = None
        slot = life.slot
        for at in range(0, len(hashes), SLICE):
            self._table.add(slot, hashes[at : at + SLICE])
            self._table.tidy()
            yield
            if self._life(engine_id, epoch) is not life:
                return  # its slot is somebody else's by now
        life.sequence = sequence
        self._trust(life)

    def tidy(self, now: float | None = None) -> bool:
        """Sweep a part of what lives that are over have left, and expire predictions; whether more is to be swept."""
        if now is not None:
            self._predictions.expire(now)
        return self._table.tidy()

    def _life(self, engine_id: EngineId, epoch: int) -> _Life | None:
        life = self._lives.get(engine_id)
        return life if life is not None and life.epoch == epoch else None

    def _hear(self, life: _Life | None, sequence: int) -> Heard:
        if life is None:
            return Heard.LATE
        if life.sequence is None or sequence > life.sequence + 1:
            life.sequence = None
            self._doubt(life)
            return Heard.GAP
        if sequence >= life.sequence:
            self._trust(life)
        if sequence <= life.sequence:
            return Heard.REPEATED
        life.sequence = sequence
        return Heard.APPLIED

    def _trust(self, life: _Life) -> None:
        if not life.trusted:
            life.trusted = True
            bit = self._table.bit(life.slot)
            self._trusted |= bit
            holder = Holder(life.engine_id, life.epoch, bit)
            self._holders[life.engine_id] = self._by_slot[life.slot] = holder

    def _doubt(self, life: _Life) -> None:
        if life.trusted:
            life.trusted = False
            self._trusted ^= self._table.bit(life.slot)
            del self._holders[life.engine_id]
            del self._by_slot[life.slot]

    def _leave_slot(self, life: _Life) -> None:
        self._predictions.drop(life.slot)
        self._table.retire(life.slot)
