"""The HTTP application: paths, what is said about health, and the guard around every request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import structlog
from opentelemetry.trace import SpanKind, StatusCode

from headrace.base.errors import HeadraceError, InternalError, NotFound, Unavailable
from headrace.gateway import metrics
from headrace.gateway.admission import Admission
from headrace.gateway.core.principal import Principal
from headrace.gateway.http.answering import CHAT, COMPLETION, Exchange, Kind
from headrace.gateway.http.books import Books
from headrace.gateway.http.errors import HttpError, failure_of
from headrace.gateway.http.incoming import (
    Disconnected,
    Receive,
    Scope,
    body_of,
    call_of,
    headers_of,
    request_id_of,
    until_gone,
)
from headrace.gateway.http.reply import Reply, Send
from headrace.gateway.http.spelling import Json
from headrace.observe.tracing import context_of, get_tracer

log = structlog.get_logger(__name__)

_MODELS = "/v1/models"
_MODEL = "/v1/models/"
_ASKED = {"/v1/chat/completions": CHAT, "/v1/completions": COMPLETION}
_USAGE, _AUDIT = "/v1/usage", "/v1/audit"
_CLIENT_LEFT = 499
_CREATED = 0
"""Deployments have no date of their own; OpenAI's clients require the field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of one request: its body's bytes, the seconds that body may take, the seconds all of it may take."""

    body_bytes: int
    body_within_s: float
    deadline_s: float


class HttpApp:
    """An ASGI application over one admission. While `refusing`, new requests are told to come back."""

    def __init__(self, admission: Admission, books: Books, limits: Limits) -> None:
        self._admission = admission
        self._books = books
        self._limits = limits
        self.in_flight = 0
        self.refusing = False
        self.draining = False
        self._ending: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def cut(self) -> None:
        """End what still runs: each client is told, in its stream if that has begun."""
        if not self._ending.done():
            self._ending.set_result(None)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; whatever happens, it is answered, counted and forgotten."""
        headers = headers_of(scope)
        request = _Request(scope=scope, receive=receive, headers=headers, request_id=request_id_of(headers))
        reply = Reply(send, request.request_id)
        route, serve = self._route(scope["path"])
        self.in_flight += 1
        began = time.perf_counter()
        try:
            await self._guarded(serve, request, reply)
        finally:
            self.in_flight -= 1
            metrics.HTTP_SECONDS.labels(route).observe(time.perf_counter() - began)
            metrics.HTTP_RESPONSES.labels(route, str(reply.outcome or _CLIENT_LEFT)).inc()

    def _route(self, path: str) -> tuple[str, Callable[[_Request, Reply], Awaitable[None]]]:
        if path in _ASKED:
            return path, lambda request, reply: self._ask(_ASKED[path], request, reply)
        if path == _USAGE:
            return path, lambda request, reply: self._read(self._books.usage, request, reply)
        if path == _AUDIT:
            return path, lambda request, reply: self._read(self._books.audit, request, reply)
        if path == "/healthz":
            return path, self._healthz
        if path == "/readyz":
            return path, self._readyz
        if path == _MODELS or path.startswith(_MODEL):
            return _MODELS, self._models
        return "other", self._unknown

    async def _guarded(
        self, serve: Callable[[_Request, Reply], Awaitable[None]], request: _Request, reply: Reply
    ) -> None:
        """Guard 1 of 3, as around gRPC's handlers: a bug is logged with its trace and told as an id."""
        try:
            await serve(request, reply)
        except Disconnected:
            reply.outcome = _CLIENT_LEFT
        except HeadraceError as error:
            await reply.fail(failure_of(error, request.names()))
        except Exception as error:
            log.error("handler_failed", service="gateway", request=request.request_id, exc_info=error)
            failure = InternalError(f"internal error; quote request id {request.request_id}")
            await reply.fail(failure_of(failure, {}))

    async def _ask(self, kind: Kind, request: _Request, reply: Reply) -> None:
        request.require("POST")
        self._require_serving()
        limits = self._limits
        body = await body_of(request.receive, request.headers, most=limits.body_bytes, within_s=limits.body_within_s)
        with get_tracer().start_as_current_span(
            f"gateway.{kind.name}",
            context=context_of(request.headers.get("traceparent", "")),
            kind=SpanKind.SERVER,
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            span.set_attribute("headrace.request_id", request.request_id)
            call = call_of(request.scope, request.headers, request.request_id, limits.deadline_s)
            exchange = Exchange(kind=kind, admission=self._admission, call=call)
            request.exchange = exchange
            try:
                await self._attended(exchange.run(body, reply), request.receive)
            except HeadraceError as error:
                span.set_attribute("error.type", error.reason)
                span.set_status(StatusCode.ERROR, error.reason)
                raise

    async def _attended(self, work: Coroutine[Any, Any, None], receive: Receive) -> None:
        """Run `work` to its end, or until the client has left or this server ends: then it is cancelled at once."""
        working = asyncio.ensure_future(work)
        leaving = asyncio.ensure_future(until_gone(receive))
        try:
            await asyncio.wait({working, leaving, self._ending}, return_when=asyncio.FIRST_COMPLETED)
            finished, left = working.done(), leaving.done()
        finally:
            working.cancel()
            leaving.cancel()
            await asyncio.wait({working, leaving})
        if finished:
            working.result()
            return
        if not working.cancelled():
            working.exception()  # it failed while it was being cancelled, and is not what ended this
        if left:
            raise Disconnected
        raise Unavailable("this server is stopping", reason="DRAINING", retry_after_s=0.5)

    async def _models(self, request: _Request, reply: Reply) -> None:
        request.require("GET", "HEAD")
        self._require_serving()
        catalog = self._admission.catalog
        principal = await self._admission.identity.authenticate(request.headers)
        found = {name: _model(name, model.limits.max_model_len) for name, model in catalog.permitted(principal)}
        path = request.scope["path"]
        if path == _MODELS:
            await reply.json(200, {"object": "list", "data": list(found.values())})
            return
        name = path.removeprefix(_MODEL)
        if name not in found:
            raise NotFound(f"there is no model {name!r} for this API key; {_MODELS} lists those there are")
        await reply.json(200, found[name])

    async def _read(self, read: Callable[[Principal, str], Awaitable[Json]], request: _Request, reply: Reply) -> None:
        request.require("GET", "HEAD")
        self._require_serving()
        principal = await self._admission.identity.authenticate(request.headers)
        await reply.json(200, await read(principal, request.scope["query_string"].decode("latin-1")))

    async def _healthz(self, request: _Request, reply: Reply) -> None:
        request.require("GET", "HEAD")
        await reply.json(200, {"status": "alive"})

    async def _readyz(self, request: _Request, reply: Reply) -> None:
        request.require("GET", "HEAD")
        status = "draining" if self.draining else "ready" if self._has_read() else "starting"
        await reply.json(200 if status == "ready" else 503, {"status": status})

    async def _unknown(self, request: _Request, reply: Reply) -> None:
        path = request.scope["path"]
        raise HttpError(404, f"there is nothing at {path!r}", reason="UNKNOWN_URL")

    def _require_serving(self) -> None:
        if self.refusing:
            raise Unavailable("this server is draining", reason="DRAINING", retry_after_s=0.5)
        if not self._has_read():
            raise Unavailable("this server is starting", reason="STARTING", retry_after_s=0.5)

    def _has_read(self) -> bool:
        """Whether keys, tenants, deployments and bundles were read once: before, everybody would be a stranger."""
        known = (self._admission.identity, self._admission.tenants, self._admission.catalog)
        return all(part.ready.is_set() for part in known)


@dataclass(slots=True, kw_only=True)
class _Request:
    """One request on its way through the application."""

    scope: Scope
    receive: Receive
    headers: dict[str, str]
    request_id: str
    exchange: Exchange | None = None

    def names(self) -> dict[str, str]:
        """What its fields are called, as far as it has been read."""
        return dict(self.exchange.names) if self.exchange else {}

    def require(self, *methods: str) -> None:
        """Refuse other methods."""
        if self.scope["method"] not in methods:
            raise HttpError(
                405,
                f"{self.scope['method']} is not allowed here; use {methods[0]}",
                reason="METHOD_NOT_ALLOWED",
                headers={"allow": ", ".join(methods)},
            )


def _model(name: str, max_model_len: int) -> Json:
    return {
        "id": name,
        "object": "model",
        "created": _CREATED,
        "owned_by": "headrace",
        "max_model_len": max_model_len,
    }
