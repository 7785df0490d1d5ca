"""The simulated fleets that routing policies are compared on: sound, repeatable, and won by the default policy."""

from __future__ import annotations

import statistics
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from headrace.router.core.rules import Policy

sys.path.append(str(Path(__file__).parents[1] / "bench"))

from fleet_replica import ReplicaModel
from fleet_shapes import SHAPES, Maker, Shape, chain_of, conversations
from fleet_simulation import DELIVERY_S, Answered, Arrival, Fleet, capacity

REPLICAS = 4
BY_NAME = {shape.name: shape for shape in SHAPES}


def served(shape: Shape, policy: Policy, *, requests: int, load: float = 0.65, seed: int = 1) -> list[Answered]:
    sample = [r for arrival in shape.workload(999, 1.0, 50) for r in chain_of(arrival.request)]
    rate = load * REPLICAS * capacity(shape.model, sample)
    return Fleet(REPLICAS, shape.model, policy, seed=seed).run(shape.workload(seed, rate, requests))


def ttft(answered: list[Answered], q: int) -> float:
    return statistics.quantiles([a.first_token_s for a in answered], n=100)[q - 1]


def hit_ratio(answered: list[Answered]) -> float:
    return sum(a.cached_tokens for a in answered) / sum(a.prompt_tokens for a in answered)


def test_the_same_seed_gives_the_same_answers_and_another_one_others() -> None:
    first, again, other = (
        served(BY_NAME["siblings"], Policy.LEAST_COMPLETION_TIME, requests=60, seed=seed) for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


def test_a_request_alone_waits_for_its_way_and_for_the_steps_of_its_prompt() -> None:
    model = replace(ReplicaModel(), jitter=0.0)
    request = Maker(1, model).request([], list(range(10, 1510)))
    (answered,) = Fleet(1, model, Policy.ROUND_ROBIN, seed=1).run([Arrival(at=1.0, request=request)])
    # 1,500 tokens are two steps of up to 1,024.
    assert answered.first_token_s == pytest.approx(DELIVERY_S + 2 * (0.006 + 0.00015) + 1500 * 0.0001)
    rest_s = (len(request.answer) - 1) * (0.006 + 0.00015)
    assert answered.total_s == pytest.approx(answered.first_token_s + rest_s)


def test_every_turn_of_a_conversation_is_answered_after_the_one_before_and_finds_it_cached() -> None:
    shape = BY_NAME["conversations"]
    (first,) = next(conversations(Maker(1, shape.model)))
    turns = list(chain_of(first))
    answered = Fleet(2, shape.model, Policy.LEAST_COMPLETION_TIME, seed=1).run([Arrival(at=0.0, request=first)])
    assert [a.request_id for a in answered] == [t.id for t in turns]
    for (before, asked), (turn, later) in pairwise(zip(answered, turns, strict=True)):
        assert turn.arrived_at == pytest.approx(before.arrived_at + before.total_s + asked.think_s)
        # All full blocks of what was said before, but for the last token, which ended the answer.
        known = len(asked.prompt) + len(asked.answer) - 1
        assert turn.cached_tokens == known // 16 * 16
        assert later.prompt[: len(asked.prompt)] == asked.prompt


def test_every_policy_is_asked_the_same_at_the_rate_that_was_asked_for() -> None:
    for shape in SHAPES:
        arrivals = shape.workload(3, 20.0, 400)
        count = sum(1 for arrival in arrivals for _ in chain_of(arrival.request))
        assert 400 / 20.0 * 0.6 <= arrivals[-1].at * 400 / count <= 400 / 20.0 * 1.6, shape.name
        again = shape.workload(3, 20.0, 400)
        assert [(a.at, a.request.prompt) for a in arrivals] == [(a.at, a.request.prompt) for a in again]


def test_on_unique_prompts_the_default_policy_is_no_worse_than_least_loaded_and_leaves_no_replica_out() -> None:
    own, other = (
        served(BY_NAME["unique"], policy, requests=300)
        for policy in (Policy.LEAST_COMPLETION_TIME, Policy.LEAST_LOADED)
    )
    for q in (50, 90):
        assert ttft(own, q) <= 1.05 * ttft(other, q)
    mean = len(own) / REPLICAS
    assert all(0.8 * mean <= sum(a.engine == n for a in own) <= 1.2 * mean for n in range(REPLICAS))


def test_where_prefixes_do_not_fit_one_cache_the_default_policy_finds_far_more_of_them() -> None:
    own, other = (
        served(BY_NAME["tenants-2x"], policy, requests=300)
        for policy in (Policy.LEAST_COMPLETION_TIME, Policy.LEAST_LOADED)
    )
    assert hit_ratio(own[100:]) > hit_ratio(other[100:]) + 0.2
    assert ttft(own[100:], 90) < 0.5 * ttft(other[100:], 90)
