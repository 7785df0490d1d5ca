"""What the replica says of itself, every 250 ms, to Redis."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from headrace.api.engine.v1 import engine_service_pb2 as pb
from headrace.base.errors import HeadraceError
from headrace.coord.redis.replica_board import ReplicaBoard
from headrace.engine.core.load import Load
from headrace.engine.metrics import HEARTBEATS

log = structlog.get_logger(__name__)


@dataclass(slots=True, kw_only=True)
class Identity:
    """The parts of a heartbeat that hold for the whole epoch, once they are known."""

    engine_id: str
    epoch: int
    deployment: str
    bundle_digest: str
    backend: str
    max_num_seqs: int
    block_size: int
    address: str = ""
    max_model_len: int = 0


class Heart:
    """Makes heartbeats, and writes them while `beat` runs. Redis away is survived, counted and logged once."""

    def __init__(
        self, identity: Identity, board: ReplicaBoard | None, load: Callable[[], Load | None], period_s: float
    ) -> None:
        self.identity = identity
        self._phase: pb.Phase.ValueType = pb.PHASE_WARMING
        self._stalled = False
        self._board = board
        self._load = load
        self._period_s = period_s
        self._sequence = 0
        self._wake = asyncio.Event()
        self._failing = False

    @property
    def phase(self) -> pb.Phase.ValueType:
        """WARMING while the worker is silent, too: to others it means the same, not now and perhaps soon."""
        return pb.PHASE_WARMING if self._stalled and self._phase == pb.PHASE_READY else self._phase

    @property
    def stalled(self) -> bool:
        """Whether the worker is silent."""
        return self._stalled

    def set_phase(self, phase: pb.Phase.ValueType) -> None:
        """Change the phase and say so at once."""
        self._phase = phase
        self._wake.set()

    def set_stalled(self, stalled: bool) -> None:
        """Note that the worker fell silent or is heard again, and say so at once."""
        self._stalled = stalled
        self._wake.set()

    async def beat(self) -> None:
        """Write until cancelled."""
        while True:
            self._wake.clear()
            await self.write()
            try:
                async with asyncio.timeout(self._period_s):
                    await self._wake.wait()
            except TimeoutError:
                continue

    async def write(self) -> None:
        """Write one heartbeat now."""
        if self._board is None:
            return
        self._sequence += 1
        message = self.message()
        try:
            written = await self._board.write(
                message.engine_id, message.epoch, message.sequence, message.SerializeToString()
            )
        except HeadraceError as error:
            HEARTBEATS.labels("failed").inc()
            if not self._failing:
                log.warning("heartbeat_failed", reason=error.reason)
            self._failing = True
            return
        HEARTBEATS.labels("written" if written.accepted else "refused").inc()
        if not written.accepted:
            # A younger process has taken this id: whoever routes by Redis already ignores us.
            log.error("heartbeat_refused", engine=message.engine_id, epoch=message.epoch)
        if self._failing:
            log.info("heartbeat_recovered")
        self._failing = False

    async def withdraw(self) -> None:
        """Take the record off the board, so that nobody waits for it to turn stale."""
        if self._board is not None:
            try:
                await self._board.remove(self.identity.engine_id, self.identity.epoch)
            except HeadraceError as error:
                log.warning("heartbeat_not_withdrawn", reason=error.reason)

    def message(self) -> pb.Heartbeat:
        """The heartbeat as of now; rates are absent until measured."""
        me, load = self.identity, self._load()
        beat = pb.Heartbeat(
            engine_id=me.engine_id,
            epoch=me.epoch,
            sequence=self._sequence,
            address=me.address,
            deployment=me.deployment,
            bundle_digest=me.bundle_digest,
            phase=self.phase,
            block_size=me.block_size,
            max_model_len=me.max_model_len,
            max_num_seqs=me.max_num_seqs,
            pid=os.getpid(),
            backend=me.backend,
        )
        if load is not None:
            beat.waiting, beat.waiting_prefill_tokens, beat.running = (
                load.waiting,
                load.waiting_prefill_tokens,
                load.running,
            )
            beat.free_blocks, beat.total_blocks = load.free_blocks, load.total_blocks
            beat.cached_blocks, beat.pressure = load.cached_blocks, load.pressure
            if load.prefill_tokens_per_s is not None:
                beat.prefill_tokens_per_s = load.prefill_tokens_per_s
            if load.itl_ms is not None:
                beat.itl_ms = load.itl_ms
            for tokens, tokens_per_s in load.prefill_rates:
                beat.prefill_rates.add(tokens=tokens, tokens_per_s=tokens_per_s)
            for sequences, itl_ms in load.batch_latencies:
                beat.batch_latencies.add(sequences=sequences, itl_ms=itl_ms)
        return beat
