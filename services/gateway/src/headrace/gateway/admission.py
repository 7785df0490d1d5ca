"""The way of one request: who asks, what for, its tokens, its answer, its account."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

from opentelemetry import trace

from headrace.api.control.v1 import intent_pb2
from headrace.base.deadline import Deadline
from headrace.base.errors import HeadraceError, InvalidRequest
from headrace.gateway import metrics
from headrace.gateway.adapters.catalog import Catalog
from headrace.gateway.answer import Answer, AnswerSettings, Event
from headrace.gateway.core.ask import Ask, ChatPrompt, Prompt
from headrace.gateway.core.budget import RetryBudget
from headrace.gateway.core.progress import Progress
from headrace.gateway.core.validation import check_ask, check_length, check_model, granted_max_tokens, prompt_field
from headrace.gateway.fleet import Fleet, Order
from headrace.gateway.model import Model
from headrace.observe.tracing import get_tracer
from headrace.rpc.context import CallContext

Request = TypeVar("Request")

_REPLY_RESERVE_S = 0.01
"""Kept back from the client's deadline, so that the error itself still arrives in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """What all requests share, and the one function that takes each from its arrival to its end."""

    catalog: Catalog
    fleet: Fleet
    budget: RetryBudget
    settings: AnswerSettings

    async def answer(
        self, method: str, request: Request, parse: Callable[[Request], Ask], call: CallContext
    ) -> AsyncGenerator[Event, None]:
        """Serve one request: started, deltas, finished; raises the error that the client is to hear."""
        admitted_at = time.monotonic()
        with _counted(method) as outcome:
            key = self.catalog.authenticate(call.metadata)
            ask = parse(request)
            deadline = Deadline(call.deadline.at - _REPLY_RESERVE_S)
            model, prompt_ids = await self._tokenized(ask, key, deadline)
            order = _order(ask, model, len(prompt_ids), call, deadline)
            progress = Progress(
                prompt_ids=prompt_ids,
                max_tokens=order.max_tokens,
                admitted_at=admitted_at,
                place_wait_left_s=self.settings.place_wait_s,
            )
            self.budget.note_request(admitted_at)
            answer = Answer(
                order,
                progress,
                model,
                traceparent=call.traceparent,
                fleet=self.fleet,
                budget=self.budget,
                settings=self.settings,
            )
            async with aclosing(answer.events()) as events:
                async for event in events:
                    yield event
            outcome.reason = answer.finish_reason.value

    async def tokenize(self, model: Model, prompt: Prompt) -> tuple[int, ...]:
        """The prompt's token ids, made in a thread: a long prompt takes tens of milliseconds."""
        with get_tracer().start_as_current_span("gateway.tokenize") as span:
            try:
                ids = await asyncio.to_thread(model.encode, prompt)
            except InvalidRequest as error:
                if isinstance(prompt, ChatPrompt):
                    field = (error.field or "messages").replace("messages", prompt.field, 1)
                    raise InvalidRequest(field, error.why, reason=error.reason) from None
                raise
            span.set_attribute("gen_ai.usage.input_tokens", len(ids))
            return ids

    async def _tokenized(self, ask: Ask, key: intent_pb2.ApiKey, deadline: Deadline) -> tuple[Model, tuple[int, ...]]:
        check_model(ask.model)
        model = await self.catalog.model(ask.model, key, deadline)
        check_ask(ask, model.limits)
        ids = await self.tokenize(model, ask.prompt)
        check_length(prompt_field(ask.prompt), len(ids), model.limits)
        metrics.TOKENS_IN.inc(len(ids))
        span = trace.get_current_span()
        span.set_attribute("gen_ai.request.model", ask.model)
        span.set_attribute("gen_ai.usage.input_tokens", len(ids))
        return model, ids


def _order(ask: Ask, model: Model, prompt_tokens: int, call: CallContext, deadline: Deadline) -> Order:
    """What to ask of an engine: the client's sampling with every default filled in."""
    wanted = ask.sampling.over(model.defaults)
    sampling = replace(
        wanted,
        temperature=wanted.temperature or 0.0,
        top_k=wanted.top_k or 0,
        top_p=1.0 if wanted.top_p is None else wanted.top_p,
    )
    return Order(
        request_id=call.request_id,
        deployment=ask.model,
        bundle_digest=model.bundle_digest,
        prompt_field=prompt_field(ask.prompt),
        sampling=sampling,
        seed=secrets.randbits(63) if wanted.seed is None else wanted.seed,
        max_tokens=granted_max_tokens(wanted.max_tokens, prompt_tokens, model.limits),
        deadline=deadline,
    )


@dataclass(slots=True)
class _Outcome:
    """How a request ended, as its metric names it."""

    reason: str = ""


@contextmanager
def _counted(method: str) -> Iterator[_Outcome]:
    """Count one request, in flight and by its end, whatever that is."""
    outcome = _Outcome()
    code = "CANCELLED"
    metrics.IN_FLIGHT.inc()
    try:
        yield outcome
        code = "OK"
    except HeadraceError as error:
        code, outcome.reason = error.code.value, error.reason
        raise
    except Exception:
        code, outcome.reason = "INTERNAL", "INTERNAL"
        raise
    finally:
        metrics.IN_FLIGHT.dec()
        metrics.REQUESTS.labels(method, code, outcome.reason).inc()
