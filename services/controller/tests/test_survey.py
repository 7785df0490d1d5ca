from __future__ import annotations

from dataclasses import replace

from headrace.controller.core.decision import Standing, Why
from headrace.controller.core.fleet import EngineId, Heartbeat, Intent, Load, Phase, Spec, Unreadable, Wanted
from headrace.controller.core.memory import State
from headrace.controller.core.policy import Policy
from headrace.controller.core.survey import survey

SPEC = Spec(bundle_digest="b1", backend="model", settings=(("max_num_seqs", "8"),))


def beat(phase: Phase = Phase.READY, age_s: float = 0.2, digest: str = "b1") -> Heartbeat:
    return Heartbeat(
        deployment="chat",
        bundle_digest=digest,
        backend="model",
        epoch_ns=1,
        pid=1,
        phase=phase,
        age_s=age_s,
        load=Load(waiting=0, running=0, booked=0, max_num_seqs=4, pressure=0.0),
    )


def look(intents: dict[str, Intent], heartbeats: dict[EngineId, Heartbeat] | None) -> tuple[int, list[Why], int]:
    decision, _ = survey(0.0, intents, [], heartbeats, State(), Policy())
    assert decision.actions == ()
    (view,) = decision.deployments
    return view.ready, [r.why for r in view.reasons], len(view.engines)


def test_enough_fresh_ready_engines_are_no_difference() -> None:
    beats = {EngineId("a"): beat(), EngineId("b"): beat()}
    assert look({"chat": Wanted(spec=SPEC, replicas=2)}, beats) == (2, [], 2)


def test_stale_and_warming_engines_do_not_count_as_ready() -> None:
    beats = {EngineId("a"): beat(age_s=11), EngineId("b"): beat(phase=Phase.WARMING)}
    assert look({"chat": Wanted(spec=SPEC, replicas=1)}, beats) == (0, [Why.NOT_OURS_TO_START], 1)


def test_engines_of_another_bundle_are_reported() -> None:
    beats = {EngineId("a"): beat(digest="b0")}
    assert look({"chat": Wanted(spec=SPEC, replicas=1)}, beats)[1] == [Why.SPEC_CHANGED, Why.NOT_OURS_TO_START]


def test_engines_without_a_deployment_are_reported() -> None:
    assert look({}, {EngineId("a"): beat()})[1] == [Why.DELETED]


def test_an_unreadable_board_or_intent_is_reported_as_unknown() -> None:
    assert look({"chat": Wanted(spec=SPEC, replicas=0)}, None)[1] == [Why.NO_HEARTBEATS]
    assert look({"chat": Unreadable(problem="x")}, {})[1] == [Why.INTENT_UNKNOWN]


def test_phases_are_shown_by_the_protocols_names() -> None:
    beats = {EngineId(p.value): beat(phase=p) for p in Phase}
    decision, _ = survey(0.0, {}, [], beats, State(), Policy())
    shown = {e.process.engine_id: e.standing for e in decision.deployments[0].engines}
    assert shown == {"warming": Standing.STARTING, "ready": Standing.READY, "draining": Standing.DRAINING}


def test_engines_that_others_run_are_told_to_be_saturated_by_the_same_measure() -> None:
    full = replace(beat(), load=Load(waiting=4, running=4, booked=0, max_num_seqs=4, pressure=0.2))
    for beats, saturated in (([full, full], 2), ([full, beat()], 1)):
        heartbeats = {EngineId(f"e{n}"): one for n, one in enumerate(beats)}
        decision, _ = survey(0.0, {"chat": Wanted(spec=SPEC, replicas=2)}, [], heartbeats, State(), Policy())
        (view,) = decision.deployments
        assert view.saturated == saturated
        assert [r.why for r in view.reasons] == [Why.SATURATED] * (saturated == 2)
