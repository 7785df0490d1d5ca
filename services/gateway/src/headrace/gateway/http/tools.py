"""Tools that a model may call, and whether it must: from OpenAI's fields to a prompt's tools and an answer's shape."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from enum import Enum
from typing import Any

from headrace.base.errors import InvalidRequest
from headrace.gateway.core.ask import Constraint, ConstraintKind
from headrace.gateway.http.fields import UNSUPPORTED, Fields, kind_of
from headrace.text.tool_calls import BareCall, Finder, MarkedCalls, ToolCall

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_OLD = "is the older way to offer tools; send `tools` and `tool_choice`"


class Calling(Enum):
    """Whether an answer may call tools."""

    NONE = "none"
    AUTO = "auto"
    FORCED = "forced"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """What is offered, each as JSON; `constraint` makes an answer one call, when it must be one."""

    offered: tuple[str, ...] = ()
    calling: Calling = Calling.NONE
    constraint: Constraint | None = None

    def finder(self) -> Finder | None:
        """What tells calls from text in one answer; None when there are none to be found."""
        match self.calling:
            case Calling.AUTO:
                return MarkedCalls()
            case Calling.FORCED:
                return BareCall()
        return None


def take_tools(fields: Fields) -> Tools:
    """The tools of a chat request and how it wants them used."""
    for old in ("functions", "function_call"):
        fields.refuse(old, _OLD)
    entries = fields.objects("tools") or []
    parallel, choice = fields.take("parallel_tool_calls"), fields.take("tool_choice")
    if not entries:
        if choice not in (None, "none"):
            raise InvalidRequest("tool_choice", "needs tools")
        return Tools()
    functions = [_function(entry) for entry in entries]
    offered = tuple(json.dumps({"type": "function", "function": function}) for function in functions)
    if choice == "none":
        return Tools()
    if choice in (None, "auto"):
        if parallel is False:
            raise InvalidRequest(
                "parallel_tool_calls",
                "cannot be false with tool_choice auto: nothing keeps the model to one call",
                reason=UNSUPPORTED,
            )
        return Tools(offered=offered, calling=Calling.AUTO)
    wanted = functions if choice == "required" else [_chosen(choice, functions)]
    return Tools(offered=offered, calling=Calling.FORCED, constraint=_one_call(wanted))


def take_calls(fields: Fields) -> tuple[ToolCall, ...]:
    """The calls that an earlier answer of the conversation made."""
    return tuple(_call(entry) for entry in fields.objects("tool_calls") or [])


def _function(entry: Fields) -> dict[str, Any]:
    if entry.text("type") != "function":
        raise InvalidRequest(entry.path("type"), "must be function", reason=UNSUPPORTED)
    inner = _inner(entry)
    entry.done()
    function: dict[str, Any] = {"name": _name(inner)}
    description, parameters = inner.text("description"), inner.take("parameters")
    if description is not None:
        function["description"] = description
    if parameters is not None and not isinstance(parameters, dict):
        raise InvalidRequest(inner.path("parameters"), f"must be a JSON Schema, not {kind_of(parameters)}")
    function["parameters"] = parameters or {"type": "object", "properties": {}}
    inner.ignore("strict")  # a forced call keeps to its schema in any case
    inner.done()
    return function


def _call(entry: Fields) -> ToolCall:
    entry.ignore("id", "type", "index")  # the template tells calls and their results apart by their order
    inner = _inner(entry)
    name, arguments = _name(inner), inner.text("arguments") or "{}"
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise InvalidRequest(inner.path("arguments"), "must be a JSON object, as a string")
    return ToolCall(name, arguments)


def _inner(entry: Fields) -> Fields:
    inner = entry.inner("function")
    if inner is None:
        raise InvalidRequest(entry.path("function"), "must be given")
    return inner


def _name(inner: Fields) -> str:
    name = inner.text("name") or ""
    if not _NAME.fullmatch(name):
        raise InvalidRequest(inner.path("name"), "must be 1 to 64 letters, digits, underscores or dashes")
    return name


def _chosen(choice: Any, functions: list[dict[str, Any]]) -> dict[str, Any]:
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    for known in functions:
        if known["name"] == name:
            return known
    raise InvalidRequest("tool_choice", "must be none, auto, required, or a function that is among the tools")


def _one_call(functions: list[dict[str, Any]]) -> Constraint:
    """One JSON object that calls one of `functions`. What their schemas define moves to where references look."""
    definitions: dict[str, Any] = {}
    calls = []
    for function in functions:
        arguments = dict(function["parameters"])
        for place in ("$defs", "definitions"):
            for name, definition in arguments.pop(place, {}).items():
                if definitions.setdefault(place, {}).setdefault(name, definition) != definition:
                    raise InvalidRequest("tools", f"define {name!r} in two ways", reason=UNSUPPORTED)
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": function["name"]}, "arguments": arguments},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    schema = json.dumps({"anyOf": calls} | definitions, separators=(",", ":"))
    return Constraint(kind=ConstraintKind.JSON_SCHEMA, texts=(schema,))
