"""The Attach stream to one life of one engine: submits and cancels go up, columnar steps come down."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import structlog

from headrace.api.engine.v1 import engine_service_pb2 as engine_pb2
from headrace.api.engine.v1 import engine_service_pb2_grpc as engine_grpc
from headrace.base.channel import Keepalive
from headrace.base.deadline import Deadline
from headrace.base.errors import HeadraceError, StaleEpoch
from headrace.gateway.adapters.sequence import AttachedSequence, Meter
from headrace.gateway.adapters.wire import step_of
from headrace.gateway.core.life import Life
from headrace.gateway.core.recovery import EngineFault, Fault
from headrace.gateway.core.slots import Slots
from headrace.gateway.core.step import OpenSlot, violation
from headrace.rpc.client import Peer

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAddress:
    """One life of one engine, as the router named it."""

    engine_id: str
    epoch: int
    address: str

    @property
    def life(self) -> Life:
        """What its faults are held against."""
        return Life(self.engine_id, self.epoch)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachSettings:
    """How streams are opened and kept; times in seconds.

    The keepalive finds a frozen engine after at most `time_s` + `timeout_s`.
    """

    gateway_id: str
    keepalive: Keepalive = field(default_factory=Keepalive)
    welcome_timeout_s: float = 2.0
    idle_s: float = 60.0


class _Requests:
    """The hello, then whatever is queued.

    No generator: grpc.aio may still be waiting in it when the stream breaks, and asyncio then complains in the log that
    it cannot be closed.
    """

    def __init__(self, hello: engine_pb2.AttachRequest, queue: asyncio.Queue[engine_pb2.AttachRequest]) -> None:
        self._hello: engine_pb2.AttachRequest | None = hello
        self._queue = queue

    def __aiter__(self) -> _Requests:
        return self

    async def __anext__(self) -> engine_pb2.AttachRequest:
        if self._hello is not None:
            hello, self._hello = self._hello, None
            return hello
        return await self._queue.get()


class AttachConnection:
    """One stream. `run` lives as long as it does; when it ends, every open sequence has failed or finished."""

    def __init__(self, engine: EngineAddress, settings: AttachSettings) -> None:
        self.engine = engine
        self._settings = settings
        self._peer = Peer(engine.address, keepalive=settings.keepalive)
        self._outgoing: asyncio.Queue[engine_pb2.AttachRequest] = asyncio.Queue()
        self._sequences: dict[int, AttachedSequence] = {}
        self._open: dict[int, OpenSlot] = {}
        self._slots = Slots()
        self._steps = 0
        self._welcome: engine_pb2.Welcome | None = None
        self._settled = asyncio.Event()
        self._fault: EngineFault | None = None
        self._idle_since = time.monotonic()

    @property
    def open_slots(self) -> int:
        """Sequences whose finish record has not come."""
        return len(self._sequences)

    @property
    def broken(self) -> bool:
        """Whether nothing more can be submitted here."""
        return self._fault is not None

    def idle_for_s(self, now: float) -> float:
        """Seconds since the last sequence ended; 0 while one is open."""
        return 0.0 if self._sequences else now - self._idle_since

    def retire(self) -> None:
        """Take nothing more, because the stream is about to be closed."""
        self._fault = EngineFault(Fault.BROKEN, f"the stream to {self.engine.engine_id} was idle and is closing")

    async def opened(self, bundle_digest: str, deadline: Deadline) -> None:
        """Wait until the engine has welcomed us; EngineFault when it did not, or serves another bundle."""
        try:
            async with asyncio.timeout(deadline.timeout_s()):
                await self._settled.wait()
        except TimeoutError:
            raise EngineFault(Fault.UNREACHABLE, f"{self.engine.engine_id} did not answer in time") from None
        if self._fault is not None:
            raise self._fault.again()
        if self._welcome is not None and self._welcome.bundle_digest != bundle_digest:
            raise EngineFault(Fault.STALE_EPOCH, f"{self.engine.engine_id} serves another bundle by now")

    def submit(self, submission: engine_pb2.Submit, meter: Meter) -> list[AttachedSequence]:
        """Start the `sampling.n` sequences of a submission, whose slots are filled in here; `meter` hears of each.

        EngineFault when the stream is broken.
        """
        if self._fault is not None:
            raise self._fault.again()
        sampling = submission.sampling
        slots = self._slots.take(max(1, sampling.n))
        for slot in slots:
            self._sequences[slot] = AttachedSequence(slot, self._cancel, meter)
            self._open[slot] = OpenSlot(room=sampling.max_tokens, logprobs=sampling.HasField("logprobs"))
        submission.slot = slots.start
        self._outgoing.put_nowait(engine_pb2.AttachRequest(submit=submission))
        return [self._sequences[slot] for slot in slots]

    async def run(self) -> None:
        """Open the stream and dispatch its steps until it ends; never raises but for its own cancellation."""
        stub = engine_grpc.EngineServiceStub(self._peer.channel)
        hello = engine_pb2.Hello(gateway_id=self._settings.gateway_id, epoch=self.engine.epoch)
        requests = _Requests(engine_pb2.AttachRequest(hello=hello), self._outgoing)
        fault = EngineFault(Fault.BROKEN, f"the stream to {self.engine.engine_id} was closed by this gateway")
        try:
            async with self._peer.stream(stub.Attach, requests, deadline=Deadline.never()) as responses:
                await self._greet(responses)
                async for response in responses:
                    self._dispatch(response)
            fault = EngineFault(Fault.BROKEN, f"{self.engine.engine_id} closed the stream")
        except EngineFault as error:
            fault = error
        except HeadraceError as error:
            fault = self._transport_fault(error)
        finally:
            self._end(fault)
            await self._peer.close()

    async def _greet(self, responses: AsyncIterator[engine_pb2.AttachResponse]) -> None:
        engine = self.engine
        try:
            async with asyncio.timeout(self._settings.welcome_timeout_s):
                first = await anext(responses)
        except (TimeoutError, StopAsyncIteration):
            raise EngineFault(Fault.UNREACHABLE, f"{engine.engine_id} sent no welcome") from None
        if not first.HasField("welcome"):
            raise EngineFault(Fault.GARBAGE, f"{engine.engine_id} began with something else than a welcome")
        welcome = first.welcome
        if (welcome.engine_id, welcome.epoch) != (engine.engine_id, engine.epoch):
            raise EngineFault(Fault.STALE_EPOCH, f"{engine.address} is not {engine.engine_id} of that epoch any more")
        self._welcome = welcome
        self._settled.set()
        log.info("engine_attached", engine=engine.engine_id, epoch=engine.epoch, address=engine.address)

    def _dispatch(self, response: engine_pb2.AttachResponse) -> None:
        assert self._welcome is not None
        if not response.HasField("step"):
            raise EngineFault(Fault.GARBAGE, f"{self.engine.engine_id} sent something else than a step")
        step = step_of(response.step)
        why = violation(step, expected=self._steps + 1, open_slots=self._open, vocab_size=self._welcome.vocab_size)
        if why is not None:
            raise EngineFault(Fault.GARBAGE, f"{self.engine.engine_id}: {why}")
        self._steps = step.number
        now = time.monotonic()
        logprobs = iter(step.logprobs)  # of the tokens whose slots asked for them, in their order
        for slot, token_ids in step.rows():
            open_slot = self._open[slot]
            open_slot.room -= len(token_ids)
            said = [next(logprobs).content for _ in token_ids] if open_slot.logprobs else ()
            self._sequences[slot].deliver(token_ids, now, said)
        for finish in step.finishes:
            self._release(finish.slot).end(finish)

    def _release(self, slot: int) -> AttachedSequence:
        sequence = self._sequences.pop(slot)
        del self._open[slot]
        self._slots.give(slot)
        self._idle_since = time.monotonic()
        return sequence

    def _cancel(self, slot: int) -> None:
        if self._fault is None:
            self._outgoing.put_nowait(engine_pb2.AttachRequest(cancel=engine_pb2.Cancel(slot=slot)))

    def _transport_fault(self, error: HeadraceError) -> EngineFault:
        if isinstance(error, StaleEpoch):
            return EngineFault(Fault.STALE_EPOCH, f"{self.engine.engine_id} has restarted")
        fault = Fault.UNREACHABLE if self._welcome is None else Fault.BROKEN
        return EngineFault(fault, f"the stream to {self.engine.engine_id} broke: {error.message}")

    def _end(self, fault: EngineFault) -> None:
        self._fault = fault
        self._settled.set()
        log.info("engine_detached", engine=self.engine.engine_id, why=fault.message, open=self.open_slots)
        for slot in list(self._sequences):
            self._release(slot).fail(fault)
