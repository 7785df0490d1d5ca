"""EngineService: protobuf in and out, nothing decided here."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any

from headrace.api.engine.v1 import engine_service_pb2 as pb
from headrace.api.engine.v1 import engine_service_pb2_grpc as rpc
from headrace.base.errors import Unavailable
from headrace.engine.answer import stream_answer
from headrace.engine.attach import AttachSession
from headrace.engine.cache_feed import CacheFeed
from headrace.engine.core.finish import ErrorReason, Problem
from headrace.engine.heartbeat import Heart
from headrace.engine.sequences import WORKER_STALLED, Sequences
from headrace.engine.settings import EngineSettings
from headrace.rpc.context import current_call
from headrace.text.tokenizer import Tokenizer

_NOT_SHOWN = ("redis_url", "otlp_endpoint", "prefix_cache_key")  # they may hold secrets


class EngineServicer(rpc.EngineServiceServicer):
    """Serves one replica. `tokenizer` is set once it is loaded; until the worker is ready every call is refused."""

    def __init__(self, settings: EngineSettings, heart: Heart, sequences: Sequences, cache: CacheFeed) -> None:
        self._settings = settings
        self._heart = heart
        self._sequences = sequences
        self._cache = cache
        self.tokenizer: Tokenizer | None = None
        self.vocab_size = 0
        self.sessions: set[AttachSession] = set()  # those that serve

    def refusal(self) -> Problem | None:
        """Why new work is refused, if it is."""
        if self._heart.phase == pb.PHASE_DRAINING:
            return Problem(reason=ErrorReason.DRAINING, message="this replica is draining and takes nothing new")
        return WORKER_STALLED if self._heart.stalled else None

    def Attach(
        self, request_iterator: AsyncIterator[pb.AttachRequest], context: Any
    ) -> AsyncIterator[pb.AttachResponse]:
        """Serve one gateway's step stream."""
        return AttachSession(
            self._sequences,
            request_iterator,
            welcome=self._welcome,
            refusal=self.refusal,
            sessions=self.sessions,
        )

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        """Text in, text out."""
        self._require_ready()
        if refusal := self.refusal():
            raise Unavailable(refusal.message, reason=refusal.reason.value, retry_after_s=1.0)
        assert self.tokenizer is not None
        call = current_call()
        events = stream_answer(self._sequences, self.tokenizer, request, call, self._heart.identity.engine_id)
        async for event in events:
            yield event

    async def SubscribeCacheEvents(
        self, request: pb.SubscribeCacheEventsRequest, context: Any
    ) -> AsyncIterator[pb.SubscribeCacheEventsResponse]:
        """The prefix cache as it changes."""
        self._require_ready()
        async for change in self._cache.follow(request.epoch, request.sequence):
            yield change

    async def Describe(self, request: pb.DescribeRequest, context: Any) -> pb.DescribeResponse:
        """What this replica is and how it is doing; answers while warming, too."""
        shown = {k: str(v) for k, v in asdict(self._settings).items() if k not in _NOT_SHOWN}
        return pb.DescribeResponse(heartbeat=self._heart.message(), settings=shown)

    def _welcome(self) -> pb.Welcome:
        self._require_ready()
        me = self._heart.identity
        return pb.Welcome(
            engine_id=me.engine_id, epoch=me.epoch, bundle_digest=me.bundle_digest, vocab_size=self.vocab_size
        )

    def _require_ready(self) -> None:
        if self._heart.stalled:
            raise Unavailable(WORKER_STALLED.message, reason=WORKER_STALLED.reason.value, retry_after_s=1.0)
        if self._heart.phase == pb.PHASE_WARMING:
            raise Unavailable("this replica is warming up", reason="WARMING", retry_after_s=1.0)
