"""Decide which engine processes to start and stop so that what runs becomes what is wanted.

Level-driven: each decision looks at the whole picture and at nothing that happened before, except how long things
have been as they are. So it may be taken at any time, any number of times, by a controller started a moment ago.

What evidence a decision needs:

    a process that is gone     a fact; it is started again, whatever else is unknown
    a deployment that is gone  a fact; its processes are stopped
    scale or replace           needs intent that can be read and a heartbeat board that can be read; else hold
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from headrace.controller.core.decision import (
    Action,
    Decision,
    DeploymentView,
    EngineView,
    Forget,
    Kill,
    Reason,
    Standing,
    Start,
    Stop,
    Why,
)
from headrace.controller.core.fleet import EngineId, Intent, Life, Process, Spec, Unreadable, Wanted
from headrace.controller.core.fullness import fullness
from headrace.controller.core.memory import FailedStart, Heartbeats, State, Track, remember
from headrace.controller.core.policy import Policy


def decide(
    now: float,
    intents: Mapping[str, Intent],
    processes: Sequence[Process],
    heartbeats: Heartbeats | None,
    state: State,
    policy: Policy,
) -> tuple[Decision, State]:
    """What to do now, with reasons, and what to remember.

    `intents` holds every deployment known to exist: one that has processes and is not in it was deleted.
    `heartbeats` is None when the board cannot be read. `now` is monotonic seconds.
    """
    after = remember(now, processes, heartbeats, state, policy)
    plans = []
    for name in sorted({*intents, *(p.deployment for p in processes)}):
        members = tuple(
            _Member(process=p, track=after.tracks[p.engine_id], now=now, policy=policy)
            for p in sorted(processes, key=lambda p: p.engine_id)
            if p.deployment == name
        )
        plan = _Plan(name=name, members=members, now=now, policy=policy, failed_starts=after.failed_starts)
        _plan(plan, intents.get(name), heartbeats is not None)
        _plan_fullness(plan, intents.get(name), heartbeats or {})
        plans.append((plan, intents.get(name)))
    decision = Decision(
        actions=tuple(action for plan, _ in plans for action in plan.actions),
        deployments=tuple(plan.view(intent) for plan, intent in plans),
        ended=tuple(p for p in processes if _newly_ended(p, state, after)),
    )
    return decision, after


@dataclass(frozen=True, slots=True, kw_only=True)
class _Member:
    """A process and what is remembered of it."""

    process: Process
    track: Track
    now: float
    policy: Policy

    @property
    def ready(self) -> bool:
        """Seen ready, and not so long ago that it would be a guess; exact while the board can be read."""
        seen = self.track.ready_seen
        return (
            self.process.life is Life.RUNNING
            and self.track.ready_since is not None
            and seen is not None
            and self.now - seen <= self.policy.freshness_s
        )

    def seen_ready(self, heartbeats: Heartbeats) -> bool:
        """Ready by these heartbeats, not only by what is remembered of earlier ones."""
        return self.ready and self.process.engine_id in heartbeats

    @property
    def standing(self) -> Standing:
        if self.process.life in (Life.STOPPING, Life.STOPPED):
            return Standing.DRAINING
        if self.process.life is Life.CRASHED:
            return Standing.BACKING_OFF
        return Standing.READY if self.ready else Standing.STARTING

    @property
    def worth(self) -> tuple[bool, bool, float, int]:
        """Least worth goes first: one that is gone, then one that does not serve, then the newest."""
        running = self.process.life is Life.RUNNING
        return running, self.ready, -self.process.started_at, -ordinal(self.process.engine_id)


@dataclass(slots=True, kw_only=True)
class _Plan:
    """One deployment's part of a decision, being made."""

    name: str
    members: tuple[_Member, ...]
    now: float
    policy: Policy
    failed_starts: Mapping[EngineId, FailedStart]
    actions: list[Action] = field(default_factory=list)
    reasons: list[Reason] = field(default_factory=list)
    saturated: int | None = None

    def living(self, *lives: Life) -> list[_Member]:
        """The members in one of these lives."""
        return [m for m in self.members if m.process.life in lives]

    def note(self, why: Why, text: str) -> Reason:
        """Keep a reason why this deployment is not as wanted."""
        reason = Reason(why=why, text=text)
        self.reasons.append(reason)
        return reason

    def start(self, engine_id: EngineId, spec: Spec, reason: Reason, after: Process | None, failures: int) -> None:
        """Start `engine_id`, in place of the ended process `after` if there was one, unless its last start failed."""
        failed = self.failed_starts.get(engine_id)
        if failed is not None and self.now < failed.retry_at:
            self.note(Why.START_FAILED, f"{engine_id} could not be started: {failed.text}")
            return
        self.reasons.append(reason)
        starts, last_exit = (after.starts + 1, after.last_exit) if after else (1, "")
        self.actions.append(
            Start(
                engine_id=engine_id,
                deployment=self.name,
                spec=spec,
                starts=starts,
                failures=failures,
                last_exit=last_exit,
                reason=reason,
            )
        )

    def release(self, member: _Member, why: Why, text: str) -> None:
        """Stop a running member, forget one that is gone."""
        kind = Stop if member.process.life is Life.RUNNING else Forget
        engine_id = member.process.engine_id
        self.actions.append(
            kind(engine_id=engine_id, deployment=self.name, reason=self.note(why, f"{engine_id} {text}"))
        )

    def view(self, intent: Intent | None) -> DeploymentView:
        """How the status shows this deployment."""
        return DeploymentView(
            name=self.name,
            desired=intent.replicas if isinstance(intent, Wanted) else 0,
            ready=sum(m.ready for m in self.members),
            engines=tuple(EngineView(process=m.process, standing=m.standing) for m in self.members),
            reasons=tuple(self.reasons),
            saturated=self.saturated,
        )


