"""Whether a replica that was ejected works again: a real generation of one token, as a gateway's client would ask."""

from __future__ import annotations

import asyncio
from typing import Any

from headrace.api.common.v1.sampling_pb2 import SamplingParams
from headrace.api.engine.v1 import engine_service_pb2 as pb
from headrace.api.engine.v1.engine_service_pb2_grpc import EngineServiceStub
from headrace.base.deadline import Deadline
from headrace.base.errors import HeadraceError
from headrace.observe.log import get_logger
from headrace.observe.metrics import counter, gauge
from headrace.router.core.replica import EngineId, Replica
from headrace.router.core.router import Router
from headrace.router.ports import Clock
from headrace.rpc.client import Peer

log = get_logger(__name__)

PERIOD_S = 0.1
ANSWER_S = 2.0
"""One token of a two-token prompt takes a few steps; a replica that needs longer is no better than none."""

_PROBES = counter("headrace_router_probes_total", "Probes of ejected replicas.", ("outcome",))
_EJECTED = gauge("headrace_router_ejected", "Replicas ejected at present.")


class Prober:
    """Probes each ejected replica when its back-off is over, all at the same time, one probe each."""

    def __init__(self, router: Router, *, clock: Clock) -> None:
        self._router = router
        self._clock = clock
        self._running: dict[EngineId, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Probe until cancelled."""
        try:
            while True:
                self.step()
                await asyncio.sleep(PERIOD_S)
        finally:
            for probe in self._running.values():
                probe.cancel()
            if self._running:
                await asyncio.wait(self._running.values())

    def step(self) -> None:
        """Start the probes that are due."""
        _EJECTED.set(len(self._router.ejection))
        for engine_id, probe in list(self._running.items()):
            if probe.done():
                del self._running[engine_id]
                probe.result()
        for engine_id, epoch in self._router.ejection.due(self._clock()):
            sighting = self._router.view.sightings.get(engine_id)
            if engine_id in self._running or sighting is None or not isinstance(sighting.seen, Replica):
                continue
            task = asyncio.create_task(self._probe(engine_id, epoch, sighting.seen.address), name=f"probe-{engine_id}")
            self._running[engine_id] = task

    async def _probe(self, engine_id: EngineId, epoch: int, address: str) -> None:
        why = await one_token(address)
        self._router.ejection.probed(engine_id, epoch, answered=not why, now=self._clock())
        _PROBES.labels("failed" if why else "answered").inc()
        log.info("replica_probed", engine=engine_id, epoch=epoch, answered=not why, why=why)


async def one_token(address: str) -> str:
    """Ask the engine at `address` for one token; why it gave none, empty when it did."""
    request = pb.GenerateRequest(prompt="Hello", sampling=SamplingParams(max_tokens=1))
    async with Peer(address) as peer:
        stub: Any = EngineServiceStub(peer.channel)
        try:
            async with peer.stream(stub.Generate, request, deadline=Deadline.after(ANSWER_S)) as events:
                async for event in events:
                    if event.WhichOneof("event") == "finished":
                        return ""
        except HeadraceError as error:
            return error.reason
    return "NO_FINISH"
