from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.controller.core.decision import Action, Decision, Forget, Kill, Standing, Start, Stop, Why
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
from headrace.controller.core.memory import State, note_failed_start
from headrace.controller.core.policy import Policy
from headrace.controller.core.reconcile import decide

OLD = Spec(bundle_digest="b-old", backend="simulated")
NEW = Spec(bundle_digest="b-new", backend="simulated")
POLICY = Policy()
WALL = 1_700_000_000.0


def engine(n: int, life: Life = Life.RUNNING, *, spec: Spec = OLD, deployment: str = "chat", **more: object) -> Process:
    engine_id = EngineId(f"{deployment}-{n}")
    process = Process(
        engine_id=engine_id, deployment=deployment, spec=spec, pid=100 + n, started_at=WALL + n, life=life
    )
    return replace(process, **more)  # type: ignore[arg-type]


def beat(process: Process, phase: Phase = Phase.READY, age_s: float = 0.1) -> Heartbeat:
    return Heartbeat(
        deployment=process.deployment,
        bundle_digest=process.spec.bundle_digest,
        backend="simulated",
        epoch_ns=int((process.started_at + 0.5) * 1e9),
        pid=process.pid,
        phase=phase,
        age_s=age_s,
        load=Load(waiting=0, running=0, booked=0, max_num_seqs=4, pressure=0.0),
    )


def ready(*processes: Process) -> dict[EngineId, Heartbeat]:
    return {p.engine_id: beat(p) for p in processes}


def judge(
    intent: Intent | None,
    processes: list[Process],
    heartbeats: dict[EngineId, Heartbeat] | None,
    *,
    now: float = 1000.0,
    state: State | None = None,
) -> tuple[Decision, State]:
    intents = {} if intent is None else {"chat": intent}
    return decide(now, intents, processes, heartbeats, state or State(), POLICY)


def verbs(actions: tuple[Action, ...]) -> list[tuple[str, str]]:
    return [(type(a).__name__.lower(), a.engine_id) for a in actions]


def test_missing_replicas_are_started_with_the_smallest_free_ordinals() -> None:
    two = engine(2)
    decision, _ = judge(Wanted(spec=OLD, replicas=3), [two], ready(two))
    assert verbs(decision.actions) == [("start", "chat-1"), ("start", "chat-3")]
    assert all(isinstance(a, Start) and a.spec == OLD and a.reason.why is Why.SCALE_UP for a in decision.actions)


def test_what_is_as_wanted_is_left_alone_and_has_no_reason() -> None:
    one = engine(1)
    decision, _ = judge(Wanted(spec=OLD, replicas=1), [one], ready(one))
    assert decision.actions == ()
    assert decision.settled
    assert decision.deployments[0].ready == 1
    assert decision.deployments[0].engines[0].standing is Standing.READY


@pytest.mark.parametrize(
    "wrong",
    [
        {"phase": Phase.WARMING},
        {"phase": Phase.DRAINING},
        {"age_s": 10.1},
        {"pid": 999},
        {"epoch_ns": int((WALL - 60) * 1e9)},
        {"bundle_digest": "b-other"},
    ],
)
def test_ready_takes_a_fresh_ready_heartbeat_of_this_very_process(wrong: dict[str, object]) -> None:
    one = engine(1)
    heartbeats = {one.engine_id: replace(beat(one), **wrong)}  # type: ignore[arg-type]
    decision, _ = judge(Wanted(spec=OLD, replicas=1), [one], heartbeats)
    assert decision.deployments[0].ready == 0
    assert decision.actions == ()
    assert [r.why for r in decision.deployments[0].reasons] == [Why.NOT_READY]


def test_a_heartbeat_of_exactly_the_freshness_bound_still_counts() -> None:
    one = engine(1)
    decision, _ = judge(Wanted(spec=OLD, replicas=1), [one], {one.engine_id: beat(one, age_s=10.0)})
    assert decision.deployments[0].ready == 1


def test_a_crashed_engine_waits_longer_after_each_crash_and_says_why() -> None:
    waits = []
    for failures in range(9):
        dead = engine(1, Life.CRASHED, failures=failures, starts=failures + 1, last_exit="exit code 1: no disk")
        first, state = judge(Wanted(spec=OLD, replicas=1), [dead], {}, now=0.0)
        assert first.actions == ()
        assert first.deployments[0].engines[0].standing is Standing.BACKING_OFF
        assert "exit code 1: no disk" in first.deployments[0].text
        due = 0.0
        while not (later := judge(Wanted(spec=OLD, replicas=1), [dead], {}, now=due, state=state))[0].actions:
            due += 0.5
        (start,) = later[0].actions
        assert isinstance(start, Start)
        assert (start.starts, start.failures, start.last_exit) == (failures + 2, failures + 1, dead.last_exit)
        waits.append(due)
    assert waits == [0.5, 1, 2, 4, 8, 16, 32, 60, 60]


