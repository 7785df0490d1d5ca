"""The loop over a process table in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from prometheus_client import REGISTRY

from headrace.controller.core.decision import Action, Forget, Start
from headrace.controller.core.fleet import EngineId, Heartbeat, Intent, Life, Load, Phase, Process, Spec, Wanted
from headrace.controller.core.policy import Policy
from headrace.controller.core.reconcile import decide
from headrace.controller.loops import Pace, ReconcileLoop
from headrace.controller.ports import ProvisionError

SPEC = Spec(bundle_digest="b", backend="simulated")


@dataclass
class Table:
    """Processes in memory; can be slow, and can fail."""

    processes: dict[EngineId, Process] = field(default_factory=dict)
    broken: bool = False
    full: bool = False
    slow_s: float = 0.0
    acted: int = 0
    resign_after: int | None = None
    leading: bool = True

    async def observe(self) -> tuple[Process, ...]:
        if self.broken:
            raise ProvisionError("disk on fire")
        return tuple(self.processes.values())

    async def act(self, action: Action) -> None:
        await asyncio.sleep(self.slow_s)
        if self.full:
            raise ProvisionError("No space left on device")
        self.acted += 1
        if self.acted == self.resign_after:
            self.leading = False
        if isinstance(action, Start):
            self.processes[action.engine_id] = Process(
                engine_id=action.engine_id,
                deployment=action.deployment,
                spec=action.spec,
                pid=self.acted,
                started_at=float(self.acted),
                life=Life.RUNNING,
            )
        elif isinstance(action, Forget):
            del self.processes[action.engine_id]

    async def stop_all(self, grace_s: float) -> None:
        self.processes.clear()

    def close(self) -> None:
        pass


@dataclass
class Intents:
    wanted: Mapping[str, Intent] | None = None
    connected: bool = True

    def read(self) -> Mapping[str, Intent] | None:
        return self.wanted

    async def changed(self) -> None:
        await asyncio.Event().wait()


@dataclass
class Beats:
    said: Mapping[EngineId, Heartbeat] | None = field(default_factory=dict)

    async def read(self) -> Mapping[EngineId, Heartbeat] | None:
        return self.said


def loop_over(
    table: Table, intents: Intents, beats: Beats | None = None, *, action_timeout_s: float = 5.0
) -> ReconcileLoop:
    return ReconcileLoop(
        intent=intents,
        heartbeats=beats or Beats(),
        provisioner=table,
        judge=decide,
        leadership=table,
        policy=Policy(),
        pace=Pace(period_s=0.01, action_timeout_s=action_timeout_s),
    )


async def test_nothing_is_stopped_while_intent_was_never_read() -> None:
    table = Table()
    running = Process(engine_id=EngineId("a-1"), deployment="a", spec=SPEC, pid=1, started_at=1, life=Life.RUNNING)
    table.processes[running.engine_id] = running
    await loop_over(table, Intents(wanted=None)).turn()
    assert table.acted == 0


async def test_a_controller_that_does_not_lead_decides_and_does_not_act() -> None:
    table = Table(leading=False)
    loop = loop_over(table, Intents(wanted={"a": Wanted(spec=SPEC, replicas=2)}))
    await loop.turn()
    assert table.processes == {}
    assert loop.latest.deployments[0].desired == 2


async def test_leadership_lost_between_two_actions_stops_the_second() -> None:
    table = Table(resign_after=1)
    await loop_over(table, Intents(wanted={"a": Wanted(spec=SPEC, replicas=3)})).turn()
    assert list(table.processes) == ["a-1"]


async def test_an_action_that_fails_is_shown_waits_and_does_not_keep_the_loop_from_turning() -> None:
    table = Table()
    loop = loop_over(table, Intents(wanted={"a": Wanted(spec=SPEC, replicas=1)}))
    table.full = True
    await loop.turn()
    await loop.turn()
    assert "No space left on device" in loop.latest.deployments[0].text
    assert loop.latest.actions == ()


async def test_an_action_that_hangs_is_given_up_after_its_timeout() -> None:
    table = Table(slow_s=60)
    loop = loop_over(table, Intents(wanted={"a": Wanted(spec=SPEC, replicas=1)}), action_timeout_s=0.05)
    await asyncio.wait_for(loop.turn(), 5)
    await loop.turn()
    assert "longer than 0.05 s" in loop.latest.deployments[0].text


async def test_a_process_table_that_cannot_be_read_leaves_the_last_picture_and_no_actions() -> None:
    table = Table()
    loop = loop_over(table, Intents(wanted={"a": Wanted(spec=SPEC, replicas=1)}))
    await loop.turn()
    before = loop.latest
    table.broken = True
    await loop.turn()
    assert loop.latest is before
    assert table.acted == 1


async def test_the_gauge_of_saturated_replicas_is_gone_while_their_number_is_not_known() -> None:
    table, beats = Table(), Beats()
    loop = loop_over(table, Intents(wanted={"gauged": Wanted(spec=SPEC, replicas=1)}), beats)
    await loop.turn()
    assert shown() is None, "nobody is ready"
    beats.said = {EngineId("gauged-1"): full_beat()}
    await loop.turn()
    assert shown() == 1
    assert loop.latest.settled, "so it looks no more often than otherwise"
    beats.said = None
    await loop.turn()
    assert shown() is None


def shown() -> float | None:
    return REGISTRY.get_sample_value("headrace_controller_saturated_replicas", {"deployment": "gauged"})


def full_beat() -> Heartbeat:
    return Heartbeat(
        deployment="gauged",
        bundle_digest=SPEC.bundle_digest,
        backend=SPEC.backend,
        epoch_ns=1_500_000_000,
        pid=1,
        phase=Phase.READY,
        age_s=0.1,
        load=Load(waiting=4, running=4, booked=0, max_num_seqs=4, pressure=0.5),
    )
