"""What a grammar can say to a constraint and to a token."""

from __future__ import annotations

from enum import Enum, auto

_LONGEST_REASON = 300


class Verdict(Enum):
    """What a token made of an answer."""

    OPEN = auto()  # more must or may follow
    COMPLETE = auto()  # nothing may follow
    REJECTED = auto()  # the grammar does not allow the token here


class Refused(Exception):
    """The constraint cannot be had; the text says why in one line, for its author.

    Made of a library's message it leaves out the drawings: the line that states the error is kept, if one says so.
    """

    def __init__(self, message: str) -> None:
        text = message.encode(errors="replace").decode()  # a schema's lone surrogates
        lines = [line.strip() for line in text.replace("<non-verbose/>", "").splitlines() if line.strip()]
        stated = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        reason = (stated or lines or ["for no known reason"])[0]
        super().__init__("no answer fits it" if reason.startswith("NoExtension") else reason[:_LONGEST_REASON])
