"""Several answers' deltas as one stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from headrace.api.common.v1.answer_pb2 import AnswerDelta


class Merge:
    """What the client has not taken yet, one delta per answer: a slow client gets fewer and larger ones."""

    def __init__(self) -> None:
        self._pending: dict[int, AnswerDelta] = {}
        self._news = asyncio.Event()

    async def follow(self, deltas: AsyncGenerator[AnswerDelta | None, None]) -> None:
        """Collect one answer's deltas until it ends."""
        async with aclosing(deltas) as news:
            async for delta in news:
                if delta is not None:
                    self._add(delta)

    async def deltas(self, tasks: Sequence[asyncio.Task[None]]) -> AsyncGenerator[AnswerDelta, None]:
        """Whatever `tasks`, which run `follow`, have collected, until all have ended; the first failure is raised."""
        for task in tasks:
            task.add_done_callback(lambda _: self._news.set())
        while True:
            await self._news.wait()
            self._news.clear()
            ended = [task for task in tasks if task.done()]
            pending, self._pending = self._pending, {}
            for delta in pending.values():
                yield delta
            for task in ended:
                task.result()
            if len(ended) == len(tasks):
                return

    def _add(self, delta: AnswerDelta) -> None:
        waiting = self._pending.get(delta.index)
        if waiting is None:
            self._pending[delta.index] = delta
        else:
            waiting.text += delta.text
            waiting.token_ids.extend(delta.token_ids)
            waiting.logprobs.extend(delta.logprobs)
        self._news.set()