def _plan(plan: _Plan, intent: Intent | None, board_readable: bool) -> None:
    _plan_endings(plan)
    match intent:
        case None:
            for member in plan.living(Life.RUNNING, Life.CRASHED):
                plan.release(member, Why.DELETED, "ends: its deployment was deleted")
        case Unreadable():
            plan.note(Why.INTENT_UNKNOWN, f"nothing is started or stopped: {intent.problem}")
            _revive(plan, len(plan.members))
        case Wanted():
            if intent.problem:
                plan.note(Why.INTENT_INVALID, f"the last good value is in force: {intent.problem}")
            if board_readable:
                _plan_wanted(plan, intent)
            else:
                plan.note(Why.NO_HEARTBEATS, "no scaling, no replacing: heartbeats cannot be read")
                _revive(plan, intent.replicas - len(plan.living(Life.RUNNING)))


def _plan_fullness(plan: _Plan, intent: Intent | None, heartbeats: Heartbeats) -> None:
    """How full the ready members are: said, and nothing done about it."""
    ready = [(m.process.engine_id, heartbeats[m.process.engine_id]) for m in plan.members if m.seen_ready(heartbeats)]
    found = fullness(intent, ready)
    plan.saturated = found.saturated
    plan.reasons.extend(found.reasons)


def _plan_endings(plan: _Plan) -> None:
    """Kill what overstays its drain, forget what has gone as told."""
    for member in plan.living(Life.STOPPING):
        since = plan.now if member.track.stopping_since is None else member.track.stopping_since
        engine_id = member.process.engine_id
        if plan.now - since < plan.policy.drain_s:
            plan.note(Why.DRAINING, f"{engine_id} drains")
            continue
        reason = plan.note(
            Why.DRAIN_OVERDUE, f"{engine_id} is killed: not gone {plan.policy.drain_s:g} s after its stop"
        )
        plan.actions.append(Kill(engine_id=engine_id, deployment=plan.name, reason=reason))
    for member in plan.living(Life.STOPPED):
        plan.release(member, Why.DRAINED, "has ended")


def _revive(plan: _Plan, most: int) -> None:
    """Start up to `most` crashed members again as they were: all that may be done without full evidence."""
    for member in plan.living(Life.CRASHED)[: max(most, 0)]:
        _restart(plan, member, member.process.spec)


