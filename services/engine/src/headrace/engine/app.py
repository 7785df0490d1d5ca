"""The engine's gRPC shell: composition, start, drain."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import structlog

from headrace.api.control.v1.intent_pb2 import Bundle
from headrace.api.engine.v1 import engine_service_pb2 as pb
from headrace.api.engine.v1 import engine_service_pb2_grpc as rpc
from headrace.base.errors import HeadraceError, StartError
from headrace.bundle import intent
from headrace.bundle.bundle import describe, digest
from headrace.bundle.shipped import shipped_model_path
from headrace.coord.redis.replica_board import ReplicaBoard
from headrace.coord.redis.store import open_redis
from headrace.engine.cache_feed import CacheFeed
from headrace.engine.heartbeat import Heart, Identity
from headrace.engine.sequences import Sequences
from headrace.engine.servicer import EngineServicer
from headrace.engine.settings import EngineSettings
from headrace.engine.watch import Watch
from headrace.engine.worker.client import WorkerClient
from headrace.observe.metrics import start_metrics_server
from headrace.observe.tracing import Tracing
from headrace.rpc.ids import new_epoch
from headrace.rpc.server import Server, ServerSettings
from headrace.text.tokenizer import load_tokenizer

log = structlog.get_logger(__name__)
SERVICE = "headrace.api.engine.v1.EngineService"


class EngineApp:
    """One replica: a gRPC shell here, the model in its own process."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._tracing = Tracing("engine", settings.engine_id, settings.otlp_endpoint)
        self._redis = open_redis(settings.redis_url) if settings.redis_url else None
        self._worker = WorkerClient()
        epoch = new_epoch()
        self._cache = CacheFeed(epoch)
        self._sequences = Sequences(self._worker, self._cache)
        self._heart = Heart(
            Identity(
                engine_id=settings.engine_id,
                epoch=epoch,
                deployment=settings.deployment,
                bundle_digest="",
                backend=settings.backend.value,
                max_num_seqs=settings.max_num_seqs,
                block_size=settings.block_size,
            ),
            ReplicaBoard(self._redis) if self._redis else None,
            lambda: self._sequences.load,
            settings.heartbeat_period_s,
        )
        self._servicer = EngineServicer(settings, self._heart, self._sequences, self._cache)
        self._server = Server(ServerSettings(address=settings.address), service_name="engine")
        self._server.add(rpc.add_EngineServiceServicer_to_server, self._servicer, SERVICE)
        self._beating: asyncio.Future[None] | None = None
        self._dispatching: asyncio.Future[None] | None = None
        self._watching: asyncio.Future[None] | None = None
        self._watch = Watch(
            self._worker, stall_s=settings.worker_stall_s, lost_s=settings.worker_lost_s, changed=self._stalled
        )

    @property
    def address(self) -> str:
        """host:port it listens on; empty before it does."""
        return self._server.address

    @property
    def worker_pid(self) -> int:
        """Process id of the worker."""
        return self._worker.pid

    async def start(self) -> None:
        """Listen and say WARMING at once; load and warm up the model; then take work."""
        began = time.monotonic()
        await self._tracing.start()
        start_metrics_server(self._settings.metrics_address)
        bundle = await asyncio.to_thread(self._bundle)
        me = self._heart.identity
        me.bundle_digest = digest(bundle)
        me.address = await self._server.start()
        me.address = self._settings.advertise or me.address
        self._beating = asyncio.ensure_future(self._heart.beat())
        if self._settings.max_itl_stretch and not self._settings.enable_chunked_prefill:
            log.warning("prompts_not_paced", reason="enable_chunked_prefill is off: whole prompts take what they take")
        config = self._settings.worker_config(
            bundle.model_path, bundle.precision, bundle.max_model_len, me.bundle_digest
        )
        loading = asyncio.ensure_future(asyncio.to_thread(load_tokenizer, bundle.model_path))
        try:
            ready = await self._worker.start(config)
        finally:
            await asyncio.wait({loading})
        self._servicer.tokenizer = loading.result()
        self._servicer.vocab_size = ready.vocab_size
        self._sequences.begin(ready.load)
        me.max_model_len, me.block_size = ready.max_model_len, ready.block_size
        self._heart.set_phase(pb.PHASE_READY)
        await self._server.set_serving(True)
        seconds = round(time.monotonic() - began, 2)
        log.info(
            "engine_ready", engine=me.engine_id, address=me.address, seconds=seconds, computes_on=ready.computes_on
        )

    def _bundle(self) -> Bundle:
        """The bundle given, or one described from the model; the weights are trusted to be the bundle's."""
        settings = self._settings
        if not settings.bundle:
            return describe(settings.model or shipped_model_path(), precision=settings.precision)
        try:
            bundle = intent.decode(Bundle, Path(settings.bundle).read_bytes())
        except OSError as error:
            raise StartError(f"cannot read --bundle {settings.bundle}: {error.strerror}") from error
        except HeadraceError as error:
            raise StartError(f"--bundle {settings.bundle} is not a bundle: {error}") from error
        if settings.model:
            bundle.model_path = settings.model
        if not Path(bundle.model_path).exists():
            raise StartError(f"there is no model at {bundle.model_path}, where the bundle says it is")
        return bundle

    async def run(self) -> None:
        """Beat, dispatch and watch until cancelled; the worker's death, or long silence, ends this process too."""
        assert self._beating is not None
        self._watching = asyncio.ensure_future(self._watch.run())
        # All outlive this call: a drain still needs the heartbeats to say DRAINING and the tokens to flow.
        self._dispatching = asyncio.ensure_future(self._sequences.dispatch())
        parts: set[asyncio.Future[None]] = {self._dispatching, self._beating, self._watching}
        done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
        for part in done:
            part.result()

    async def _stalled(self, stalled: bool) -> None:
        """The worker fell silent, or is heard again."""
        self._heart.set_stalled(stalled)
        if stalled:
            self._sequences.give_up_unstarted()
        await self._server.set_serving(self._heart.phase == pb.PHASE_READY)

    async def drain(self) -> None:
        """Say DRAINING, let running answers end within the grace, end the streams, leave the board."""
        self._heart.set_phase(pb.PHASE_DRAINING)
        await self._server.set_serving(False)
        until = time.monotonic() + self._settings.grace_s
        dispatching = self._dispatching
        while len(self._sequences) and time.monotonic() < until and dispatching and not dispatching.done():
            await asyncio.sleep(0.02)
        for session in self._servicer.sessions:
            session.close()
        self._cache.close()
        await self._server.drain(2.0)
        if self._watching is not None:
            self._watching.cancel()
        await self._worker.stop()
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.wait({self._beating})
        await self._heart.withdraw()
        for part in (dispatching, self._watching):
            if part is not None:
                part.cancel()
                await asyncio.gather(part, return_exceptions=True)  # how it failed, `run` has reported
        if self._redis is not None:
            await self._redis.aclose()
        await self._tracing.shutdown()
