"""What a starting stack tells, and when it gives up."""

from __future__ import annotations

import pytest

from headrace.api.control.v1 import control_service_pb2 as pb
from headrace.base.errors import StartError
from headrace.cli.child import free_port
from headrace.cli.readiness import Readiness, engine_words


def status(reason: str = "", state: str = "", last_exit: str = "") -> pb.GetStatusResponse:
    """One deployment; no process of it without a `state`."""
    processes = [pb.EngineProcess(engine_id="m-1", state=state, last_exit=last_exit)] if state else []
    deployment = pb.DeploymentStatus(name="m", desired=1, reason=reason, processes=processes)
    return pb.GetStatusResponse(deployments=[deployment])


def test_each_stage_of_an_engines_start_has_its_words() -> None:
    assert engine_words(pb.GetStatusResponse(), "m") == "engine is starting"
    assert engine_words(status(reason="m-1 starts: 1 wanted"), "m") == "m-1 starts: 1 wanted"
    assert "loading the model" in engine_words(status(state="starting"), "m")


def test_an_engine_that_ended_ends_the_wait_with_its_words() -> None:
    with pytest.raises(StartError, match="engine m-1 could not start: exit code 1: no memory"):
        engine_words(status(state="backing_off", last_exit="exit code 1: no memory"), "m")


def test_the_engines_of_other_deployments_do_not_count() -> None:
    assert (
        engine_words(status(state="backing_off", last_exit="exit code 1: no memory"), "other") == "engine is starting"
    )


async def test_nothing_listens_yet_is_a_state_and_no_error() -> None:
    addresses = {name: f"127.0.0.1:{free_port()}" for name in ("gateway", "router", "controller")}
    async with Readiness(addresses, "m", replicas=1) as readiness:
        assert await readiness.look() == (("gateway is starting", "engine is starting"), False)
    async with Readiness(addresses, "m", replicas=0) as readiness:
        assert await readiness.look() == (("gateway is starting", "no engine is wanted"), False)
