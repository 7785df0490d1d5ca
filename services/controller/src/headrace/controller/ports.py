"""What the reconcile loop needs from the world."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from headrace.controller.core.decision import Action, Decision
from headrace.controller.core.fleet import EngineId, Heartbeat, Intent, Process
from headrace.controller.core.memory import Heartbeats, State
from headrace.controller.core.policy import Policy

Judge = Callable[
    [float, Mapping[str, Intent], Sequence[Process], Heartbeats | None, State, Policy], tuple[Decision, State]
]
"""`reconcile.decide`, or `survey.survey` where engines are not ours to start."""

BundleSource = Callable[[str], bytes | None]
"""The bundle of a digest as protobuf JSON; None when it was never seen."""


class ProvisionError(Exception):
    """An engine could not be started, stopped or looked at; the text is one line for people."""


class Provisioner(Protocol):
    """Runs engine processes."""

    async def observe(self) -> tuple[Process, ...]:
        """Every engine process that is recorded, running or not; ProvisionError when that cannot be told."""

    async def act(self, action: Action) -> None:
        """Carry out one action; ProvisionError says why not. Safe to repeat."""

    async def stop_all(self, grace_s: float) -> None:
        """Drain every engine, kill what is left after the grace, drop the records."""

    def close(self) -> None:
        """Let go of what this process holds; engines keep running."""


class IntentSource(Protocol):
    """What is wanted."""

    @property
    def connected(self) -> bool:
        """Whether the store answers; without it the last intent stays in force."""

    def read(self) -> Mapping[str, Intent] | None:
        """Every deployment that exists; None until the store was read for the first time."""

    async def changed(self) -> None:
        """Return when the intent may differ from the last `read`."""


class HeartbeatSource(Protocol):
    """What engines say of themselves."""

    async def read(self) -> Mapping[EngineId, Heartbeat] | None:
        """The newest heartbeat of each engine; None when the store does not answer."""


class Leadership(Protocol):
    """Whether this controller is the one that acts."""

    @property
    def leading(self) -> bool:
        """False as soon as another one may lead."""
