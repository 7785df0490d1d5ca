"""What a decision says: actions, and why each deployment is not (yet) as wanted."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from headrace.controller.core.fleet import EngineId, Process, Spec


class Why(Enum):
    """Kinds of reasons, for logs and counters."""

    SCALE_UP = "scale_up"
    SCALE_DOWN = "scale_down"
    CRASHED = "crashed"
    BACKING_OFF = "backing_off"
    START_FAILED = "start_failed"
    SPEC_CHANGED = "spec_changed"
    REPLACED = "replaced"
    DELETED = "deleted"
    DRAINED = "drained"
    DRAINING = "draining"
    DRAIN_OVERDUE = "drain_overdue"
    NOT_READY = "not_ready"
    INTENT_INVALID = "intent_invalid"
    INTENT_UNKNOWN = "intent_unknown"
    NO_HEARTBEATS = "no_heartbeats"
    NOT_OURS_TO_START = "not_ours_to_start"
    SATURATED = "saturated"
    LOAD_UNKNOWN = "load_unknown"


_OF_LOAD = frozenset({Why.SATURATED, Why.LOAD_UNKNOWN})
"""These tell of work, not of processes: nothing is on its way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Why something is done or waited for: the kind for programs, the text for people."""

    why: Why
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Start a process for `engine_id`; `starts` counts this one, `failures` the crashes in a row before it."""

    engine_id: EngineId
    deployment: str
    spec: Spec
    starts: int
    failures: int
    last_exit: str
    reason: Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Tell a running process to drain and end."""

    engine_id: EngineId
    deployment: str
    reason: Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """End a process that did not end by itself."""

    engine_id: EngineId
    deployment: str
    reason: Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Forget:
    """Drop the record of a process that is gone and not wanted back."""

    engine_id: EngineId
    deployment: str
    reason: Reason


Action = Start | Stop | Kill | Forget


class Standing(Enum):
    """An engine's state for people, by the protocol's names."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    BACKING_OFF = "backing_off"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineView:
    """One engine as the status shows it."""

    process: Process
    standing: Standing


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentView:
    """One deployment as the status shows it; no reasons: as wanted. `saturated` is None when it is not known."""

    name: str
    desired: int
    ready: int
    engines: tuple[EngineView, ...]
    reasons: tuple[Reason, ...]
    saturated: int | None = None

    @property
    def text(self) -> str:
        """The reasons in one line."""
        return "; ".join(reason.text for reason in self.reasons)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Actions in the order to take them, the picture they were decided on, and processes newly seen to have ended."""

    actions: tuple[Action, ...] = ()
    deployments: tuple[DeploymentView, ...] = ()
    ended: tuple[Process, ...] = ()

    @property
    def settled(self) -> bool:
        """Whether every deployment is as wanted."""
        return all(reason.why in _OF_LOAD for view in self.deployments for reason in view.reasons)
