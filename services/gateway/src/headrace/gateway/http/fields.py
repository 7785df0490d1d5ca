"""A JSON object read field by field: each has its type, and none is left over."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from headrace.base.errors import InvalidRequest

U32 = (1 << 32) - 1
UNKNOWN_FIELD = "UNKNOWN_FIELD"
UNSUPPORTED = "UNSUPPORTED_VALUE"


class Fields:
    """The fields of one object; `null` counts as absent, as clients send it for what they leave open.

    Whoever has taken all it knows calls `done`: what is left then is refused by name, so that no wish is ignored.
    """

    def __init__(self, members: Mapping[str, Any], path: str = "") -> None:
        self._left = {name: value for name, value in members.items() if value is not None}
        self._path = path

    @classmethod
    def of_body(cls, body: bytes) -> Fields:
        """The request's own object; InvalidRequest when the body is none."""
        try:
            members = json.loads(body, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            why = "is nested too deeply" if isinstance(error, RecursionError) else f"is not JSON: {error}"
            raise InvalidRequest("body", why, reason="MALFORMED_JSON") from None
        if not isinstance(members, dict):
            raise InvalidRequest("body", "must be a JSON object", reason="MALFORMED_JSON")
        return cls(members)

    def path(self, name: str) -> str:
        """Where field `name` stands in the request."""
        return f"{self._path}.{name}" if self._path else name

    def has(self, name: str) -> bool:
        """Whether it was given and not taken yet."""
        return name in self._left

    def take(self, name: str) -> Any:
        """Its value as it stands, None when absent."""
        return self._left.pop(name, None)

    def ignore(self, *names: str) -> None:
        """Take fields that change nothing in the answer."""
        for name in names:
            self._left.pop(name, None)

    def refuse(self, name: str, why: str, *, reason: str = UNSUPPORTED) -> None:
        """Refuse the field if it was given."""
        if self.has(name):
            raise InvalidRequest(self.path(name), why, reason=reason)

    def flag(self, name: str) -> bool:
        """true or false; false when absent."""
        value = self.take(name)
        if value is not None and not isinstance(value, bool):
            raise self._wrong(name, "true or false", value)
        return bool(value)

    def integer(self, name: str, *, least: int = 0, most: int = U32) -> int | None:
        """A whole number that the inner protocol can carry; narrower ranges are checked where they are known."""
        value = self.take(name)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool):
            raise self._wrong(name, "a whole number", value)
        if not least <= value <= most:
            raise InvalidRequest(self.path(name), f"must be from {least} to {most}")
        return value

    def number(self, name: str) -> float | None:
        """Any number."""
        value = self.take(name)
        return None if value is None else as_number(value, self.path(name))

    def text(self, name: str) -> str | None:
        """A string."""
        value = self.take(name)
        if value is not None and not isinstance(value, str):
            raise self._wrong(name, "a string", value)
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of strings, or a single one; empty when absent."""
        value = self.take(name)
        if value is None:
            return ()
        if isinstance(value, str):
            return (value,)
        if not isinstance(value, list):
            raise self._wrong(name, "a string or a list of strings", value)
        for index, entry in enumerate(value):
            if not isinstance(entry, str):
                raise InvalidRequest(f"{self.path(name)}[{index}]", f"must be a string, not {kind_of(entry)}")
        return tuple(value)

    def ids(self, name: str) -> tuple[int, ...]:
        """A list of token ids; empty when absent."""
        value = self.take(name)
        if value is None:
            return ()
        if not isinstance(value, list):
            raise self._wrong(name, "a list of token ids", value)
        return as_ids(value, self.path(name))

    def inner(self, name: str) -> Fields | None:
        """An object's fields."""
        value = self.take(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self._wrong(name, "an object", value)
        return Fields(value, self.path(name))

    def objects(self, name: str) -> list[Fields] | None:
        """A list of objects."""
        value = self.take(name)
        if value is None:
            return None
        if not isinstance(value, list):
            raise self._wrong(name, "a list of objects", value)
        for index, entry in enumerate(value):
            if not isinstance(entry, dict):
                raise InvalidRequest(f"{self.path(name)}[{index}]", f"must be an object, not {kind_of(entry)}")
        return [Fields(entry, f"{self.path(name)}[{index}]") for index, entry in enumerate(value)]

    def done(self) -> None:
        """Refuse what nobody has taken."""
        for name in self._left:
            raise InvalidRequest(self.path(name), "is not known here; leave it out", reason=UNKNOWN_FIELD)

    def _wrong(self, name: str, wanted: str, value: Any) -> InvalidRequest:
        return InvalidRequest(self.path(name), f"must be {wanted}, not {kind_of(value)}")


def as_number(value: Any, path: str) -> float:
    """`value` as a number; whole ones beyond any float are refused, too."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise InvalidRequest(path, f"must be a number, not {kind_of(value)}")
    try:
        return float(value)
    except OverflowError:
        raise InvalidRequest(path, "is too large a number") from None


def as_ids(values: Sequence[Any], path: str) -> tuple[int, ...]:
    """`values` as token ids; whether the vocabulary has them is checked where it is known."""
    for index, value in enumerate(values):
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= U32:
            raise InvalidRequest(f"{path}[{index}]", "must be a token id")
    return tuple(values)


def kind_of(value: Any) -> str:
    """The JSON type of a value, for people."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case list():
            return "a list"
    return "an object"


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")
