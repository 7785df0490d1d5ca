"""What to ask of an engine: the client's sampling with every default filled in."""

from __future__ import annotations

import secrets
from dataclasses import replace

from headrace.base.deadline import Deadline
from headrace.gateway.core.ask import Ask, ChatPrompt, Prompt, Sampling, TextPrompt, TokenPrompt
from headrace.gateway.core.fair_queue import Ticket
from headrace.gateway.core.policy import PolicyRequest
from headrace.gateway.core.principal import Principal
from headrace.gateway.core.sampling_check import check_sampling
from headrace.gateway.core.terms import TenantTerms
from headrace.gateway.core.validation import granted_max_tokens
from headrace.gateway.model import Model

_TOKEN_BYTES = 36
"""What one token of a waiting prompt holds in memory: a Python number and its place in a tuple."""


def wanted_sampling(ask: Ask, model: Model) -> Sampling:
    """Given values over the deployment's defaults; InvalidRequest when together they contradict each other."""
    wanted = ask.sampling.over(model.defaults).over(ask.fallback)
    check_sampling(wanted, model.limits)
    return wanted


def longest_answer(wanted: Sampling, prompt_tokens: int, model: Model) -> int:
    """Most tokens that each answer may have; InvalidRequest when the context has no room for them."""
    return granted_max_tokens(wanted.max_tokens, prompt_tokens, model.limits, min_tokens=wanted.min_tokens or 0)


def filled(wanted: Sampling, max_tokens: int) -> Sampling:
    """`wanted` with every default that an engine must be told."""
    return replace(
        wanted,
        temperature=wanted.temperature or 0.0,
        top_k=wanted.top_k or 0,
        top_p=1.0 if wanted.top_p is None else wanted.top_p,
        min_tokens=None if wanted.min_tokens is None else min(wanted.min_tokens, max_tokens),
    )


def seed_of(wanted: Sampling) -> int:
    """The client's seed, or a fresh one."""
    return secrets.randbits(63) if wanted.seed is None else wanted.seed


def policy_request(
    request_id: str, ask: Ask, wanted: Sampling, principal: Principal, terms: TenantTerms, model: Model, max_tokens: int
) -> PolicyRequest:
    """What the policy filters are to see."""
    return PolicyRequest(
        request_id=request_id,
        terms=terms,
        credential=principal.credential,
        deployment=ask.model,
        texts=_texts(ask.prompt, model),
        max_tokens=max_tokens,
        asked_max_tokens=ask.sampling.max_tokens,
        n=wanted.n or 1,
    )


def ticket_for(
    ask: Ask,
    principal: Principal,
    terms: TenantTerms,
    prompt_tokens: int,
    deadline: Deadline,
    *,
    least_s: float,
    sequences: int,
) -> Ticket:
    """The request's place in the fair queue."""
    return Ticket(
        tenant=principal.tenant,
        priority=principal.granted(ask.priority),
        deadline_at=deadline.at,
        prompt_tokens=prompt_tokens,
        prompt_bytes=_TOKEN_BYTES * prompt_tokens,
        weight=terms.weight,
        least_s=least_s,
        sequences=sequences,
    )


def _texts(prompt: Prompt, model: Model) -> tuple[str, ...]:
    match prompt:
        case TextPrompt():
            return (prompt.text,)
        case TokenPrompt():
            return (model.tokenizer.decode(list(prompt.ids)),)
        case ChatPrompt():
            return tuple(message.content for message in prompt.messages)