def _plan_wanted(plan: _Plan, wanted: Wanted) -> None:
    """Scale and replace, never with fewer serving than wanted and at most one more running than wanted.

    A worked case, 2 wanted, both of an old spec (o), new ones (n) ready in capitals:
    O O → start: O O n → ready: O O N → stop one: O N → start: O N n → ready: O N N → stop: N N.
    """
    # A crashed member runs no spec any more: it is a vacancy, filled with the spec wanted now.
    active = plan.living(Life.RUNNING, Life.CRASHED)
    outdated = [m for m in active if m.process.life is Life.RUNNING and m.process.spec != wanted.spec]
    current = sorted((m for m in active if m not in outdated), key=lambda m: m.worth)
    surplus = max(len(current) - wanted.replicas, 0)
    for member in current[:surplus]:
        plan.release(member, Why.SCALE_DOWN, f"ends: {wanted.replicas} wanted")
    kept = current[surplus:]
    for member in sorted(kept, key=lambda m: m.process.engine_id):
        if member.process.life is Life.CRASHED:
            _restart(plan, member, wanted.spec)
        elif not member.ready:
            plan.note(Why.NOT_READY, f"{member.process.engine_id} is not ready yet")
    staying = _stop_outdated(plan, wanted, outdated, serving=sum(m.ready for m in kept))
    _start_missing(plan, wanted, len(kept), staying, stopped=len(outdated) - staying)


def _stop_outdated(plan: _Plan, wanted: Wanted, outdated: list[_Member], serving: int) -> int:
    """Stop outdated members as far as ready ones of the wanted spec take their place; how many stay."""
    spare = min(max(serving + len(outdated) - wanted.replicas, 0), len(outdated))
    for member in sorted(outdated, key=lambda m: m.worth)[:spare]:
        plan.release(member, Why.REPLACED, "ends: its place is taken by a replica of the wanted spec")
    return len(outdated) - spare


def _start_missing(plan: _Plan, wanted: Wanted, kept: int, outdated: int, stopped: int) -> None:
    missing = wanted.replicas - kept - outdated
    ids = _free_ids(plan)
    for _ in range(missing):
        reason = Reason(why=Why.SCALE_UP, text=f"{(engine_id := next(ids))} starts: {wanted.replicas} wanted")
        plan.start(engine_id, wanted.spec, reason, None, 0)
    # One beyond the wanted number at a time, and only when nothing still drains: memory for one more is all we ask.
    if outdated and missing == 0 and not stopped and not plan.living(Life.STOPPING):
        engine_id = next(ids)
        reason = Reason(why=Why.SPEC_CHANGED, text=f"{engine_id} starts: the deployment's bundle or settings changed")
        plan.start(engine_id, wanted.spec, reason, None, 0)
    elif outdated:
        plan.note(Why.SPEC_CHANGED, f"{outdated} still to be replaced: the deployment's bundle or settings changed")


def _restart(plan: _Plan, member: _Member, spec: Spec) -> None:
    """Start a crashed member again: at once with another spec, after a growing delay with the same."""
    process, policy = member.process, plan.policy
    if process.spec != spec:
        reason = Reason(why=Why.SPEC_CHANGED, text=f"{process.engine_id} starts with the wanted bundle and settings")
        plan.start(process.engine_id, spec, reason, process, 0)
        return
    failures = 1 if member.track.ready_for_s >= policy.stable_s else process.failures + 1
    delay_s = policy.refused_restart_s if process.refused else policy.restart_delay_s(failures)
    ended = plan.now if member.track.ended_since is None else member.track.ended_since
    if plan.now < ended + delay_s:
        text = f"{process.engine_id} waits {delay_s:g} s for start {process.starts + 1} after {process.last_exit}"
        plan.note(Why.BACKING_OFF, text)
        return
    reason = Reason(why=Why.CRASHED, text=f"{process.engine_id} starts again after {process.last_exit}")
    plan.start(process.engine_id, spec, reason, process, failures)


def _free_ids(plan: _Plan) -> Iterator[EngineId]:
    """`<deployment>-<n>`, smallest n first, without those that have a process or the record of one."""
    taken = {m.process.engine_id for m in plan.members}
    n = 0
    while True:
        n += 1
        engine_id = EngineId(f"{plan.name}-{n}")
        if engine_id not in taken:
            yield engine_id


def ordinal(engine_id: EngineId) -> int:
    """The n of `<deployment>-<n>`."""
    return int(engine_id.rpartition("-")[2])


def _newly_ended(process: Process, before: State, after: State) -> bool:
    """Whether this process ran (as far as we knew) at the last decision and does not now."""
    seen = before.tracks.get(process.engine_id)
    now_ended = after.tracks[process.engine_id].ended_since is not None
    return now_ended and (seen is None or seen.started_at != process.started_at or seen.ended_since is None)
