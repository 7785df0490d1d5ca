"""From a constraint's text to the library's grammar, and everything about it that can be refused without compiling."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher, regex_to_lark

from headrace.engine.core.sampling_plan import ConstraintKind, ConstraintSpec
from headrace.engine.grammar.one_of import with_exclusive_branches
from headrace.engine.grammar.verdict import Refused

if TYPE_CHECKING:  # a type of the library's stub only
    from llguidance._lib import JsonCompileOptions

MOST_SCHEMA_DEPTH = 100  # the library's JSON reader gives up at 128, its own layers included

# Without white space between tokens: a model that may write blanks can write nothing else until max_tokens
# (vllm#38696). `lenient` would ignore keywords that the library does not enforce.
_JSON_OPTIONS: JsonCompileOptions = {
    "whitespace_flexible": False,
    "item_separator": ",",
    "key_separator": ":",
    "lenient": False,
    "coerce_one_of": False,
}


def grammar_of(spec: ConstraintSpec) -> str:
    """The grammar in the library's own form, not yet compiled; Refused when it cannot be.

    Sizes and emptiness were checked when the request came in.
    """
    try:
        "".join(spec.texts).encode()
    except UnicodeEncodeError:  # a lone surrogate
        raise Refused("is not valid Unicode") from None
    match spec.kind:
        case ConstraintKind.CHOICE:
            return LLMatcher.grammar_from_regex("|".join("".join(map(_literal, text)) for text in spec.texts))
        case ConstraintKind.REGEX:
            # \d and \w are ASCII, as in a schema's patterns: nobody who writes \d{3} wants Thai digits.
            return LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(spec.texts[0], 'dw')}/")
        case ConstraintKind.JSON_SCHEMA:
            return _schema_grammar(spec.texts[0])


def _literal(character: str) -> str:
    """The regular expression for one character: every sign of ASCII by its number, since any could mean something."""
    return character if character.isalnum() or not character.isascii() else f"\\x{ord(character):02x}"


def _schema_grammar(text: str) -> str:
    schema = _parsed(text)
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise Refused("must be a JSON object")
    _check_depth(schema)
    schema.pop("x-guidance", None)  # would change the library's options, white space among them
    try:
        return LLMatcher.grammar_from_json_schema(with_exclusive_branches(schema), overrides=_JSON_OPTIONS)
    except ValueError as error:
        raise Refused(str(error)) from None


def _parsed(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_no_json)
    except RecursionError:
        raise Refused(f"is nested deeper than {MOST_SCHEMA_DEPTH} levels") from None
    except ValueError as error:
        raise Refused(f"is not JSON: {error}") from None


def _no_json(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _check_depth(schema: Any) -> None:
    level = [schema]
    for _ in range(MOST_SCHEMA_DEPTH):
        level = [inner for value in level for inner in _inside(value)]
        if not level:
            return
    raise Refused(f"is nested deeper than {MOST_SCHEMA_DEPTH} levels")


def _inside(value: Any) -> list[Any]:
    children = value.values() if isinstance(value, dict) else value
    return [child for child in children if isinstance(child, dict | list)]
