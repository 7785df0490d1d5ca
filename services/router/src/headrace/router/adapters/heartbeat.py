"""Board records in, the core's replicas out; what does not add up becomes `Unreadable`, never a guess."""

from __future__ import annotations

import math

from google.protobuf.message import DecodeError

from headrace.api.engine.v1 import engine_service_pb2 as pb
from headrace.coord.redis.replica_board import Record as BoardRecord
from headrace.router.core.replica import EngineId, Phase, Rates, Replica, Unreadable

_PHASES = {
    pb.PHASE_WARMING: Phase.WARMING,
    pb.PHASE_READY: Phase.READY,
    pb.PHASE_DRAINING: Phase.DRAINING,
}
_NEEDED_WHEN_READY = ("address", "total_blocks", "block_size", "max_model_len", "max_num_seqs")


def seen_in(record: BoardRecord) -> Replica | Unreadable:
    """What `record` says."""
    engine_id = EngineId(record.engine_id)
    try:
        heartbeat = pb.Heartbeat.FromString(record.payload)
    except DecodeError:
        return _unreadable(record, "not a heartbeat message")
    fault = _fault(heartbeat, record)
    if fault:
        return _unreadable(record, fault)
    return Replica(
        engine_id=engine_id,
        epoch=record.epoch,
        sequence=record.sequence,
        address=heartbeat.address,
        deployment=heartbeat.deployment,
        bundle_digest=heartbeat.bundle_digest,
        adapters=frozenset(heartbeat.adapters),
        phase=_PHASES[heartbeat.phase],
        waiting=heartbeat.waiting,
        waiting_prefill_tokens=heartbeat.waiting_prefill_tokens,
        running=heartbeat.running,
        free_blocks=heartbeat.free_blocks,
        total_blocks=heartbeat.total_blocks,
        block_size=heartbeat.block_size,
        max_model_len=heartbeat.max_model_len,
        max_num_seqs=heartbeat.max_num_seqs,
        pressure=heartbeat.pressure,
        rates=_rates(heartbeat),
    )


def _unreadable(record: BoardRecord, why: str) -> Unreadable:
    return Unreadable(engine_id=EngineId(record.engine_id), epoch=record.epoch, sequence=record.sequence, why=why)


def _fault(heartbeat: pb.Heartbeat, record: BoardRecord) -> str:
    if (heartbeat.engine_id, heartbeat.epoch) != (record.engine_id, record.epoch):
        return f"filed under another replica: it names {heartbeat.engine_id!r}, epoch {heartbeat.epoch}"
    if heartbeat.phase not in _PHASES:
        return f"phase {int(heartbeat.phase)} is not known"
    if not 0.0 <= heartbeat.pressure <= 1.0:
        return f"pressure {heartbeat.pressure}"
    if heartbeat.free_blocks > heartbeat.total_blocks:
        return f"{heartbeat.free_blocks} of {heartbeat.total_blocks} blocks free"
    if heartbeat.phase == pb.PHASE_READY:
        missing = [name for name in _NEEDED_WHEN_READY if not getattr(heartbeat, name)]
        if missing:
            return f"ready without {', '.join(missing)}"
    return ""


def _rates(heartbeat: pb.Heartbeat) -> Rates | None:
    # An unset field reads as 0 and is caught here, as are the results of a division gone wrong at the engine.
    if not (_possible(heartbeat.prefill_tokens_per_s) and _possible(heartbeat.itl_ms)):
        return None
    return Rates(
        prefill_tokens_per_s=heartbeat.prefill_tokens_per_s,
        itl_s=heartbeat.itl_ms / 1000,
        prefill_by_length=tuple(
            sorted({r.tokens: r.tokens_per_s for r in heartbeat.prefill_rates if _possible(r.tokens_per_s)}.items())
        ),
        itl_by_batch=tuple(
            sorted({b.sequences: b.itl_ms / 1000 for b in heartbeat.batch_latencies if _possible(b.itl_ms)}.items())
        ),
    )


def _possible(rate: float) -> bool:
    return math.isfinite(rate) and rate > 0
