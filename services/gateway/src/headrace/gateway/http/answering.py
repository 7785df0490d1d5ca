"""One answer over HTTP: from admission's events to a stream of chunks, or to one object."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field

from headrace.api.common.v1 import answer_pb2
from headrace.base.errors import InternalError
from headrace.gateway.admission import Admission
from headrace.gateway.answer import Event
from headrace.gateway.core.ask import Ask
from headrace.gateway.http.reply import Reply
from headrace.gateway.http.requests import Parsed, chat_request, completion_request
from headrace.gateway.http.spelling import Spelling
from headrace.gateway.http.views import ChatView, CompletionView, Head, View
from headrace.rpc.context import CallContext


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One way to ask: its name in metrics and traces, how its body is read, how its answers are told."""

    name: str
    parse: Callable[[bytes], Parsed]
    view: Callable[[Head], View]


CHAT = Kind(name="ChatCompletions", parse=chat_request, view=ChatView)
COMPLETION = Kind(name="Completions", parse=completion_request, view=CompletionView)


@dataclass(slots=True, kw_only=True)
class Exchange:
    """One request and its answer.

    The body is parsed where admission asks for it: whoever is not known here learns nothing of what a request may be.
    """

    kind: Kind
    admission: Admission
    call: CallContext
    _parsed: Parsed | None = field(default=None, init=False)

    @property
    def names(self) -> Mapping[str, str]:
        """What the request calls the fields that errors name."""
        return self._parsed.names if self._parsed else {}

    async def run(self, body: bytes, reply: Reply) -> None:
        """Answer; raises what the client is to hear."""
        events = self.admission.answer(self.kind.name, body, self._parse, self.call)
        async with aclosing(events):
            view = self.kind.view(await self._head(await anext(events)))
            await (self._stream if self._asked.stream else self._collect)(events, view, reply)

    def _parse(self, body: bytes) -> Ask:
        self._parsed = self.kind.parse(body)
        return self._parsed.ask

    @property
    def _asked(self) -> Parsed:
        if self._parsed is None:
            raise InternalError("an answer has begun before its request was read")
        return self._parsed

    async def _head(self, started: Event) -> Head:
        if not isinstance(started, answer_pb2.AnswerStarted):
            raise InternalError("an answer's first event was not its start")
        asked = self._asked
        return Head(
            request_id=started.request_id,
            created=int(time.time()),
            model=started.model,
            answers=asked.ask.sampling.n or 1,
            include_usage=asked.include_usage,
            spelling=await self._spelling() if asked.logprobs else None,
            tools=asked.tools,
        )

    async def _spelling(self) -> Spelling:
        catalog = self.admission.catalog
        principal = await self.admission.identity.authenticate(self.call.metadata)
        model = await catalog.model(self._asked.ask.model, principal, self.call.deadline)
        return Spelling(model.tokenizer)

    async def _stream(self, events: AsyncGenerator[Event, None], view: View, reply: Reply) -> None:
        """Each event leaves at once; while the client is slow, the answer's deltas merge behind it."""
        # Headers leave with the first token: whatever fails before it has a status of its own.
        event: Event | None = await anext(events)
        await reply.begin()
        await reply.events(view.opening())
        while event is not None:
            if isinstance(event, answer_pb2.AnswerDelta):
                await reply.events(view.delta(event))
            elif isinstance(event, answer_pb2.AnswerFinished):
                await reply.events(view.ends(event))
            event = await anext(events, None)
        await reply.done()

    async def _collect(self, events: AsyncGenerator[Event, None], view: View, reply: Reply) -> None:
        deltas: list[answer_pb2.AnswerDelta] = []
        finished = answer_pb2.AnswerFinished()
        async for event in events:
            if isinstance(event, answer_pb2.AnswerDelta):
                deltas.append(event)
            elif isinstance(event, answer_pb2.AnswerFinished):
                finished = event
        await reply.json(200, view.whole(deltas, finished))