def test_crashes_are_forgotten_once_an_engine_was_ready_for_a_minute() -> None:
    wanted = Wanted(spec=OLD, replicas=1)
    one = engine(1, failures=7)
    _, state = judge(wanted, [one], ready(one), now=0.0)
    _, state = judge(wanted, [one], ready(one), now=60.0, state=state)
    dead = replace(one, life=Life.CRASHED)
    _, state = judge(wanted, [dead], {}, now=60.5, state=state)
    decision, _ = judge(wanted, [dead], {}, now=61.0, state=state)
    (start,) = decision.actions
    assert isinstance(start, Start)
    assert start.failures == 1


def test_an_end_is_reported_once() -> None:
    wanted = Wanted(spec=OLD, replicas=1)
    one = engine(1)
    _, state = judge(wanted, [one], ready(one), now=0.0)
    dead = replace(one, life=Life.CRASHED)
    first, state = judge(wanted, [dead], {}, now=1.0, state=state)
    second, _ = judge(wanted, [dead], {}, now=1.1, state=state)
    assert [p.engine_id for p in first.ended] == ["chat-1"]
    assert second.ended == ()


def test_an_engine_that_refused_its_settings_is_not_tried_again_soon_but_at_once_with_other_settings() -> None:
    dead = engine(1, Life.CRASHED, refused=True, last_exit="exit code 2: unrecognized arguments: --max-seqs=4")
    _, state = judge(Wanted(spec=OLD, replicas=1), [dead], {}, now=0.0)
    later, _ = judge(Wanted(spec=OLD, replicas=1), [dead], {}, now=299.0, state=state)
    assert later.actions == ()
    assert "unrecognized arguments: --max-seqs=4" in later.deployments[0].text
    mended, _ = judge(Wanted(spec=NEW, replicas=1), [dead], {}, now=1.0, state=state)
    assert verbs(mended.actions) == [("start", "chat-1")]
    (start,) = mended.actions
    assert isinstance(start, Start)
    assert (start.spec, start.failures) == (NEW, 0)


def test_a_crash_loop_does_not_keep_another_deployment_from_starting() -> None:
    dead = engine(1, Life.CRASHED, failures=20, last_exit="killed by SIGSEGV")
    intents: dict[str, Intent] = {"chat": Wanted(spec=OLD, replicas=1), "mail": Wanted(spec=NEW, replicas=1)}
    decision, _ = decide(0.0, intents, [dead], {}, State(), POLICY)
    assert verbs(decision.actions) == [("start", "mail-1")]


def test_a_start_that_failed_is_tried_again_with_growing_waits() -> None:
    wanted = Wanted(spec=OLD, replicas=1)
    state = note_failed_start(0.0, EngineId("chat-1"), "no space left on device", State(), POLICY)
    early, state = judge(wanted, [], {}, now=0.4, state=state)
    assert early.actions == ()
    assert "no space left on device" in early.deployments[0].text
    due, state = judge(wanted, [], {}, now=0.5, state=state)
    assert verbs(due.actions) == [("start", "chat-1")]
    state = note_failed_start(0.5, EngineId("chat-1"), "no space left on device", state, POLICY)
    assert judge(wanted, [], {}, now=1.4, state=state)[0].actions == ()
    assert judge(wanted, [], {}, now=1.5, state=state)[0].actions != ()


def test_scaling_down_drains_the_newest() -> None:
    three = [engine(1), engine(2), engine(3, started_at=WALL - 50)]
    decision, _ = judge(Wanted(spec=OLD, replicas=1), three, ready(*three))
    assert verbs(decision.actions) == [("stop", "chat-2"), ("stop", "chat-1")]


def test_scaling_down_prefers_the_dead_and_the_not_ready_over_the_newest() -> None:
    dead, warming, old, new = engine(1, Life.CRASHED), engine(2), engine(3), engine(4)
    decision, _ = judge(Wanted(spec=OLD, replicas=2), [dead, warming, old, new], ready(old, new))
    assert verbs(decision.actions) == [("forget", "chat-1"), ("stop", "chat-2")]


def test_a_drain_that_takes_too_long_ends_in_a_kill() -> None:
    draining = engine(1, Life.STOPPING)
    waiting, state = judge(None, [draining], {}, now=0.0)
    assert waiting.actions == ()
    assert waiting.deployments[0].engines[0].standing is Standing.DRAINING
    late, _ = judge(None, [draining], {}, now=30.0, state=state)
    assert verbs(late.actions) == [("kill", "chat-1")]
    assert isinstance(late.actions[0], Kill)


def test_a_stopped_engine_is_forgotten() -> None:
    decision, _ = judge(None, [engine(1, Life.STOPPED)], {})
    assert [type(a) for a in decision.actions] == [Forget]


def test_a_deleted_deployment_loses_all_its_processes_even_when_heartbeats_cannot_be_read() -> None:
    decision, _ = judge(None, [engine(1), engine(2, Life.CRASHED)], None)
    assert verbs(decision.actions) == [("stop", "chat-1"), ("forget", "chat-2")]
    assert {a.reason.why for a in decision.actions} == {Why.DELETED}


