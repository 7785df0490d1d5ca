"""InferenceService: protobuf in, protobuf out. What a request may be is decided in `core.validation`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, TypeVar

from headrace.api.common.v1 import answer_pb2
from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.api.inference.v1 import inference_service_pb2_grpc as pb_grpc
from headrace.gateway.admission import Admission
from headrace.gateway.answer import Event
from headrace.gateway.core.validation import check_model, check_prompt
from headrace.gateway.parse import chat_ask, countable_prompt, generate_ask
from headrace.rpc.context import current_call

Response = TypeVar("Response", pb.GenerateResponse, pb.ChatResponse)


class InferenceServicer(pb_grpc.InferenceServiceServicer):
    """Generate and Chat differ in how the prompt arrives and in the response's type, nothing else."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        """Continue a prompt."""
        async with aclosing(self._admission.answer("Generate", request, generate_ask, current_call())) as events:
            async for event in events:
                yield _wrapped(event, pb.GenerateResponse())

    async def Chat(self, request: pb.ChatRequest, context: Any) -> AsyncIterator[pb.ChatResponse]:
        """Answer a conversation."""
        async with aclosing(self._admission.answer("Chat", request, chat_ask, current_call())) as events:
            async for event in events:
                yield _wrapped(event, pb.ChatResponse())

    async def CountTokens(self, request: pb.CountTokensRequest, context: Any) -> pb.CountTokensResponse:
        """Count the tokens of a prompt or a conversation; one beyond the context is counted, not refused."""
        call, catalog = current_call(), self._admission.catalog
        principal = await self._admission.identity.authenticate(call.metadata)
        check_model(request.model)
        prompt = countable_prompt(request)
        model = await catalog.model(request.model, principal, call.deadline)
        check_prompt(prompt, model.limits)
        ids = await self._admission.tokenize(model, prompt)
        return pb.CountTokensResponse(tokens=len(ids), max_model_len=model.limits.max_model_len)

    async def ListModels(self, request: pb.ListModelsRequest, context: Any) -> pb.ListModelsResponse:
        """List the deployments that the caller's key may use."""
        catalog = self._admission.catalog
        principal = await self._admission.identity.authenticate(current_call().metadata)
        models = [
            pb.Model(name=name, bundle_digest=model.bundle_digest, max_model_len=model.limits.max_model_len)
            for name, model in catalog.permitted(principal)
        ]
        return pb.ListModelsResponse(models=models)


def _wrapped(event: Event, response: Response) -> Response:
    match event:
        case answer_pb2.AnswerStarted():
            response.started.CopyFrom(event)
        case answer_pb2.AnswerDelta():
            response.delta.CopyFrom(event)
        case answer_pb2.AnswerFinished():
            response.finished.CopyFrom(event)
    return response
