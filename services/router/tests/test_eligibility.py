"""Eligibility: one reason per replica, lasting reasons first."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.router.core.eligibility import Verdict, obstacle
from headrace.router.core.replica import EngineId, Phase, Unreadable
from headrace.router.core.rules import Policy, Rules

RULES = Rules(freshness_s=10.0)


def test_an_idle_ready_fresh_measured_replica_of_the_bundle_has_no_obstacle(a_replica, an_attempt):
    assert obstacle(a_replica(), 0.2, an_attempt(), RULES) is None


@pytest.mark.parametrize(
    ("replica", "attempt", "verdict"),
    [
        ({"deployment": "other"}, {}, Verdict.OTHER_BUNDLE),
        ({"bundle_digest": "sb-26"}, {}, Verdict.OTHER_BUNDLE),
        ({}, {"adapter": "lora-1"}, Verdict.NO_ADAPTER),
        ({"max_model_len": 140}, {}, Verdict.CONTEXT_TOO_SMALL),
        ({"total_blocks": 8, "free_blocks": 8}, {}, Verdict.CONTEXT_TOO_SMALL),
        ({}, {"excluded": frozenset({("a", 1)})}, Verdict.EXCLUDED),
        ({}, {"excluded": frozenset({("a", 0)})}, Verdict.EXCLUDED),
        ({"phase": Phase.WARMING}, {}, Verdict.NOT_READY),
        ({"phase": Phase.DRAINING}, {}, Verdict.NOT_READY),
        ({"rates": None}, {}, Verdict.UNMEASURED),
    ],
)
def test_each_obstacle_has_its_own_verdict(
    a_replica, an_attempt, replica: dict[str, Any], attempt: dict[str, Any], verdict: Verdict
):
    assert obstacle(a_replica(**replica), 0.2, an_attempt(**attempt), RULES) is verdict


def test_a_loaded_adapter_is_no_obstacle(a_replica, an_attempt):
    assert obstacle(a_replica(adapters=frozenset({"lora-1"})), 0.2, an_attempt(adapter="lora-1"), RULES) is None


def test_a_heartbeat_exactly_as_old_as_the_bound_is_fresh_and_an_older_one_stale(a_replica, an_attempt):
    assert obstacle(a_replica(), 10.0, an_attempt(), RULES) is None
    assert obstacle(a_replica(), 10.001, an_attempt(), RULES) is Verdict.STALE


def test_a_prompt_that_leaves_room_for_one_token_fits_whatever_max_tokens_asks_for(a_replica, an_attempt):
    assert obstacle(a_replica(max_model_len=141), 0.2, an_attempt(max_tokens=80), RULES) is None


def test_a_stale_record_is_stale_whatever_phase_it_last_told(a_replica, an_attempt):
    assert obstacle(a_replica(phase=Phase.WARMING), 11.0, an_attempt(), RULES) is Verdict.STALE


def test_a_prompt_that_does_not_fit_is_told_so_even_while_the_replica_is_stale(a_replica, an_attempt):
    assert obstacle(a_replica(max_model_len=100), 11.0, an_attempt(), RULES) is Verdict.CONTEXT_TOO_SMALL


def test_a_warming_replica_that_does_not_know_its_sizes_yet_is_not_ready_rather_than_too_small(a_replica, an_attempt):
    warming = a_replica(phase=Phase.WARMING, max_model_len=0, total_blocks=0, free_blocks=0, block_size=0)
    assert obstacle(warming, 0.2, an_attempt(), RULES) is Verdict.NOT_READY


def test_an_unreadable_record_is_never_eligible(an_attempt):
    record = Unreadable(engine_id=EngineId("a"), epoch=1, sequence=1, why="not a heartbeat message")
    assert obstacle(record, 0.0, an_attempt(), RULES) is Verdict.UNREADABLE


def test_excluding_one_life_of_a_replica_does_not_exclude_the_next(a_replica, an_attempt):
    assert obstacle(a_replica(epoch=2), 0.2, an_attempt(excluded=frozenset({("a", 1)})), RULES) is None


def test_a_deployment_is_closed_to_tenants_it_does_not_name_and_open_to_all_when_it_names_none(a_replica, an_attempt):
    closed = Rules(freshness_s=10.0, tenants=frozenset({"acme"}))
    assert obstacle(a_replica(), 0.2, an_attempt(tenant="other"), closed) is Verdict.TENANT_NOT_PERMITTED
    assert obstacle(a_replica(), 0.2, an_attempt(tenant="acme"), closed) is None
    assert obstacle(a_replica(), 0.2, an_attempt(tenant="other"), RULES) is None


def test_an_ejected_replica_is_named_so(a_replica, an_attempt):
    assert obstacle(a_replica(), 0.2, an_attempt(), RULES, {"a"}) is Verdict.EJECTED


def test_unknown_rates_are_an_obstacle_only_where_the_policy_reads_them(a_replica, an_attempt):
    by_load = Rules(freshness_s=10.0, policy=Policy.LEAST_LOADED)
    assert obstacle(a_replica(rates=None), 0.2, an_attempt(), by_load) is None
