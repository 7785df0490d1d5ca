"""Heartbeats from the replica board in Redis, with ages by Redis's clock."""

from __future__ import annotations

from collections.abc import Mapping

from google.protobuf.message import DecodeError

from headrace.api.engine.v1 import engine_service_pb2 as pb
from headrace.base.errors import HeadraceError
from headrace.controller.core.fleet import EngineId, Heartbeat, Phase
from headrace.coord.redis.replica_board import Record, ReplicaBoard
from headrace.observe.log import get_logger

log = get_logger(__name__)

_PHASES = {
    pb.PHASE_WARMING: Phase.WARMING,
    pb.PHASE_READY: Phase.READY,
    pb.PHASE_DRAINING: Phase.DRAINING,
}


class RedisHeartbeats:
    """The newest heartbeat of each engine; an outage is logged once when it begins and once when it ends."""

    def __init__(self, board: ReplicaBoard) -> None:
        self._board = board
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
        parsed = ((EngineId(r.engine_id), _parse(r, board.now_us)) for r in board.records)
        return {engine_id: beat for engine_id, beat in parsed if beat is not None}


def _parse(record: Record, now_us: int) -> Heartbeat | None:
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
    )
