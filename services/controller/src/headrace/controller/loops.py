"""The reconcile loop: wait for a change or a tick, look, decide, say why, act."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass

from headrace.controller.core.decision import Action, Decision, Start
from headrace.controller.core.fleet import Intent, Life, Process
from headrace.controller.core.memory import State, note_failed_start
from headrace.controller.core.policy import Policy
from headrace.controller.metrics import (
    BLIND_TURNS,
    DESIRED,
    EXITS,
    FAILED_ACTIONS,
    LEADING,
    READY,
    RECONCILE_S,
    SATURATED,
    STARTS,
)
from headrace.controller.ports import (
    HeartbeatSource,
    IntentSource,
    Judge,
    Leadership,
    Provisioner,
    ProvisionError,
)
from headrace.controller.wait import first_of
from headrace.observe.log import get_logger

log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How often to look, and how long one action may take, in seconds."""

    period_s: float = 1.0
    unsettled_period_s: float = 0.2
    """While something is on its way: people wait for it."""
    action_timeout_s: float = 10.0


class ReconcileLoop:
    """Makes observed equal wanted; `latest` is the newest decision, for the status."""

    def __init__(
        self,
        *,
        intent: IntentSource,
        heartbeats: HeartbeatSource,
        provisioner: Provisioner,
        judge: Judge,
        leadership: Leadership,
        policy: Policy,
        pace: Pace,
    ) -> None:
        self.latest = Decision()
        self._intent = intent
        self._heartbeats = heartbeats
        self._provisioner = provisioner
        self._judge = judge
        self._leadership = leadership
        self._policy = policy
        self._pace = pace
        self._state = State()
        self._said: dict[str, str] = {}

    async def run(self) -> None:
        """Turn until cancelled."""
        while True:
            await self.turn()
            settled = self.latest.settled and self._leadership.leading
            period_s = self._pace.period_s if settled else min(self._pace.period_s, self._pace.unsettled_period_s)
            await first_of(self._intent.changed(), timeout_s=period_s)

    async def turn(self) -> None:
        """Look, decide, act once."""
        LEADING.set(self._leadership.leading)
        intents = self._intent.read()
        if intents is None:
            BLIND_TURNS.labels("intent").inc()
            return
        with RECONCILE_S.time():
            processes = await self._observe()
            if processes is None:
                BLIND_TURNS.labels("processes").inc()
                return
            await self._reconcile(intents, processes)

    async def _reconcile(self, intents: Mapping[str, Intent], processes: tuple[Process, ...]) -> None:
        heartbeats = await self._heartbeats.read()
        if heartbeats is None:
            BLIND_TURNS.labels("heartbeats").inc()
        decision, self._state = self._judge(time.monotonic(), intents, processes, heartbeats, self._state, self._policy)
        self._publish(decision)
        for action in decision.actions:
            # Asked before each action: the lease may run out between two of them.
            if not self._leadership.leading:
                return
            await self._act(action)

    async def _observe(self) -> tuple[Process, ...] | None:
        try:
            async with asyncio.timeout(self._pace.action_timeout_s):
                return await self._provisioner.observe()
        except (ProvisionError, TimeoutError) as error:
            log.error("observation_failed", error=str(error) or "timed out")
            return None

    async def _act(self, action: Action) -> None:
        verb = type(action).__name__.lower()
        facts = {"engine": action.engine_id, "why": action.reason.why.value, "reason": action.reason.text}
        try:
            async with asyncio.timeout(self._pace.action_timeout_s):
                await self._provisioner.act(action)
        except (ProvisionError, TimeoutError) as error:
            text = str(error) or f"it took longer than {self._pace.action_timeout_s:g} s"
            FAILED_ACTIONS.labels(verb).inc()
            log.error("action_failed", action=verb, error=text, **facts)
            if isinstance(action, Start):
                self._state = note_failed_start(time.monotonic(), action.engine_id, text, self._state, self._policy)
            return
        if isinstance(action, Start):
            STARTS.labels(action.deployment).inc()
        log.info("action_taken", action=verb, **facts)

    def _publish(self, decision: Decision) -> None:
        """Show the decision: status, gauges, and a log line for what is new in it."""
        for name in {view.name for view in self.latest.deployments} - {view.name for view in decision.deployments}:
            DESIRED.remove(name)
            READY.remove(name)
            _show_saturated(name, None)
            self._said.pop(name, None)
        self.latest = decision
        for view in decision.deployments:
            DESIRED.labels(view.name).set(view.desired)
            READY.labels(view.name).set(view.ready)
            _show_saturated(view.name, view.saturated)
            if self._said.get(view.name) != view.text:
                self._said[view.name] = view.text
                log.info("deployment_judged", deployment=view.name, ready=view.ready, reason=view.text or "as wanted")
        for process in decision.ended:
            EXITS.labels(process.deployment, str(process.life is Life.STOPPED).lower()).inc()
            log.info("engine_ended", engine=process.engine_id, pid=process.pid, exit=process.last_exit)


def _show_saturated(deployment: str, saturated: int | None) -> None:
    if saturated is not None:
        SATURATED.labels(deployment).set(saturated)
        return
    with contextlib.suppress(KeyError):  # it was not known before, either
        SATURATED.remove(deployment)
