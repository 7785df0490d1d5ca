"""The way of one request: who asks, what for, its tokens, its answer, its account."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import TypeVar

from opentelemetry import trace

from headrace.api.common.v1 import answer_pb2
from headrace.base.deadline import Deadline
from headrace.base.errors import HeadraceError, InvalidRequest
from headrace.gateway import metrics
from headrace.gateway.adapters.catalog import Catalog
from headrace.gateway.answer import Answer, Event, Means
from headrace.gateway.core.ask import Ask, ChatPrompt, Prompt, TextPrompt, TokenPrompt
from headrace.gateway.core.principal import Principal
from headrace.gateway.core.progress import Progress, Trail
from headrace.gateway.core.validation import check_ask, check_length, check_model, prompt_field
from headrace.gateway.fleet import Order
from headrace.gateway.identity.identity import Identity
from headrace.gateway.identity.tenants import Tenants
from headrace.gateway.ledger import Ledger
from headrace.gateway.model import Model
from headrace.gateway.ordering import filled, longest_answer, policy_request, seed_of, ticket_for, wanted_sampling
from headrace.gateway.policies import Policies
from headrace.gateway.queue import RequestQueues
from headrace.gateway.quota import Quotas
from headrace.gateway.usage import Usage
from headrace.observe.tracing import current_span, current_traceparent
from headrace.rpc.context import CallContext

Request = TypeVar("Request")

_REPLY_RESERVE_S = 0.01
"""Kept back from the client's deadline, so that the error itself still arrives in time."""

_SHORT_CHARS = 1000
"""Up to here a text takes 0.2 ms to tokenize, less than a thread's turn beside a busy model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """What all requests share, and the one function that takes each from its arrival to its end."""

    identity: Identity
    catalog: Catalog
    tenants: Tenants
    policies: Policies
    quotas: Quotas
    queues: RequestQueues
    ledger: Ledger
    means: Means

    async def answer(
        self, method: str, request: Request, parse: Callable[[Request], Ask], call: CallContext
    ) -> AsyncGenerator[Event, None]:
        """Serve one request: started, deltas, finished; raises the error that the client is to hear."""
        admitted_at = time.monotonic()
        with _counted(method) as outcome:
            order, prompt_ids, usage = await self._admitted(request, parse, call)
            with usage.request():
                answer = self._answer(order, prompt_ids, admitted_at, call)
                async with aclosing(answer.events()) as events:
                    async for event in events:
                        if isinstance(event, answer_pb2.AnswerFinished):
                            usage.answered(event.usage.completion_tokens)
                        yield event
            outcome.reason = answer.finish_reason.value

    async def _admitted(
        self, request: Request, parse: Callable[[Request], Ask], call: CallContext
    ) -> tuple[Order, tuple[int, ...], Usage]:
        """Who asks, whether that may be asked, and its share of the tenant's limits; nothing waits after that."""
        principal = await self.identity.authenticate(call.metadata)
        principal.require_user()
        terms = self.tenants.terms(principal.tenant)
        ask = parse(request)
        deadline = Deadline(call.deadline.at - _REPLY_RESERVE_S)
        model, prompt_ids = await self._tokenized(ask, principal, deadline)
        wanted = wanted_sampling(ask, model)
        max_tokens = longest_answer(wanted, len(prompt_ids), model)
        judged = policy_request(call.request_id, ask, wanted, principal, terms, model, max_tokens)
        max_tokens = await self.policies.judged(judged, deadline)
        tokens = len(prompt_ids) + max_tokens * (wanted.n or 1)
        reservation = await self.quotas.reserve(terms, call.request_id, tokens)
        least_s = self.means.settings.least_time_s
        ticket = ticket_for(ask, principal, terms, len(prompt_ids), deadline, least_s=least_s, sequences=wanted.n or 1)
        queue = self.queues.of(ask.model)
        account = self.ledger.open(
            request_id=call.request_id,
            tenant=principal.tenant,
            credential=principal.credential,
            model=ask.model,
            bundle_digest=model.bundle_digest,
            admitted_unix_ns=time.time_ns(),
        )
        usage = Usage(
            account=account, reservation=reservation, queue=queue, ticket=ticket, prompt_tokens=len(prompt_ids)
        )
        order = Order(
            request_id=call.request_id,
            deployment=ask.model,
            model=model,
            prompt_field=prompt_field(ask.prompt),
            tenant=principal.tenant,
            sampling=filled(wanted, max_tokens),
            seed=seed_of(wanted),
            max_tokens=max_tokens,
            deadline=deadline,
            queue=queue,
            ticket=ticket,
            tally=usage,
        )
        return order, prompt_ids, usage

    def _answer(self, order: Order, prompt_ids: tuple[int, ...], admitted_at: float, call: CallContext) -> Answer:
        trail = Trail()
        answers = [
            Progress(
                prompt_ids=prompt_ids,
                max_tokens=order.max_tokens,
                admitted_at=admitted_at,
                index=index,
                place_wait_left_s=self.means.settings.place_wait_s,
                trail=trail,
            )
            for index in range(order.sampling.n or 1)
        ]
        self.means.budget.note_request(admitted_at)
        return Answer(order, answers, order.model, self.means, traceparent=current_traceparent())

    async def tokenize(self, model: Model, prompt: Prompt) -> tuple[int, ...]:
        """The prompt's token ids, made in a thread unless it is short: a long prompt takes tens of milliseconds."""
        with current_span("gateway.tokenize") as span:
            try:
                if isinstance(prompt, TokenPrompt):
                    ids = prompt.ids
                elif isinstance(prompt, TextPrompt) and len(prompt.text) <= _SHORT_CHARS:
                    ids = model.encode(prompt)
                else:
                    ids = await asyncio.to_thread(model.encode, prompt)
            except InvalidRequest as error:
                if isinstance(prompt, ChatPrompt):
                    field = (error.field or "messages").replace("messages", prompt.field, 1)
                    raise InvalidRequest(field, error.why, reason=error.reason) from None
                raise
            span.set_attribute("gen_ai.usage.input_tokens", len(ids))
            return ids

    async def _tokenized(self, ask: Ask, principal: Principal, deadline: Deadline) -> tuple[Model, tuple[int, ...]]:
        check_model(ask.model)
        model = await self.catalog.model(ask.model, principal, deadline)
        check_ask(ask, model.limits)
        ids = await self.tokenize(model, ask.prompt)
        check_length(prompt_field(ask.prompt), len(ids), model.limits)
        metrics.TOKENS_IN.inc(len(ids))
        span = trace.get_current_span()
        span.set_attribute("gen_ai.request.model", ask.model)
        span.set_attribute("gen_ai.usage.input_tokens", len(ids))
        return model, ids


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
