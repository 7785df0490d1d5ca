"""A model's own chat template: a program from a stranger, run in a sandbox."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from jinja2 import TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headrace.base.errors import InvalidRequest, StartError


class ChatTemplate:
    """Renders a conversation up to where the assistant speaks next."""

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        """`tokens` are the special tokens that templates name, e.g. `bos_token`. StartError if it does not compile."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        try:
            self._template = environment.from_string(source)
            self.reads_tools = "tools" in meta.find_undeclared_variables(environment.parse(source))
            """Whether it shows the model the tools that it may call."""
        except TemplateError as error:
            raise StartError(f"the model's chat template does not compile: {error}") from error
        self._tokens = dict(tokens)

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        """The prompt's text; InvalidRequest with the template's own words when it refuses the conversation."""
        try:
            return self._template.render(
                **self._tokens, messages=messages, add_generation_prompt=True, tools=tools, documents=None
            )
        except TemplateError as error:
            raise InvalidRequest("messages", f"the model's chat template refuses them: {error}") from error
        except (TypeError, ValueError, LookupError, ArithmeticError, RecursionError, OverflowError) as error:
            # What a stranger's program may raise on a conversation its author did not think of.
            raise InvalidRequest("messages", f"the model's chat template fails on them: {error}") from error


class _GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks answers for training; for serving it is its content."""

    tags = {"generation"}  # noqa: RUF012  # jinja2's own convention

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.datetime.now().astimezone().strftime(layout)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    """Without jinja2's HTML escapes, which are no part of a prompt."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)
