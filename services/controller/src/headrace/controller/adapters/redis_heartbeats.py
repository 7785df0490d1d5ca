"""Heartbeats from the replica board in Redis, with ages by Redis's clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from google.protobuf.message import DecodeError

from headrace.api.engine.v1 import engine_service_pb2 as pb
from headrace.base.errors import HeadraceError
from headrace.controller.core.fleet import EngineId, Heartbeat, Load, Phase
from headrace.coord.redis.booking_board import BookingBoard
from headrace.coord.redis.replica_board import Record, ReplicaBoard
from headrace.observe.log import get_logger

log = get_logger(__name__)

_PHASES = {
    pb.PHASE_WARMING: Phase.WARMING,
    pb.PHASE_READY: Phase.READY,
    pb.PHASE_DRAINING: Phase.DRAINING,
}


class RedisHeartbeats:
    """The newest heartbeat of each engine, with the bookings that routers hold on it.

    An outage is logged once when it begins and once when it ends.
    """

    def __init__(self, board: ReplicaBoard, bookings: BookingBoard) -> None:
        self._board = board
        self._bookings = bookings
        self._lost = False

    async def read(self) -> Mapping[EngineId, Heartbeat] | None:
        """By engine id, stale ones included; None when Redis does not answer."""
        try:
            board = await self._board.read()
        except HeadraceError as error:
            if not self._lost:
                log.warning("heartbeats_lost", reason=error.reason, error=error.message)
            self._lost = True
            return None
        if self._lost:
            log.info("heartbeats_recovered", engines=len(board.records))
        self._lost = False
        booked = await self._booked(board.records)
        parsed = ((EngineId(r.engine_id), _parse(r, board.now_us, booked.get(r.engine_id))) for r in board.records)
        return {engine_id: beat for engine_id, beat in parsed if beat is not None}

    async def _booked(self, records: Sequence[Record]) -> Mapping[str, int]:
        """Sequences booked on each engine; on none of them when that cannot be told."""
        if not records:
            return {}
        try:
            seen = await self._bookings.look([(r.engine_id, r.epoch) for r in records])
        except HeadraceError as error:
            log.debug("bookings_not_read", reason=error.reason, error=error.message)
            return {}
        return {engine_id: found.sequences for engine_id, found in seen.items()}


def _parse(record: Record, now_us: int, booked: int | None) -> Heartbeat | None:
    """None for what is no heartbeat of a version we know: as if the engine had said nothing."""
    try:
        message = pb.Heartbeat.FromString(record.payload)
    except DecodeError:
        return None
    phase = _PHASES.get(message.phase)
    if phase is None:
        return None
    return Heartbeat(
        deployment=message.deployment,
        bundle_digest=message.bundle_digest,
        backend=message.backend,
        epoch_ns=record.epoch,
        pid=message.pid,
        phase=phase,
        age_s=(now_us - record.at_us) / 1e6,
        load=_load(message, booked),
    )


def _load(message: pb.Heartbeat, booked: int | None) -> Load | None:
    """None without the numbers it takes: a batch limit of 0 means that none was given."""
    if booked is None or not message.max_num_seqs or not 0.0 <= message.pressure <= 1.0:
        return None
    return Load(
        waiting=message.waiting,
        running=message.running,
        booked=booked,
        max_num_seqs=message.max_num_seqs,
        pressure=message.pressure,
    )
