"""Where compose or Kubernetes runs the engines: there are no processes of ours to see, start or stop."""

from __future__ import annotations

from headrace.controller.core.decision import Action
from headrace.controller.core.fleet import Process
from headrace.controller.ports import ProvisionError


class ExternalProvisioner:
    """Goes with the judgement of `survey`, which looks at heartbeats alone and asks for no actions."""

    async def observe(self) -> tuple[Process, ...]:
        """None of ours."""
        return ()

    async def act(self, action: Action) -> None:
        """Refuse: a decision that asks for actions does not belong here."""
        raise ProvisionError(f"{action.engine_id} is run by something else")

    async def stop_all(self, grace_s: float) -> None:
        """None are ours to stop."""

    def close(self) -> None:
        """Nothing is held."""
