"""From any observed state, deciding and acting again and again reaches the wanted state, and then nothing is done."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.controller.core.decision import Action, Forget, Kill, Start, Stop
from headrace.controller.core.fleet import EngineId, Heartbeat, Intent, Life, Phase, Process, Spec, Wanted
from headrace.controller.core.memory import State
from headrace.controller.core.policy import Policy
from headrace.controller.core.reconcile import decide

SPECS = [Spec(bundle_digest=f"b{n}", backend="simulated") for n in range(3)]
TURN_S = 2.0


@dataclass
class World:
    """A model of the process table: engines warm up for a turn, drain for a turn, some overstay and need a kill."""

    processes: dict[EngineId, Process]
    age: dict[EngineId, int] = field(default_factory=dict)
    stubborn: frozenset[EngineId] = frozenset()
    next_pid: int = 1000

    def apply(self, action: Action) -> None:
        engine_id = action.engine_id
        match action:
            case Start():
                before = self.processes.get(engine_id)
                assert before is None or before.life is Life.CRASHED, "an engine was started beside itself"
                self.next_pid += 1
                self.processes[engine_id] = Process(
                    engine_id=engine_id,
                    deployment=action.deployment,
                    spec=action.spec,
                    pid=self.next_pid,
                    started_at=float(self.next_pid),
                    life=Life.RUNNING,
                    starts=action.starts,
                    failures=action.failures,
                )
                self.age[engine_id] = 0
            case Stop():
                assert self.processes[engine_id].life is Life.RUNNING
                self._set(engine_id, Life.STOPPING)
            case Kill():
                assert self.processes[engine_id].life is Life.STOPPING
                self._set(engine_id, Life.STOPPED)
            case Forget():
                assert self.processes[engine_id].life in (Life.STOPPED, Life.CRASHED)
                del self.processes[engine_id]

    def pass_time(self) -> None:
        for engine_id, process in list(self.processes.items()):
            self.age[engine_id] = self.age.get(engine_id, 0) + 1
            if process.life is Life.STOPPING and engine_id not in self.stubborn:
                self._set(engine_id, Life.STOPPED)

    def heartbeats(self) -> dict[EngineId, Heartbeat]:
        return {
            e: Heartbeat(
                deployment=p.deployment,
                bundle_digest=p.spec.bundle_digest,
                backend=p.spec.backend,
                epoch_ns=int(p.started_at * 1e9),
                pid=p.pid,
                phase=Phase.READY if self.age.get(e, 0) >= 1 else Phase.WARMING,
                age_s=0.1,
            )
            for e, p in self.processes.items()
            if p.life is Life.RUNNING
        }

    def _set(self, engine_id: EngineId, life: Life) -> None:
        self.processes[engine_id] = replace(self.processes[engine_id], life=life)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    processes = {}
    for deployment in ("chat", "mail"):
        for n in draw(st.sets(st.integers(1, 6), max_size=5)):
            engine_id = EngineId(f"{deployment}-{n}")
            processes[engine_id] = Process(
                engine_id=engine_id,
                deployment=deployment,
                spec=draw(st.sampled_from(SPECS)),
                pid=100 + n,
                started_at=float(draw(st.integers(1, 100))),
                life=draw(st.sampled_from(Life)),
                failures=draw(st.integers(0, 5)),
                refused=draw(st.booleans()),
            )
    stubborn = frozenset(draw(st.sets(st.sampled_from(sorted(processes))))) if processes else frozenset()
    ages = {e: draw(st.integers(0, 1)) for e in processes}
    return World(processes=processes, age=ages, stubborn=stubborn)


intents = st.dictionaries(
    st.sampled_from(["chat", "mail"]),
    st.builds(Wanted, spec=st.sampled_from(SPECS), replicas=st.integers(0, 4)),
)


@settings(max_examples=200, deadline=None)
@given(world=worlds(), wanted=intents)
def test_any_fleet_becomes_the_wanted_fleet_and_then_rests(world: World, wanted: dict[str, Intent]) -> None:
    state, policy, now = State(), Policy(), 0.0
    floor = {name: _serving(world, name) for name in wanted}
    for _ in range(250):
        decision, state = decide(now, wanted, list(world.processes.values()), world.heartbeats(), state, policy)
        for action in decision.actions:
            world.apply(action)
        for name, intent in wanted.items():
            assert isinstance(intent, Wanted)
            assert _serving(world, name) >= min(floor[name], intent.replicas), "service was taken away"
            floor[name] = max(_serving(world, name), floor[name])
        world.pass_time()
        now += TURN_S
        if not decision.actions and decision.settled:
            break
    assert decision.settled
    assert decision.actions == ()
    running = {
        name: [p.spec for p in world.processes.values() if p.deployment == name] for name in {"chat", "mail", *wanted}
    }
    for name, specs in running.items():
        goal = wanted.get(name)
        assert specs == ([goal.spec] * goal.replicas if isinstance(goal, Wanted) else [])


def _serving(world: World, deployment: str) -> int:
    beats = world.heartbeats()
    return sum(
        p.deployment == deployment and p.life is Life.RUNNING and beats[e].phase is Phase.READY
        for e, p in world.processes.items()
    )
