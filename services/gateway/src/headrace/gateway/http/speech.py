"""What one answer of a chat says: text, and calls of tools."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from headrace.api.common.v1 import answer_pb2
from headrace.gateway.http.spelling import Json
from headrace.text.tool_calls import Finder, Piece, ToolCall

REASONS = {answer_pb2.FINISH_REASON_STOP: "stop", answer_pb2.FINISH_REASON_LENGTH: "length"}


class Speech:
    """Turns text into the deltas of a message; a call leaves whole, once it is complete."""

    def __init__(self, finder: Finder | None, call_id: str) -> None:
        self._finder = finder
        self._call_id = call_id
        self._calls = 0

    def push(self, text: str) -> Iterator[Json]:
        """What new text adds."""
        if text:
            yield from self._told([text] if self._finder is None else self._finder.push(text))

    def finish(self) -> Iterator[Json]:
        """What was held back until the end."""
        if self._finder is not None:
            yield from self._told(self._finder.finish())

    def message(self, text: str) -> Json:
        """The message of a whole answer."""
        said = [*self.push(text), *self.finish()]
        calls = [call for delta in said for call in delta.get("tool_calls", ())]
        content = "".join(delta.get("content", "") for delta in said)
        message: Json = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message["content"] = content or None
            message["tool_calls"] = [{k: v for k, v in call.items() if k != "index"} for call in calls]
        return message

    def reason(self, ended: answer_pb2.FinishReason.ValueType) -> str:
        """Why the answer ended: to call tools, if it does."""
        return "tool_calls" if self._calls and ended == answer_pb2.FINISH_REASON_STOP else REASONS[ended]

    def _told(self, pieces: Iterable[Piece]) -> Iterator[Json]:
        for piece in pieces:
            if isinstance(piece, ToolCall):
                yield {"tool_calls": [self._call(piece)]}
            else:
                yield {"content": piece}

    def _call(self, call: ToolCall) -> Json:
        index, self._calls = self._calls, self._calls + 1
        function = {"name": call.name, "arguments": call.arguments}
        return {"index": index, "id": f"{self._call_id}_{index}", "type": "function", "function": function}
