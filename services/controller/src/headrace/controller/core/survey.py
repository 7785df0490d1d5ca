"""Compare wanted with observed where something else starts the engines (compose, Kubernetes): report, never act."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headrace.controller.core.decision import Decision, DeploymentView, EngineView, Reason, Standing, Why
from headrace.controller.core.fleet import EngineId, Heartbeat, Intent, Life, Phase, Process, Spec, Unreadable, Wanted
from headrace.controller.core.fullness import fullness
from headrace.controller.core.memory import Heartbeats, State
from headrace.controller.core.policy import Policy

_STANDING = {
    Phase.WARMING: Standing.STARTING,
    Phase.READY: Standing.READY,
    Phase.DRAINING: Standing.DRAINING,
}


def survey(
    now: float,
    intents: Mapping[str, Intent],
    processes: Sequence[Process],
    heartbeats: Heartbeats | None,
    state: State,
    policy: Policy,
) -> tuple[Decision, State]:
    """Signature and answer of `reconcile.decide`, with fresh heartbeats as the only evidence and no actions."""
    fresh = {e: b for e, b in (heartbeats or {}).items() if b.age_s <= policy.freshness_s}
    names = sorted({*intents, *(beat.deployment for beat in fresh.values())})
    views = tuple(_view(name, intents.get(name), fresh, heartbeats is not None) for name in names)
    return Decision(deployments=views), state


def _view(name: str, intent: Intent | None, fresh: Heartbeats, board_readable: bool) -> DeploymentView:
    mine = {e: b for e, b in sorted(fresh.items()) if b.deployment == name}
    ready = [(e, beat) for e, beat in mine.items() if beat.phase is Phase.READY]
    found = fullness(intent, ready)
    return DeploymentView(
        name=name,
        desired=intent.replicas if isinstance(intent, Wanted) else 0,
        ready=len(ready),
        engines=tuple(_engine(e, b) for e, b in mine.items()),
        reasons=(*_differences(intent, mine, board_readable), *found.reasons),
        saturated=found.saturated,
    )


def _engine(engine_id: EngineId, beat: Heartbeat) -> EngineView:
    process = Process(
        engine_id=engine_id,
        deployment=beat.deployment,
        spec=Spec(bundle_digest=beat.bundle_digest, backend=beat.backend),
        pid=beat.pid,
        started_at=beat.epoch_ns / 1e9,
        life=Life.RUNNING,
    )
    return EngineView(process=process, standing=_STANDING[beat.phase])


def _differences(intent: Intent | None, mine: Heartbeats, board_readable: bool) -> list[Reason]:
    if not board_readable:
        return [Reason(why=Why.NO_HEARTBEATS, text="nothing is known: heartbeats cannot be read")]
    if intent is None:
        return [Reason(why=Why.DELETED, text=f"{len(mine)} still running for a deployment that was deleted")]
    if isinstance(intent, Unreadable):
        return [Reason(why=Why.INTENT_UNKNOWN, text=intent.problem)]
    found = []
    if intent.problem:
        found.append(Reason(why=Why.INTENT_INVALID, text=f"the last good value is in force: {intent.problem}"))
    right = [b for b in mine.values() if b.bundle_digest == intent.spec.bundle_digest]
    wrong = len(mine) - len(right)
    if wrong:
        found.append(Reason(why=Why.SPEC_CHANGED, text=f"{wrong} serve another bundle than the wanted one"))
    serving = sum(b.phase is Phase.READY for b in right)
    if serving != intent.replicas:
        text = f"{intent.replicas} wanted, {serving} ready: starting and stopping engines is not the controller's here"
        found.append(Reason(why=Why.NOT_OURS_TO_START, text=text))
    return found
