"""When a deployment is said to be saturated, and when that is not known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.base.saturation import Saturation
from headrace.controller.core.decision import Why
from headrace.controller.core.fleet import (
    EngineId,
    Heartbeat,
    Intent,
    Life,
    Load,
    Phase,
    Process,
    Spec,
    Unreadable,
    Wanted,
)
from headrace.controller.core.fullness import fullness
from headrace.controller.core.memory import State
from headrace.controller.core.policy import Policy
from headrace.controller.core.reconcile import decide

SPEC = Spec(bundle_digest="b", backend="simulated")
WANTED = Wanted(spec=SPEC, replicas=2)
IDLE = Load(waiting=0, running=0, booked=0, max_num_seqs=4, pressure=0.0)
FULL = Load(waiting=4, running=4, booked=0, max_num_seqs=4, pressure=0.3)


def beat(load: Load | None, *, pid: int = 1) -> Heartbeat:
    return Heartbeat(
        deployment="chat",
        bundle_digest="b",
        backend="simulated",
        epoch_ns=1_000_000_000,
        pid=pid,
        phase=Phase.READY,
        age_s=0.1,
        load=load,
    )


def judged(intent: Intent | None, *loads: Load | None) -> tuple[int | None, list[Why]]:
    found = fullness(intent, [(EngineId(f"chat-{n}"), beat(load)) for n, load in enumerate(loads)])
    return found.saturated, [reason.why for reason in found.reasons]


def test_all_saturated_is_a_reason_and_fewer_are_a_number() -> None:
    assert judged(WANTED, FULL, FULL) == (2, [Why.SATURATED])
    assert judged(WANTED, FULL, IDLE) == (1, [])
    assert judged(WANTED, IDLE, IDLE) == (0, [])


def test_the_reason_begins_with_the_word_that_routers_refuse_with() -> None:
    (reason,) = fullness(WANTED, [(EngineId("chat-1"), beat(FULL))]).reasons
    assert reason.text.startswith("SATURATED: ")


@pytest.mark.parametrize("intent", [None, Unreadable(problem="x")])
def test_without_a_threshold_nothing_is_known(intent: Intent | None) -> None:
    assert judged(intent, FULL, FULL) == (None, [])


def test_without_a_ready_replica_nothing_is_known() -> None:
    assert judged(WANTED) == (None, [])


def test_a_replica_of_another_bundle_takes_nothing_and_does_not_count() -> None:
    old = replace(beat(IDLE), bundle_digest="older")
    found = fullness(WANTED, [(EngineId("chat-1"), old), (EngineId("chat-2"), beat(FULL))])
    assert [reason.why for reason in found.reasons] == [Why.SATURATED]
    assert fullness(WANTED, [(EngineId("chat-1"), old)]).saturated is None


def test_one_that_does_not_say_its_load_makes_it_unknown_and_says_so() -> None:
    assert judged(WANTED, FULL, None) == (None, [Why.LOAD_UNKNOWN])


def test_what_routers_have_booked_counts_as_it_does_for_them() -> None:
    for booked in range(4):
        load = Load(waiting=3, running=3, booked=booked, max_num_seqs=4, pressure=0.0)
        allowance = Saturation().allowance(waiting=3, running=3, max_num_seqs=4, pressure=0.0)
        assert load.reaches(Saturation()) is (booked >= allowance)


def test_the_deployments_own_threshold_is_used_and_zero_is_a_threshold() -> None:
    one_waits = Load(waiting=1, running=4, booked=0, max_num_seqs=4, pressure=0.0)
    assert judged(WANTED, one_waits) == (0, [])
    strict = Wanted(spec=SPEC, replicas=1, saturation=Saturation(waiting=0.0))
    assert judged(strict, one_waits) == (1, [Why.SATURATED])
    assert judged(strict, IDLE) == (0, [])


def test_a_saturated_deployment_is_as_wanted_and_nothing_is_started_for_it() -> None:
    process = Process(
        engine_id=EngineId("chat-1"), deployment="chat", spec=SPEC, pid=1, started_at=1.0, life=Life.RUNNING
    )
    wanted = {"chat": Wanted(spec=SPEC, replicas=1)}
    beats = {process.engine_id: beat(FULL)}
    decision, state = decide(0.0, wanted, [process], beats, State(), Policy())
    (view,) = decision.deployments
    assert (view.ready, view.saturated) == (1, 1)
    assert [reason.why for reason in view.reasons] == [Why.SATURATED]
    assert decision.actions == ()
    assert decision.settled
    decision, _ = decide(1.0, wanted, [process], None, state, Policy())
    (view,) = decision.deployments
    assert (view.ready, view.saturated) == (1, None), "still ready for all we know, how full nobody can say"
    assert Why.SATURATED not in {reason.why for reason in view.reasons}
