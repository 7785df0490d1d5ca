"""Placement: who gets the request, and the word about everybody else."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.router.core.ejection import Outcome
from headrace.router.core.eligibility import Verdict, obstacle
from headrace.router.core.estimate import NOTHING_BOOKED, cost_of, standing_of
from headrace.router.core.placement import Placed, Reason, Refused
from headrace.router.core.preference import NEAR_TIE
from headrace.router.core.replica import AttemptKey, EngineId, Phase, Rates, Replica, Unreadable
from headrace.router.core.rules import Rules
from headrace.router.core.view import Reading, Record

RULES = Rules(freshness_s=10.0)


def saturated(replica: Replica) -> bool:
    load = {"waiting": replica.waiting, "running": replica.running, "max_num_seqs": replica.max_num_seqs}
    return RULES.saturation.reached(**load, pressure=replica.pressure)


SLOW = Rates(prefill_tokens_per_s=250.0, itl_s=0.044)


def verdicts(decision) -> dict[str, Verdict]:
    return {c.engine_id: c.verdict for c in decision.considered}


def test_a_stale_replica_is_passed_over_as_stale_though_it_looks_faster(a_replica, a_view, an_attempt, place):
    # The trace of req-1842, bundle sb-27: A and B are compatible, A's record is older than 10 s.
    fleet = a_view((a_replica("A"), 12.0), (a_replica("B", rates=SLOW), 0.3), (a_replica("C", bundle_digest="x"), 0.1))
    decision = place(fleet, an_attempt("req-1842"))
    assert isinstance(decision, Placed)
    assert decision.replica.engine_id == "B"
    assert verdicts(decision) == {"A": Verdict.STALE, "B": Verdict.CHOSEN, "C": Verdict.OTHER_BUNDLE}
    a, b, _ = decision.considered
    assert (a.age_s, a.estimate) == (12.0, None)
    assert b.estimate == decision.estimate


def test_the_least_completion_wins_and_the_others_are_called_slower_with_their_estimates(
    a_replica, a_view, an_attempt, place
):
    fleet = a_view(
        (a_replica("queued", waiting_prefill_tokens=2000), 0.1),
        (a_replica("slow", rates=SLOW), 0.1),
        (a_replica("free"), 0.1),
    )
    decision = place(fleet, an_attempt())
    assert verdicts(decision) == {"queued": Verdict.SLOWER, "slow": Verdict.SLOWER, "free": Verdict.CHOSEN}
    assert all(c.estimate is not None for c in decision.considered)


def test_a_replica_with_unknown_rates_is_not_taken_for_a_fast_one(a_replica, a_view, an_attempt, place):
    decision = place(a_view((a_replica("a", rates=None), 0.1), (a_replica("b", rates=SLOW), 0.1)), an_attempt())
    assert verdicts(decision) == {"a": Verdict.UNMEASURED, "b": Verdict.CHOSEN}


@pytest.mark.parametrize(
    ("fleet", "reason", "counts"),
    [
        ([({}, 11.0), ({}, 99.0)], Reason.ALL_STALE, "stale=2"),
        ([({"phase": Phase.WARMING}, 0.1)], Reason.NONE_READY, "not_ready=1"),
        ([({"rates": None}, 0.1)], Reason.NONE_MEASURED, "unmeasured=1"),
        ([({}, 11.0), ({}, 11.0), ({"phase": Phase.DRAINING}, 0.1)], Reason.NO_REPLICA, "stale=2,not_ready=1"),
        ([({"bundle_digest": "x"}, 0.1), ({}, 11.0)], Reason.ALL_STALE, "other_bundle=1,stale=1"),
        ([({"bundle_digest": "x"}, 0.1)], Reason.NO_REPLICA, "other_bundle=1"),
        ([({"max_model_len": 100}, 0.1), ({}, 11.0)], Reason.ALL_STALE, "context_too_small=1,stale=1"),
        ([], Reason.NO_REPLICA, ""),
    ],
)
def test_a_refusal_names_what_stands_in_the_way_of_the_compatible_replicas(
    a_replica, a_view, an_attempt, place, fleet, reason, counts
):
    sightings = a_view(*((a_replica(f"r{i}", **changes), age_s) for i, (changes, age_s) in enumerate(fleet)))
    decision = place(sightings, an_attempt())
    assert isinstance(decision, Refused)
    assert (decision.reason, decision.counts()) == (reason, counts)


def test_excluding_the_only_replica_is_a_refusal_of_its_own_kind(a_replica, a_view, an_attempt, place):
    decision = place(a_view((a_replica("a"), 0.1)), an_attempt(excluded=frozenset({("a", 1)})))
    assert decision == Refused(reason=Reason.ALL_EXCLUDED, considered=decision.considered)


def test_a_missing_adapter_is_told_apart_from_a_missing_replica(a_replica, a_view, an_attempt, place):
    assert place(a_view((a_replica("a"), 0.1)), an_attempt(adapter="lora-1")).reason is Reason.NO_ADAPTER


def test_a_prompt_that_fits_nowhere_is_told_the_longest_context(a_replica, a_view, an_attempt, place):
    fleet = a_view((a_replica("a", max_model_len=100), 0.1), (a_replica("b", max_model_len=128), 11.0))
    decision = place(fleet, an_attempt())
    assert (decision.reason, decision.context_limit) == (Reason.CONTEXT_EXCEEDED, 128)


def test_an_unreadable_record_is_listed_and_never_chosen(a_view, an_attempt, place):
    broken = Unreadable(engine_id=EngineId("a"), epoch=1, sequence=1, why="not a heartbeat message")
    decision = place(a_view((broken, 0.1)), an_attempt())
    assert (decision.reason, decision.counts()) == (Reason.NO_REPLICA, "unreadable=1")


def test_equal_replicas_share_by_chance(a_replica, a_view, an_attempt, place):
    fleet = a_view(*((a_replica(f"r{i}"), 0.1) for i in range(4)))
    chance = random.Random(7)
    chosen = Counter(place(fleet, an_attempt(), chance=chance.random).replica.engine_id for _ in range(400))
    assert all(70 <= chosen[f"r{i}"] <= 130 for i in range(4)), chosen


def test_within_a_near_tie_the_sooner_first_token_is_taken_and_then_the_emptier_batch(
    a_replica, a_view, an_attempt, place
):
    a_little_faster = Rates(prefill_tokens_per_s=500.0, itl_s=0.0215)
    queued = a_replica("queued", rates=a_little_faster, waiting_prefill_tokens=20)
    busy, quiet = a_replica("busy", running=9), a_replica("quiet", running=2)
    decision = place(a_view((queued, 0.1), (busy, 0.1), (quiet, 0.1)), an_attempt())
    totals = {c.engine_id: c.estimate.total_s for c in decision.considered}
    assert totals["queued"] < totals["quiet"] < totals["queued"] * (1 + NEAR_TIE)
    assert decision.replica.engine_id == "quiet"


@pytest.fixture
def watching(a_router):
    """A router that has read a board with these replicas on it."""

    def build(*replicas, **changes):
        router = a_router(chance=random.Random(1).random, **changes)
        return read(router, *replicas)

    return build


def read(router, *replicas):
    records = tuple(Record(seen=r, age_s=0.1, payload=b"") for r in replicas)
    router.observed(Reading(asked_at=0.0, records=records), 0.0)
    return router


@pytest.mark.parametrize("max_num_seqs", [8, 32, 1024])
def test_eight_siblings_within_one_heartbeat_period_spread_evenly(a_replica, an_attempt, watching, max_num_seqs):
    router = watching(*(a_replica(f"r{i}", max_num_seqs=max_num_seqs) for i in range(4)))
    chosen = Counter(router.place(an_attempt(f"s{i}"), 0.01 * i).replica.engine_id for i in range(8))
    assert sorted(chosen.values()) == [2, 2, 2, 2]


def test_a_burst_of_64_leaves_no_two_idle_replicas_more_than_two_apart(a_replica, an_attempt, watching):
    router = watching(*(a_replica(f"r{i}") for i in range(4)))
    chosen = Counter(router.place(an_attempt(f"s{i}"), 0.0).replica.engine_id for i in range(64))
    assert max(chosen.values()) - min(chosen.values()) <= 2


def test_placing_the_same_attempt_again_does_not_count_it_twice(a_replica, an_attempt, watching):
    router = watching(a_replica("a"))
    estimates = [router.place(an_attempt("r1"), 0.0).estimate for _ in range(5)]
    assert estimates == [estimates[0]] * 5
    assert len(router.bookings) == 1


def test_a_released_booking_no_longer_weighs(a_replica, an_attempt, watching):
    router = watching(a_replica("a"))
    idle = router.place(an_attempt("r1"), 0.0).estimate
    router.ended(AttemptKey("r1", 1), EngineId("a"), 1, Outcome.OK, placed_at=0.0, now=0.0)
    assert router.place(an_attempt("r2"), 0.0).estimate == idle


def test_nothing_is_placed_before_the_board_was_read(an_attempt, a_router):
    router = a_router()
    router.unobserved(0.0)
    assert router.place(an_attempt(), 0.0) == Refused(reason=Reason.NO_VIEW)


REPLICAS = st.fixed_dictionaries(
    {
        "deployment": st.sampled_from(["chat", "chat", "chat", "other"]),
        "phase": st.sampled_from([Phase.READY, Phase.READY, Phase.READY, Phase.WARMING, Phase.DRAINING]),
        "waiting": st.integers(0, 40),
        "waiting_prefill_tokens": st.integers(0, 10_000),
        "running": st.integers(0, 32),
        "free_blocks": st.integers(0, 512),
        "total_blocks": st.just(512),
        "max_model_len": st.sampled_from([64, 512, 8192]),
        "rates": st.none()
        | st.builds(Rates, prefill_tokens_per_s=st.floats(1, 1e5), itl_s=st.floats(1e-4, 1.0, allow_subnormal=False)),
    }
)


# No time limits: on a busy machine they would fail for reasons that are not ours.
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    fleet=st.lists(st.tuples(REPLICAS, st.floats(0, 20)), max_size=8),
    prompt_tokens=st.integers(1, 9000),
    max_tokens=st.integers(1, 9000),
    excluded=st.frozensets(st.sampled_from([("r0", 0), ("r1", 1), ("r2", 9)])),
    seed=st.integers(0, 99),
)
def test_only_eligible_replicas_are_chosen_and_none_is_clearly_better(
    a_replica, a_view, an_attempt, place, fleet, prompt_tokens, max_tokens, excluded, seed
):
    replicas = [(a_replica(f"r{i}", **changes), age_s) for i, (changes, age_s) in enumerate(fleet)]
    attempt = an_attempt(prompt_tokens=prompt_tokens, max_tokens=max_tokens, excluded=excluded)
    decision = place(a_view(*replicas), attempt, chance=random.Random(seed).random)
    eligible = {
        r.engine_id: r for r, age_s in replicas if obstacle(r, age_s, attempt, RULES) is None and not saturated(r)
    }
    assert [c.engine_id for c in decision.considered] == sorted(r.engine_id for r, _ in replicas)
    assert isinstance(decision, Placed) == bool(eligible)
    if isinstance(decision, Placed):
        assert decision.replica.engine_id in eligible
        assert decision.estimate.queue_s >= 0
        costs = [cost_of(r, r.rates, attempt, standing_of(r, r.rates)) for r in eligible.values()]
        least_s = min(cost.at(NOTHING_BOOKED).total_s for cost in costs)
        assert decision.estimate.total_s <= least_s * (1 + NEAR_TIE)
        assert [c.verdict for c in decision.considered].count(Verdict.CHOSEN) == 1
