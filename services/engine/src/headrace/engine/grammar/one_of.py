"""`oneOf` where `anyOf` means the same.

The library takes `oneOf` only when its branches differ in type. Tagged unions, which most schema generators write,
differ in one required property's constant instead; for them "exactly one branch" and "some branch" are the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

_Schema = dict[str, Any]
_VALUES = frozenset({"const", "enum", "default", "examples"})  # what lies below these is no schema


def with_exclusive_branches(root: _Schema) -> _Schema:
    """`root` with each `oneOf` written as `anyOf` whose branches a tag tells apart; others stay as they are."""
    rewritten: _Schema = _rewritten(root, root)
    return rewritten


def _rewritten(value: Any, root: _Schema) -> Any:
    if isinstance(value, list):
        return [_rewritten(item, root) for item in value]
    if not isinstance(value, dict):
        return value
    tagged = "anyOf" not in value and _tagged(value.get("oneOf"), root)
    return {
        "anyOf" if tagged and key == "oneOf" else key: inner if key in _VALUES else _rewritten(inner, root)
        for key, inner in value.items()
    }


def _tagged(branches: Any, root: _Schema) -> bool:
    if not isinstance(branches, list) or len(branches) < 2:
        return False
    tags = [_tags(_resolved(branch, root)) for branch in branches]
    return any(_disjoint(tag.get(name, frozenset()) for tag in tags) for name in tags[0])


def _resolved(branch: Any, root: _Schema) -> Any:
    """The definition behind a branch that is a reference into the same schema."""
    reference = branch.get("$ref") if isinstance(branch, dict) else None
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return branch
    found: Any = root
    for part in reference[2:].split("/"):
        found = found.get(part) if isinstance(found, dict) else None
    return found


def _tags(branch: Any) -> dict[str, frozenset[str]]:
    """The required properties of an object that have constants, which are texts."""
    if not isinstance(branch, dict) or branch.get("type") != "object":
        return {}
    properties, required = branch.get("properties"), branch.get("required")
    if not isinstance(properties, dict) or not isinstance(required, list):
        return {}
    return {name: _constants(properties[name]) for name in required if isinstance(name, str) and name in properties}


def _constants(schema: Any) -> frozenset[str]:
    if not isinstance(schema, dict):
        return frozenset()
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    # Strings only: 1 and 1.0 are the same constant in JSON Schema.
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        return frozenset()
    return frozenset(values)


def _disjoint(sets: Iterable[frozenset[str]]) -> bool:
    """Whether no two have a member in common, and none is empty, which would mean that it is not known."""
    seen: set[str] = set()
    for members in sets:
        if not members or not seen.isdisjoint(members):
            return False
        seen |= members
    return True
