"""Calls of tools inside an answer's text, in the format of Hermes and Qwen: `<tool_call>{"name": …}</tool_call>`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Protocol

OPENING, CLOSING = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call; `arguments` is a JSON object, as text."""

    name: str
    arguments: str


Piece = str | ToolCall


class Finder(Protocol):
    """Tells text from calls, while the answer streams."""

    def push(self, text: str) -> list[Piece]:
        """What `text` completes, in order."""
        ...

    def finish(self) -> list[Piece]:
        """The rest, once the answer has ended."""
        ...


class MarkedCalls:
    """Calls between marks. A call that is not well-formed, or not finished, is text like any other.

    White space around calls belongs to the format and is dropped; whatever may yet turn out to be a mark is held back.
    """

    def __init__(self) -> None:
        self._held = ""
        self._inside = False
        self._searched = 0
        self._called = False

    def push(self, text: str) -> list[Piece]:
        self._held += text
        found: list[Piece] = []
        while self._take_call(found) if self._inside else self._take_text(found):
            pass
        return found

    def finish(self) -> list[Piece]:
        rest, self._held = self._held, ""
        if self._inside:
            return [OPENING + rest]
        return [rest] if rest and not (self._called and rest.isspace()) else []

    def _take_text(self, found: list[Piece]) -> bool:
        """Move what is certainly text; whether a mark follows it."""
        at = self._held.find(OPENING)
        shown = self._held[: len(self._held) - _held_back(self._held)] if at < 0 else self._held[:at].rstrip()
        if self._called:
            shown = shown if shown.strip() else ""
        if shown:
            found.append(shown)
        if at < 0:
            self._held = self._held[len(self._held) - _held_back(self._held) :]
            return False
        self._held, self._inside, self._searched = self._held[at + len(OPENING) :], True, 0
        return True

    def _take_call(self, found: list[Piece]) -> bool:
        """Move a call that is complete; whether there was one."""
        at = self._held.find(CLOSING, self._searched)
        if at < 0:
            self._searched = max(0, len(self._held) - len(CLOSING))
            return False
        content = self._held[:at]
        call = call_of(content)
        found.append(call or OPENING + content + CLOSING)
        self._called = self._called or call is not None
        self._held, self._inside = self._held[at + len(CLOSING) :], False
        return True


class BareCall:
    """An answer that is nothing but one call, as a constraint has made it."""

    def __init__(self) -> None:
        self._text: list[str] = []

    def push(self, text: str) -> list[Piece]:
        self._text.append(text)
        return []

    def finish(self) -> list[Piece]:
        text = "".join(self._text)
        return [call_of(text) or text] if text else []


def call_of(text: str) -> ToolCall | None:
    """The call that `text` spells, None when it spells none."""
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        return None
    return ToolCall(call["name"], json.dumps(arguments, ensure_ascii=False))


def _held_back(text: str) -> int:
    """How many characters at the end of `text` may belong to a mark: white space, then how the mark begins."""
    begun = next((n for n in range(len(OPENING) - 1, 0, -1) if text.endswith(OPENING[:n])), 0)
    before = text[: len(text) - begun]
    return begun + len(before) - len(before.rstrip())
