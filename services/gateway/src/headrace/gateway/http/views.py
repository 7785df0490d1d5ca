"""An answer as OpenAI's objects: chunks while it streams, one object when it does not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from headrace.api.common.v1 import answer_pb2
from headrace.gateway.http.speech import REASONS, Speech
from headrace.gateway.http.spelling import CompletionLogprobs, Json, Spelling
from headrace.gateway.http.tools import Tools


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What all objects of one answer begin with; `spelling` only when log-probabilities are wanted."""

    request_id: str
    created: int
    model: str
    answers: int
    include_usage: bool = False
    spelling: Spelling | None = None
    tools: Tools = field(default_factory=Tools)


class View(Protocol):
    """One way to tell an answer."""

    def opening(self) -> Iterable[Json]:
        """Chunks before the first text."""
        ...

    def delta(self, delta: answer_pb2.AnswerDelta) -> Iterable[Json]:
        """The chunks of new text, often one, none when there is nothing to tell."""
        ...

    def ends(self, finished: answer_pb2.AnswerFinished) -> Iterable[Json]:
        """Chunks after the last text: how each answer ended, then usage if it was asked for."""
        ...

    def whole(self, deltas: Sequence[answer_pb2.AnswerDelta], finished: answer_pb2.AnswerFinished) -> Json:
        """The one object of an answer that does not stream."""
        ...


class ChatView:
    """`chat.completion` and `chat.completion.chunk`."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._base = _base(head, f"chatcmpl-{head.request_id}", "chat.completion.chunk")
        self._speech = [Speech(head.tools.finder(), f"call_{head.request_id}_{n}") for n in range(head.answers)]

    def opening(self) -> Iterator[Json]:
        for index in range(self._head.answers):
            yield self._chunk(index, {"role": "assistant", "content": ""})

    def delta(self, delta: answer_pb2.AnswerDelta) -> Iterator[Json]:
        entries: list[Json] | None = self._entries(delta.logprobs) or None
        for said in self._speech[delta.index].push(delta.text):
            yield self._chunk(delta.index, said, entries)
            entries = None
        if entries:
            yield self._chunk(delta.index, {"content": ""}, entries)

    def ends(self, finished: answer_pb2.AnswerFinished) -> Iterator[Json]:
        for end in finished.choices:
            speech = self._speech[end.index]
            for said in speech.finish():
                yield self._chunk(end.index, said)
            yield self._chunk(end.index, {}, reason=speech.reason(end.finish_reason))
        if self._head.include_usage:
            yield self._base | {"choices": [], "usage": usage_of(finished.usage)}

    def whole(self, deltas: Sequence[answer_pb2.AnswerDelta], finished: answer_pb2.AnswerFinished) -> Json:
        texts, logprobs = _gathered(deltas)
        choices = []
        for end in finished.choices:
            entries = self._entries(logprobs[end.index])
            speech = self._speech[end.index]
            choices.append(
                {
                    "index": end.index,
                    "message": speech.message(texts[end.index]),
                    "logprobs": None if self._head.spelling is None else _content(entries),
                    "finish_reason": speech.reason(end.finish_reason),
                }
            )
        base = _base(self._head, f"chatcmpl-{self._head.request_id}", "chat.completion")
        return base | {"choices": choices, "usage": usage_of(finished.usage)}

    def _entries(self, logprobs: Iterable[answer_pb2.TokenLogprobs]) -> list[Json]:
        return self._head.spelling.chat(logprobs) if self._head.spelling else []

    def _chunk(self, index: int, delta: Json, entries: list[Json] | None = None, *, reason: str | None = None) -> Json:
        logprobs = None if entries is None else _content(entries)
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return self._base | {"choices": [choice]}


class CompletionView:
    """`text_completion`, whole and in chunks."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._base = _base(head, f"cmpl-{head.request_id}", "text_completion")
        self._logprobs: dict[int, CompletionLogprobs] = {}
        if head.spelling is not None:
            self._logprobs = {index: CompletionLogprobs(head.spelling) for index in range(head.answers)}

    def opening(self) -> Iterable[Json]:
        return ()

    def delta(self, delta: answer_pb2.AnswerDelta) -> Iterator[Json]:
        logprobs = self._taken(delta.index, delta.logprobs)
        if delta.text or (logprobs and logprobs["tokens"]):
            yield self._base | {"choices": [self._choice(delta.index, delta.text, logprobs)]}

    def ends(self, finished: answer_pb2.AnswerFinished) -> Iterator[Json]:
        for end in finished.choices:
            yield self._base | {"choices": [self._choice(end.index, "", None, REASONS[end.finish_reason])]}
        if self._head.include_usage:
            yield self._base | {"choices": [], "usage": usage_of(finished.usage)}

    def whole(self, deltas: Sequence[answer_pb2.AnswerDelta], finished: answer_pb2.AnswerFinished) -> Json:
        texts, logprobs = _gathered(deltas)
        choices = [
            self._choice(
                end.index,
                texts[end.index],
                self._taken(end.index, logprobs[end.index]),
                REASONS[end.finish_reason],
            )
            for end in finished.choices
        ]
        return self._base | {"choices": choices, "usage": usage_of(finished.usage)}

    def _taken(self, index: int, entries: Iterable[answer_pb2.TokenLogprobs]) -> Json | None:
        return self._logprobs[index].take(entries) if self._logprobs else None

    @staticmethod
    def _choice(index: int, text: str, logprobs: Json | None, reason: str | None = None) -> Json:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


def usage_of(usage: answer_pb2.Usage) -> Json:
    """The `usage` object."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _base(head: Head, answer_id: str, kind: str) -> Json:
    base: Json = {"id": answer_id, "object": kind, "created": head.created, "model": head.model}
    return base | {"usage": None} if head.include_usage else base


def _content(entries: list[Json]) -> Json:
    return {"content": entries, "refusal": None}


def _gathered(
    deltas: Iterable[answer_pb2.AnswerDelta],
) -> tuple[dict[int, str], dict[int, list[answer_pb2.TokenLogprobs]]]:
    """All text and log-probabilities, by index."""
    texts: dict[int, list[str]] = defaultdict(list)
    logprobs: dict[int, list[answer_pb2.TokenLogprobs]] = defaultdict(list)
    for delta in deltas:
        texts[delta.index].append(delta.text)
        logprobs[delta.index].extend(delta.logprobs)
    joined: dict[int, str] = defaultdict(str, {index: "".join(pieces) for index, pieces in texts.items()})
    return joined, logprobs


__all__ = ["ChatView", "CompletionView", "Head", "View", "usage_of"]
