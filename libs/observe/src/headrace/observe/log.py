"""Logs: one JSON object a line on stderr, for structlog and for everything that uses the standard library's logging.

Events are past-tense snake_case names with facts as fields. What must never be read in a log (prompts, keys,
passwords) is taken out here as well, so that one careless call elsewhere does not publish it.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import MutableMapping
from typing import Any, cast

import structlog
from opentelemetry import trace
from structlog.typing import FilteringBoundLogger, Processor

LEVEL_ENV = "HEADRACE_LOG_LEVEL"

_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}
_FIRST_FIELDS = ("ts", "level", "event", "service", "logger", "trace_id", "span_id")
_WITHHELD_FIELDS = frozenset({"api_key", "authorization", "messages", "password", "prompt", "text", "token_ids"})

# Matched on the finished line, so that nested values, exception texts and reprs are covered too. No boundary before
# "hr_": in JSON a key after a line break reads "\nhr_…". A password may hold "@" and escapes but no white space.
_SECRETS = (
    (re.compile(r"hr_[A-Za-z0-9_-]{8,}"), "hr_***"),
    (re.compile(r"([Bb]earer )[A-Za-z0-9._~+/=-]{8,}"), r"\1***"),
    (re.compile(r'(://[^\s:@/"\\]*:)(?:\\.|[^"\\\s])+@'), r"\1***@"),
)
_SECRET_MARKS = ("hr_", "earer ", "://")

Event = MutableMapping[str, Any]


def configure_logging(service: str) -> None:
    """Send structlog and standard-library logs to stderr as JSON; call once, first thing in `__main__`.

    The level comes from HEADRACE_LOG_LEVEL (default info); a value that is no level ends the process with one line,
    because this runs before anything could catch and explain an exception.
    """
    level = _level(os.environ.get(LEVEL_ENV, "info"))

    def name_service(_logger: object, _method: str, event: Event) -> Event:
        event.setdefault("service", service)
        return event

    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True, key="ts"),
            name_service,
            _name_logger,
            _add_trace,
            _withhold,
            structlog.processors.format_exc_info,
            _render,
            cast(Processor, redact),  # a processor after the renderer sees its text, which the type leaves out
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=_Lines,
        cache_logger_on_first_use=True,
    )
    root = logging.getLogger()
    root.handlers[:] = [_Routed()]
    root.setLevel(level)
    logging.captureWarnings(True)


def get_logger(name: str) -> FilteringBoundLogger:
    """The logger of one module (pass `__name__`); cheap, and may be called before `configure_logging`."""
    return cast(FilteringBoundLogger, structlog.get_logger(name))


def redact(_logger: object, _method: str, line: str) -> str:
    """Blank API keys, bearer tokens and passwords in URLs, wherever in the line they stand."""
    if any(mark in line for mark in _SECRET_MARKS):
        for pattern, blank in _SECRETS:
            line = pattern.sub(blank, line)
    return line


def _level(given: str) -> int:
    try:
        return _LEVELS[given.lower()]
    except KeyError:
        raise SystemExit(f"{LEVEL_ENV}={given!r}: use one of {', '.join(_LEVELS)}") from None


def _name_logger(logger: Any, _method: str, event: Event) -> Event:
    event.setdefault("logger", logger.name)
    return event


def _add_trace(_logger: object, _method: str, event: Event) -> Event:
    context = trace.get_current_span().get_span_context()
    if context.is_valid:
        event.setdefault("trace_id", f"{context.trace_id:032x}")
        event.setdefault("span_id", f"{context.span_id:016x}")
    return event


def _withhold(_logger: object, _method: str, event: Event) -> Event:
    for name in _WITHHELD_FIELDS & event.keys():
        event[name] = "***"
    return event


def _render(_logger: object, _method: str, event: Event) -> str:
    ordered = {name: event.pop(name) for name in _FIRST_FIELDS if name in event}
    ordered.update(event)
    return json.dumps(ordered, default=repr)


class _Lines:
    """Write finished lines to stderr; a stderr whose reader is gone loses lines, it fails no request."""

    def __init__(self, name: str = "") -> None:
        self.name = name

    def msg(self, line: str) -> None:
        try:
            sys.stderr.write(line + "\n")
            sys.stderr.flush()
        except (OSError, ValueError):
            pass

    debug = info = warning = warn = error = critical = exception = fatal = log = msg


class _Routed(logging.Handler):
    """Pass standard-library records through the same processors."""

    def emit(self, record: logging.LogRecord) -> None:
        # Levels between the five standard ones would be unknown to structlog: take the one below.
        level = max((known for known in _LEVELS.values() if known <= record.levelno), default=logging.DEBUG)
        try:
            get_logger(record.name).log(level, record.getMessage(), exc_info=record.exc_info)
        except Exception:  # the contract of logging handlers: a bad record is reported, never raised at the caller
            self.handleError(record)
