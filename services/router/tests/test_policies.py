"""Preference beyond the estimate's arithmetic: caches, siblings, saturation, slow start, the other policies."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from headrace.base.saturation import Saturation
from headrace.router.core.ejection import Outcome
from headrace.router.core.eligibility import Verdict
from headrace.router.core.placement import Placed, Reason, Refused
from headrace.router.core.prefix_index import PrefixIndex
from headrace.router.core.replica import Attempt, AttemptKey, EngineId, Phase, Rates
from headrace.router.core.rules import Policy, Rules
from headrace.router.core.view import Reading, Record
from headrace.router.metrics import saturation

RATES = Rates(prefill_tokens_per_s=1000 / 0.18, itl_s=0.001)


def chain(name: str, blocks: int) -> list[bytes]:
    chance = random.Random(name)
    return [chance.randbytes(16) for _ in range(blocks)]


def reading(*replicas, at: float = 0.0) -> Reading:
    return Reading(asked_at=at, records=tuple(Record(seen=r, age_s=0.1, payload=b"") for r in replicas))


def cached(*engine_ids: str, hashes=(), epoch: int = 1) -> PrefixIndex:
    """An index whose engines have told what they have: all of them `hashes`."""
    index = PrefixIndex(100_000)
    for engine_id in engine_ids:
        index.begin(EngineId(engine_id), epoch)
        index.snapshot(EngineId(engine_id), epoch, list(hashes), 1)
    return index


def asking(an_attempt, hashes, name: str = "r", **changes) -> Attempt:
    return an_attempt(name, hashes=hashes, block_size=16, **changes)


def test_affinity_yields_to_a_queue_that_costs_more_than_the_prefix_saves(a_router, a_replica, an_attempt):
    # 1,800 of the prompt's tokens are cached at A behind 450 ms of queue; B has none of them behind 80 ms. At 0.18 ms
    # a token they are worth 324 ms, less than the 370 ms of waiting: B. 80 ms of queue less and it is A.
    prompt = chain("p", 113)  # 1,808 tokens

    def place(queue_a_s: float) -> Placed:
        index = cached("A", hashes=prompt)
        index.begin(EngineId("B"), 1)
        index.snapshot(EngineId("B"), 1, [], 1)
        router = a_router(index=index)
        a, b = (
            a_replica(
                e, rates=RATES, waiting_prefill_tokens=round(s * 1000 / 0.18), free_blocks=8000, total_blocks=9000
            )
            for e, s in (("A", queue_a_s), ("B", 0.080))
        )
        router.observed(reading(a, b), 0.0)
        return router.place(asking(an_attempt, prompt, prompt_tokens=1809, max_tokens=1), 0.0)

    decision = place(0.450)
    a, b = decision.considered
    assert (a.cached_tokens, b.cached_tokens) == (1808, 0)
    assert a.estimate.queue_s - b.estimate.queue_s == pytest.approx(0.370, abs=0.001)
    assert b.estimate.prefill_s - a.estimate.prefill_s == pytest.approx(0.324, abs=0.002)
    assert decision.replica.engine_id == "B"
    assert place(0.370).replica.engine_id == "A"


@pytest.mark.parametrize("doubt", ["never heard", "other life", "other block size"])
def test_in_doubt_nothing_is_cached(a_router, a_replica, an_attempt, doubt: str):
    prompt = chain("p", 8)
    index = cached("a", hashes=prompt, epoch=9 if doubt == "other life" else 1)
    if doubt == "never heard":
        index.suspend(EngineId("a"), 1)
    router = a_router(index=index)
    router.observed(reading(a_replica("a", block_size=32 if doubt == "other block size" else 16)), 0.0)
    decision = router.place(asking(an_attempt, prompt), 0.0)
    assert (decision.cached_tokens, decision.considered[0].cached_tokens) == (0, 0)


def test_a_wholly_cached_prompt_still_computes_its_last_token(a_router, a_replica, an_attempt):
    prompt = chain("p", 8)
    router = a_router(index=cached("a", hashes=prompt))
    router.observed(reading(a_replica("a")), 0.0)
    decision = router.place(asking(an_attempt, prompt, prompt_tokens=128), 0.0)
    assert decision.cached_tokens == 127
    assert decision.estimate.prefill_s == pytest.approx(1 / 500)


@pytest.fixture
def four(a_router, a_replica):
    """A router with four idle replicas whose caches are known to be empty."""
    router = a_router(index=cached("a", "b", "c", "d"), chance=random.Random(5).random)
    router.observed(reading(*(a_replica(e, free_blocks=8000, total_blocks=9000) for e in "abcd")), 0.0)
    return router


def test_a_burst_of_siblings_computes_its_prefix_on_two_replicas_at_most(four, an_attempt):
    prefix = chain("system", 64)  # 1,024 tokens
    chosen = Counter()
    for n in range(16):
        asked = asking(an_attempt, [*prefix, *chain(f"own{n}", 2)], f"s{n}", prompt_tokens=1060, max_tokens=32)
        chosen[four.place(asked, 0.001 * n).replica.engine_id] += 1
    assert len(chosen) <= 2, chosen


def test_unique_prompts_go_to_everybody_alike(four, an_attempt):
    chosen = Counter()
    for n in range(100):
        asked = asking(an_attempt, chain(f"unique{n}", 20), f"u{n}", prompt_tokens=330)
        chosen[four.place(asked, 0.001 * n).replica.engine_id] += 1
    assert all(20 <= chosen[e] <= 30 for e in "abcd"), chosen


def test_replicas_whose_prefill_is_much_slower_than_their_decode_still_share_alike(a_router, a_replica, an_attempt):
    slow = Rates(prefill_tokens_per_s=50.0, itl_s=0.0005)
    router = a_router(chance=random.Random(2).random)
    router.observed(reading(*(a_replica(e, rates=slow) for e in "abcd")), 0.0)
    chance, tokens = random.Random(1), Counter()
    for n in range(120):
        prompt_tokens = chance.choice([30, 300])
        placed = router.place(an_attempt(f"r{n}", prompt_tokens=prompt_tokens, max_tokens=20), 0.0)
        tokens[placed.replica.engine_id] += prompt_tokens
    assert max(tokens.values()) <= 1.1 * min(tokens.values()), tokens


def test_an_attempt_that_is_placed_again_does_not_meet_its_own_prediction(four, an_attempt):
    prompt = chain("p", 20)
    estimates = {four.place(asking(an_attempt, prompt, prompt_tokens=330), 0.1).estimate for _ in range(3)}
    assert len(estimates) == 1


def test_a_failed_attempt_takes_its_predicted_blocks_back(four, an_attempt):
    prompt = chain("p", 20)
    first = four.place(asking(an_attempt, prompt, "r1", prompt_tokens=330), 0.0).replica.engine_id
    assert four.index.overlap(prompt, 0.1)[first].predicted_blocks == 20
    four.ended(AttemptKey("r1", 1), first, 1, Outcome.TRANSPORT, placed_at=0.0, now=0.2)
    assert not four.index.overlap(prompt, 0.2)


def test_a_saturated_replica_is_passed_over_and_a_saturated_fleet_refused_with_its_own_wait(
    a_router, a_replica, an_attempt
):
    full = a_replica("full", running=32, waiting=32, waiting_prefill_tokens=10)
    slow = a_replica("slow", rates=Rates(prefill_tokens_per_s=50.0, itl_s=0.2))
    router = a_router()
    router.observed(reading(full, slow), 0.0)
    decision = router.place(an_attempt(), 0.0)
    assert {c.engine_id: c.verdict for c in decision.considered} == {
        "full": Verdict.SATURATED,
        "slow": Verdict.CHOSEN,
    }
    router.observed(reading(full, at=0.1), 0.1)
    refused = router.place(an_attempt("r2"), 0.1)
    assert isinstance(refused, Refused)
    assert refused.reason is Reason.SATURATED
    # 10 tokens at 500/s, and 33 of 32 slots that answers of 128 tokens free at the step time of a full batch.
    assert refused.wait_s == pytest.approx(10 / 500 + 33 / 32 * 128 * 0.022)


def test_the_saturation_threshold_is_the_deployments_own(a_router, a_replica, an_attempt):
    rules = Rules(freshness_s=10.0, saturation=Saturation(waiting=0.25))
    router = a_router(rules=rules)
    router.observed(reading(a_replica("a", running=32, waiting=8)), 0.0)
    assert router.place(an_attempt(), 0.0).reason is Reason.SATURATED


def test_of_a_tenant_beyond_its_share_next_to_nothing_waits_at_a_replica_and_the_answer_tells_the_reserve(
    a_router, a_replica, an_attempt
):
    router = a_router()
    router.observed(reading(a_replica("full", running=32, waiting=8), a_replica("small", max_num_seqs=4)), 0.0)
    placed = router.place(an_attempt(beyond_share=True), 0.0)
    assert {c.engine_id: c.verdict for c in placed.considered} == {"full": Verdict.SATURATED, "small": Verdict.CHOSEN}
    assert (placed.seats, placed.reserve) == (36, 5)
    router.observed(reading(a_replica("full", running=32, waiting=8), at=0.1), 0.1)
    assert router.place(an_attempt("r2", beyond_share=True), 0.1).reason is Reason.SATURATED
    assert isinstance(router.place(an_attempt("r3"), 0.1), Placed)


def test_of_a_fleet_too_large_to_look_at_all_the_seats_told_are_those_of_all(a_router, a_replica, an_attempt):
    router = a_router()
    router.observed(reading(*(a_replica(f"e{n}", max_num_seqs=8) for n in range(160))), 0.0)
    placed = router.place(an_attempt(), 0.0)
    assert len(placed.considered) < 160
    assert (placed.seats, placed.reserve) == (1280, 160)


def test_a_fleet_without_fresh_replicas_reports_full_saturation_not_none(a_router, a_replica):
    router = a_router()
    router.observed(reading(a_replica("a")), 0.0)
    assert saturation(router, "chat", 0.0) == 0.0
    assert saturation(router, "chat", 99.0) == 1.0
    assert saturation(router, "unheard-of", 0.0) == 1.0


def test_a_new_replica_is_given_a_growing_share_and_what_was_there_first_is_not_new(a_router, a_replica):
    router = a_router(rules=Rules(freshness_s=10.0, slow_start_s=10.0))
    old, new = a_replica("old"), a_replica("new", epoch=5)
    router.observed(reading(old, a_replica("new", epoch=5, phase=Phase.WARMING)), 0.0)
    router.observed(reading(old, new, at=100.0), 100.0)
    ramps = [router.slow_start.ramp(new, 10.0, 100.0 + s) for s in (0.0, 5.0, 10.0, 99.0)]
    assert ramps == [0.1, 0.5, 1.0, 1.0]
    assert router.slow_start.ramp(old, 10.0, 100.0) == 1.0
    assert router.slow_start.ramp(new, 0.0, 100.0) == 1.0


def test_the_first_replica_of_a_board_that_was_empty_is_new(a_router, a_replica):
    router = a_router(rules=Rules(freshness_s=10.0, slow_start_s=10.0))
    router.observed(reading(), 0.0)
    new = a_replica("new")
    router.observed(reading(new, at=100.0), 100.0)
    assert router.slow_start.ramp(new, 10.0, 100.0) == 0.1


def test_a_new_replica_does_not_take_a_burst_beyond_its_share(a_router, a_replica, an_attempt):
    router = a_router(rules=Rules(freshness_s=10.0, slow_start_s=10.0))
    old, new = a_replica("old"), a_replica("new")
    router.observed(reading(old), 0.0)
    router.observed(reading(a_replica("old", sequence=400), new, at=100.0), 100.0)
    placed = [router.place(an_attempt(f"r{n}", prompt_tokens=16), 100.0) for n in range(32)]
    chosen = Counter(p.replica.engine_id for p in placed)
    # A tenth of 32 slots are 3, against all of them.
    assert 1 <= chosen["new"] <= 6, chosen
    assert placed[0].considered[0].ramp == 0.1


def test_round_robin_takes_turns_among_those_eligible(a_router, a_replica, an_attempt):
    router = a_router(rules=Rules(freshness_s=10.0, policy=Policy.ROUND_ROBIN))
    stale = Record(seen=a_replica("b"), age_s=99.0, payload=b"")
    fresh = tuple(Record(seen=a_replica(e), age_s=0.1, payload=b"") for e in "acd")
    router.observed(Reading(asked_at=0.0, records=(*fresh, stale)), 0.0)
    chosen = [router.place(an_attempt(f"r{n}"), 0.0).replica.engine_id for n in range(7)]
    assert chosen == ["a", "c", "d", "a", "c", "d", "a"]


def test_least_loaded_looks_at_the_batch_and_not_at_speed(a_router, a_replica, an_attempt):
    router = a_router(rules=Rules(freshness_s=10.0, policy=Policy.LEAST_LOADED))
    router.observed(
        reading(
            a_replica("busy", running=9),
            a_replica("quiet", running=2, rates=Rates(prefill_tokens_per_s=1.0, itl_s=1.0)),
            a_replica("unmeasured", running=5, rates=None),
        ),
        0.0,
    )
    decision = router.place(an_attempt(), 0.0)
    assert decision.replica.engine_id == "quiet"
    assert [c.estimate is None for c in decision.considered] == [False, False, True]


def test_in_a_large_fleet_few_are_looked_at_and_who_has_the_prompt_is_among_them(a_router, a_replica, an_attempt):
    prompt = chain("p", 64)
    router = a_router(index=cached("e777", hashes=prompt), chance=random.Random(3).random)
    fleet = [a_replica(f"e{n:03}", free_blocks=8000, total_blocks=9000) for n in range(1000)]
    router.observed(reading(*fleet), 0.0)
    decision = router.place(asking(an_attempt, prompt, prompt_tokens=1030), 0.0)
    assert decision.replica.engine_id == "e777"
    assert len(decision.considered) <= 64
    spread = Counter(router.place(an_attempt(f"r{n}"), 0.0).replica.engine_id for n in range(500))
    assert len(spread) > 350, "no few of them take it all"


def test_a_large_fleet_whose_sample_is_all_stale_is_searched_to_the_end(a_router, a_replica, an_attempt):
    router = a_router()
    records = [Record(seen=a_replica(f"e{n:03}"), age_s=99.0, payload=b"") for n in range(200)]
    records[150] = Record(seen=a_replica("e150"), age_s=0.1, payload=b"")
    router.observed(Reading(asked_at=0.0, records=tuple(records)), 0.0)
    assert router.place(an_attempt(), 0.0).replica.engine_id == "e150"


def test_measured_classes_answer_for_the_length_and_the_batch_at_hand(a_router, a_replica, an_attempt):
    rates = Rates(
        prefill_tokens_per_s=500.0,
        itl_s=0.080,  # the newest it measured was a full batch; it idles now
        prefill_by_length=((64, 200.0), (1024, 1000.0)),
        itl_by_batch=((1, 0.010), (32, 0.080)),
    )
    router = a_router()
    router.observed(reading(a_replica("a", rates=rates)), 0.0)
    short = router.place(an_attempt("r1", prompt_tokens=50, max_tokens=11), 0.0).estimate
    assert (short.prefill_s, short.decode_s) == (pytest.approx(50 / 200), pytest.approx(10 * 0.010))
    long = router.place(an_attempt("r1", prompt_tokens=1000, max_tokens=11), 0.0).estimate
    assert long.prefill_s == pytest.approx(1.0)