def test_a_new_bundle_starts_one_replica_first_and_stops_the_old_one_when_that_is_ready() -> None:
    wanted = Wanted(spec=NEW, replicas=1)
    old = engine(1)
    first, _ = judge(wanted, [old], ready(old))
    assert verbs(first.actions) == [("start", "chat-2")]
    new = engine(2, spec=NEW)
    warming, _ = judge(wanted, [old, new], ready(old))
    assert warming.actions == ()
    second, _ = judge(wanted, [old, new], ready(old, new))
    assert verbs(second.actions) == [("stop", "chat-1")]


def test_a_new_bundle_that_crashes_leaves_the_old_replica_serving() -> None:
    old, new = engine(1), engine(2, Life.CRASHED, spec=NEW, failures=3, last_exit="exit code 1: bad weights")
    decision, _ = judge(Wanted(spec=NEW, replicas=1), [old, new], ready(old))
    assert decision.actions == ()
    assert decision.deployments[0].ready == 1
    assert "bad weights" in decision.deployments[0].text


def test_going_back_to_the_old_bundle_drops_the_crashed_new_replica() -> None:
    old, new = engine(1), engine(2, Life.CRASHED, spec=NEW, failures=3)
    decision, _ = judge(Wanted(spec=OLD, replicas=1), [old, new], ready(old))
    assert verbs(decision.actions) == [("forget", "chat-2")]


def test_replacing_waits_for_a_drain_to_end_before_the_next_start() -> None:
    wanted = Wanted(spec=NEW, replicas=2)
    old, draining, new = engine(1), engine(2, Life.STOPPING), engine(3, spec=NEW)
    decision, _ = judge(wanted, [old, draining, new], ready(old, new))
    assert decision.actions == ()
    decision, _ = judge(wanted, [old, new], ready(old, new))
    assert verbs(decision.actions) == [("start", "chat-2")]


def test_changed_engine_settings_are_a_reason_to_replace() -> None:
    old = engine(1)
    wanted = Wanted(spec=replace(OLD, settings=(("max_num_seqs", "4"),)), replicas=1)
    decision, _ = judge(wanted, [old], ready(old))
    assert verbs(decision.actions) == [("start", "chat-2")]


def test_without_heartbeats_nothing_is_scaled_or_replaced() -> None:
    one, two = engine(1), engine(2)
    for wanted in (Wanted(spec=OLD, replicas=1), Wanted(spec=OLD, replicas=5), Wanted(spec=NEW, replicas=2)):
        decision, _ = judge(wanted, [one, two], None)
        assert decision.actions == ()
        assert Why.NO_HEARTBEATS in {r.why for r in decision.deployments[0].reasons}


def test_without_heartbeats_a_dead_process_is_still_started_again_as_it_was() -> None:
    one, dead = engine(1), engine(2, Life.CRASHED)
    _, state = judge(Wanted(spec=NEW, replicas=2), [one, dead], None, now=0.0)
    decision, _ = judge(Wanted(spec=NEW, replicas=2), [one, dead], None, now=0.5, state=state)
    (start,) = decision.actions
    assert isinstance(start, Start)
    assert (start.engine_id, start.spec) == ("chat-2", OLD)


def test_without_heartbeats_replicas_count_as_ready_until_the_freshness_bound_has_passed() -> None:
    wanted = Wanted(spec=OLD, replicas=1)
    one = engine(1)
    _, state = judge(wanted, [one], ready(one), now=0.0)
    within, state = judge(wanted, [one], None, now=10.0, state=state)
    beyond, _ = judge(wanted, [one], None, now=10.1, state=state)
    assert (within.deployments[0].ready, beyond.deployments[0].ready) == (1, 0)


def test_an_intent_never_read_stops_nothing_and_revives_the_dead() -> None:
    one, dead = engine(1), engine(2, Life.CRASHED)
    unreadable = Unreadable(problem="replicas: not a number")
    _, state = judge(unreadable, [one, dead], ready(one), now=0.0)
    decision, _ = judge(unreadable, [one, dead], ready(one), now=0.5, state=state)
    assert verbs(decision.actions) == [("start", "chat-2")]
    assert "replicas: not a number" in decision.deployments[0].text


def test_a_bad_newer_value_is_shown_while_the_last_good_one_is_in_force() -> None:
    one = engine(1)
    decision, _ = judge(Wanted(spec=OLD, replicas=2, problem="replicas: not a number"), [one], ready(one))
    assert verbs(decision.actions) == [("start", "chat-2")]
    assert "replicas: not a number" in decision.deployments[0].text


def test_processes_found_at_the_start_of_a_controller_are_adopted_not_doubled() -> None:
    one, two = engine(1, starts=4), engine(2)
    decision, _ = judge(Wanted(spec=OLD, replicas=2), [one, two], ready(one, two), state=State())
    assert decision.actions == ()
    assert decision.settled


def test_stopping_everything_by_wanting_none_needs_no_ready_replacement() -> None:
    one = engine(1)
    decision, _ = judge(Wanted(spec=NEW, replicas=0), [one], ready(one))
    assert [type(a) for a in decision.actions] == [Stop]
