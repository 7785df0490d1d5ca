"""How to sample, in OpenAI's words and those that vLLM's users send in `extra_body`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from headrace.base.errors import InvalidRequest
from headrace.gateway.core.ask import Constraint, ConstraintKind, Sampling
from headrace.gateway.http.fields import U32, UNSUPPORTED, Fields, as_number, kind_of

DEFAULTS = Sampling(temperature=1.0)
"""What OpenAI's clients expect where neither they nor the deployment say anything; gRPC's default is greedy."""

_NAMES = {
    "sampling.logit_bias": "logit_bias",
    "sampling.constraint.regex": "guided_regex",
    "sampling.constraint.choice.texts": "guided_choice",
    "token_ids.ids": "prompt",
}
_SEED_LEAST, _SEED_MOST = -(1 << 63), (1 << 64) - 1


def take_sampling(fields: Fields, names: dict[str, str], *, logprobs: int | None) -> Sampling:
    """The sampling fields; `names` learns what the inner protocol's fields are called in this request."""
    names |= _NAMES
    return Sampling(
        max_tokens=_max_tokens(fields, names),
        temperature=fields.number("temperature"),
        top_k=_top_k(fields),
        top_p=fields.number("top_p"),
        seed=_seed(fields),
        stop=fields.texts("stop"),
        stop_token_ids=fields.ids("stop_token_ids"),
        ignore_eos=fields.flag("ignore_eos"),
        min_p=fields.number("min_p"),
        repetition_penalty=fields.number("repetition_penalty"),
        frequency_penalty=fields.number("frequency_penalty"),
        presence_penalty=fields.number("presence_penalty"),
        logit_bias=_logit_bias(fields),
        min_tokens=fields.integer("min_tokens"),
        n=fields.integer("n"),
        logprobs=logprobs,
        constraint=_constraint(fields, names),
    )


def param_of(field: str, names: Mapping[str, str]) -> str:
    """What the client calls the inner protocol's `field`; a path into a renamed list keeps its index."""
    for inner, outer in names.items():
        if field == inner or field.startswith((f"{inner}.", f"{inner}[")):
            rest = field.removeprefix(inner)
            return outer if inner == "sampling.logit_bias" else outer + rest  # OpenAI's is a map, it has no index
    return field.removeprefix("sampling.")


def _max_tokens(fields: Fields, names: dict[str, str]) -> int | None:
    older, newer = fields.integer("max_tokens"), fields.integer("max_completion_tokens")
    if older is not None and newer is not None and older != newer:
        raise InvalidRequest("max_tokens", f"is {older}, but max_completion_tokens is {newer}; give one of them")
    if newer is not None:
        names["sampling.max_tokens"] = "max_completion_tokens"
    return older if newer is None else newer


def _top_k(fields: Fields) -> int | None:
    given = fields.integer("top_k", least=-1)
    return 0 if given == -1 else given  # vLLM's spelling of "all"


def _seed(fields: Fields) -> int | None:
    given = fields.integer("seed", least=_SEED_LEAST, most=_SEED_MOST)
    return None if given is None else given & _SEED_MOST


def _logit_bias(fields: Fields) -> tuple[tuple[int, float], ...]:
    given = fields.take("logit_bias")
    if given is None:
        return ()
    if not isinstance(given, dict):
        raise InvalidRequest("logit_bias", f"must map token ids to biases, not be {kind_of(given)}")
    biases = []
    for token, bias in given.items():
        if not (token.isascii() and token.isdecimal() and len(token) <= 10 and int(token) <= U32):
            raise InvalidRequest("logit_bias", f"{token!r} is not a token id")
        biases.append((int(token), as_number(bias, f"logit_bias.{token}")))
    return tuple(biases)


def _constraint(fields: Fields, names: dict[str, str]) -> Constraint | None:
    """The one shape that is asked for, whichever way."""
    found: dict[str, Constraint] = {}
    shape = fields.inner("response_format")
    if shape is not None:
        wanted = _response_format(shape, names)
        if wanted is not None:
            found["response_format"] = wanted
    if fields.has("guided_json"):
        names["sampling.constraint.json_schema"] = "guided_json"
        found["guided_json"] = _schema(fields.take("guided_json"), "guided_json")
    if (regex := fields.text("guided_regex")) is not None:
        found["guided_regex"] = Constraint(kind=ConstraintKind.REGEX, texts=(regex,))
    if fields.has("guided_choice"):
        found["guided_choice"] = Constraint(kind=ConstraintKind.CHOICE, texts=fields.texts("guided_choice"))
    if len(found) > 1:
        first, second, *_ = found
        raise InvalidRequest(second, f"cannot be combined with {first}: an answer has one shape")
    return next(iter(found.values()), None)


def _response_format(shape: Fields, names: dict[str, str]) -> Constraint | None:
    kind = shape.text("type")
    match kind:
        case "text":
            found = None
        case "json_object":
            found = Constraint(kind=ConstraintKind.JSON_SCHEMA, texts=('{"type":"object"}',))
        case "json_schema":
            names["sampling.constraint.json_schema"] = "response_format.json_schema.schema"
            inner = shape.inner("json_schema")
            if inner is None or not inner.has("schema"):
                raise InvalidRequest("response_format.json_schema.schema", "must be given")
            inner.ignore("name", "description", "strict")  # every schema is kept to strictly
            found = _schema(inner.take("schema"), inner.path("schema"))
            inner.done()
        case _:
            raise InvalidRequest(
                "response_format.type",
                f"must be text, json_object or json_schema, not {kind!r}",
                reason=UNSUPPORTED,
            )
    shape.done()
    return found


def _schema(given: Any, path: str) -> Constraint:
    if isinstance(given, dict):
        given = json.dumps(given, separators=(",", ":"))
    if not isinstance(given, str):
        raise InvalidRequest(path, f"must be a JSON Schema, not {kind_of(given)}")
    return Constraint(kind=ConstraintKind.JSON_SCHEMA, texts=(given,))
