"""What every handler knows about the call it serves."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass

from headrace.base.deadline import Deadline

REQUEST_ID = "x-request-id"
"""Metadata key of the request's id, taken over from callers and sent on to callees."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallContext:
    """One incoming call.

    gRPC forwards neither deadline nor ids to calls that a handler makes, so they travel here, by hand.
    """

    request_id: str
    deadline: Deadline
    peer: str
    metadata: Mapping[str, str]


_current: ContextVar[CallContext] = ContextVar("headrace_call")


def current_call() -> CallContext:
    """The call this handler serves; LookupError outside a handler."""
    return _current.get()


def enter_call(call: CallContext) -> None:
    """Make `call` current for the running task (server interceptor only)."""
    _current.set(call)
