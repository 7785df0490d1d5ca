"""What the controller remembers between two decisions: since when each engine has been as it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from headrace.controller.core.fleet import EngineId, Heartbeat, Life, Phase, Process
from headrace.controller.core.policy import Policy

Heartbeats = Mapping[EngineId, Heartbeat]


@dataclass(frozen=True, slots=True, kw_only=True)
class Track:
    """One life of one engine; times are the `now` of decisions. `ready_seen` is when it was last seen ready."""

    pid: int
    started_at: float
    ready_since: float | None = None
    ready_seen: float | None = None
    stopping_since: float | None = None
    ended_since: float | None = None

    @property
    def ready_for_s(self) -> float:
        """How long it was ready without a break until it ended; 0 for one that never was."""
        if self.ready_since is None or self.ended_since is None:
            return 0.0
        return self.ended_since - self.ready_since


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedStart:
    """A process that could not even be created, e.g. for want of disk space."""

    tries: int
    retry_at: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Goes into a decision and comes out of it; empty at the start of a controller, which loses only waiting times."""

    tracks: Mapping[EngineId, Track] = field(default_factory=dict)
    failed_starts: Mapping[EngineId, FailedStart] = field(default_factory=dict)


def remember(
    now: float, processes: Sequence[Process], heartbeats: Heartbeats | None, state: State, policy: Policy
) -> State:
    """The state brought up to what is seen now; `heartbeats` None: unknown, so what was known of readiness stays."""
    tracks = {p.engine_id: _track(now, p, heartbeats, state.tracks.get(p.engine_id), policy) for p in processes}
    running = {p.engine_id for p in processes if p.life is Life.RUNNING}
    failed = {
        engine_id: failure
        for engine_id, failure in state.failed_starts.items()
        if engine_id not in running and now < failure.retry_at + policy.longest_restart_s
    }
    return State(tracks=tracks, failed_starts=failed)


def note_failed_start(now: float, engine_id: EngineId, text: str, state: State, policy: Policy) -> State:
    """The state after a start that failed: the next try waits, longer each time."""
    before = state.failed_starts.get(engine_id)
    tries = before.tries + 1 if before else 1
    failure = FailedStart(tries=tries, retry_at=now + policy.restart_delay_s(tries), text=text)
    return replace(state, failed_starts={**state.failed_starts, engine_id: failure})


def is_ready(process: Process, heartbeats: Heartbeats, policy: Policy) -> bool:
    """Whether this very life of the process says, freshly, that it takes work for the bundle it was started with."""
    beat = heartbeats.get(process.engine_id)
    return (
        beat is not None
        and process.life is Life.RUNNING
        and beat.phase is Phase.READY
        and beat.age_s <= policy.freshness_s
        and beat.pid == process.pid
        # A pid can come back; an epoch from before this process started belongs to an earlier life.
        and beat.epoch_ns / 1e9 >= process.started_at - policy.clock_slack_s
        and beat.bundle_digest == process.spec.bundle_digest
    )


def _track(now: float, process: Process, heartbeats: Heartbeats | None, before: Track | None, policy: Policy) -> Track:
    if before is None or (before.pid, before.started_at) != (process.pid, process.started_at):
        before = Track(pid=process.pid, started_at=process.started_at)
    if process.life in (Life.STOPPED, Life.CRASHED):
        return before if before.ended_since is not None else replace(before, ended_since=now)
    if process.life is Life.STOPPING and before.stopping_since is None:
        before = replace(before, stopping_since=now)
    if heartbeats is None:
        return before
    if not is_ready(process, heartbeats, policy):
        return replace(before, ready_since=None)
    return replace(before, ready_seen=now, ready_since=now if before.ready_since is None else before.ready_since)
