"""ControlService: the newest decision, as people and tools see it."""

from __future__ import annotations

import grpc

from headrace.api.control.v1 import control_service_pb2 as pb
from headrace.api.control.v1 import control_service_pb2_grpc as pb_grpc
from headrace.controller.core.decision import DeploymentView, EngineView
from headrace.controller.loops import ReconcileLoop
from headrace.controller.ports import IntentSource, Leadership

SERVICE = "headrace.api.control.v1.ControlService"
NOT_LEADING = "this controller does not lead, so it starts and stops nothing"


class ControlServicer(pb_grpc.ControlServiceServicer):
    """Answers from memory, so it answers while etcd and Redis are away."""

    def __init__(self, loop: ReconcileLoop, intent: IntentSource, leadership: Leadership) -> None:
        self._loop = loop
        self._intent = intent
        self._leadership = leadership

    async def GetStatus(
        self, request: pb.GetStatusRequest, context: grpc.aio.ServicerContext[pb.GetStatusRequest, pb.GetStatusResponse]
    ) -> pb.GetStatusResponse:
        """Desired against observed, per deployment."""
        leading = self._leadership.leading
        return pb.GetStatusResponse(
            deployments=[_deployment(view, leading) for view in self._loop.latest.deployments],
            etcd_connected=self._intent.connected,
        )


def _deployment(view: DeploymentView, leading: bool) -> pb.DeploymentStatus:
    said = [] if leading else [NOT_LEADING]
    if view.text:
        said.append(view.text)
    return pb.DeploymentStatus(
        name=view.name,
        desired=view.desired,
        ready=view.ready,
        processes=[_engine(engine) for engine in view.engines],
        reason="; ".join(said),
        saturated=view.saturated,
    )


def _engine(view: EngineView) -> pb.EngineProcess:
    process = view.process
    return pb.EngineProcess(
        engine_id=process.engine_id,
        deployment=process.deployment,
        pid=process.pid,
        state=view.standing.value,
        starts=process.starts,
        last_exit=process.last_exit,
        log_path=process.log_path,
    )
