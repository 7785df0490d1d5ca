"""What a client can send wrong, and the status that says so and names the field."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.base.deadline import Deadline
from headrace.base.errors import DeadlinePassed, InvalidRequest, NotFound, Unauthenticated
from headrace.testkit.cluster import Cluster

BAD = [
    ({"text": ""}, "prompt"),
    ({"token_ids": [1, 2, 49_152]}, "token_ids.ids[2]"),
    ({"token_ids": []}, "prompt"),
    ({"text": "x", "sampling": {"max_tokens": 0}}, "sampling.max_tokens"),
    ({"text": "x", "sampling": {"temperature": -0.1}}, "sampling.temperature"),
    ({"text": "x", "sampling": {"temperature": float("nan")}}, "sampling.temperature"),
    ({"text": "x", "sampling": {"temperature": 2.1}}, "sampling.temperature"),
    ({"text": "x", "sampling": {"top_p": 0.0}}, "sampling.top_p"),
    ({"text": "x", "sampling": {"top_p": 1.1}}, "sampling.top_p"),
    ({"text": "x", "sampling": {"stop": ["a", ""]}}, "sampling.stop[1]"),
    ({"text": "x", "sampling": {"stop": ["a"] * 17}}, "sampling.stop"),
    ({"text": "x", "sampling": {"stop_token_ids": [5, 60_000]}}, "sampling.stop_token_ids[1]"),
    ({"text": "word " * 9_000}, "prompt"),
]


async def test_each_bad_field_is_named_and_the_next_request_is_served(fleet: Cluster) -> None:
    fleet.start_engine("a", simulate_itl_ms=0)
    await fleet.until_ready("a")
    async with fleet.client() as client:
        for request, field in BAD:
            with pytest.raises(InvalidRequest) as invalid:
                await client.generate(**request)
            assert invalid.value.field == field, request
        with pytest.raises(InvalidRequest) as invalid:
            await client.chat(messages=[("user", "hi"), ("wizard", "hm")])
        assert invalid.value.field == "messages[1].role"
        with pytest.raises(InvalidRequest):
            await client.chat(messages=[])
        with pytest.raises(NotFound, match="no-such-model"):
            await client.generate(model="no-such-model", text="hi")
        with pytest.raises(DeadlinePassed):
            await client.generate(text="hi", deadline=Deadline.after(0.002))
        good = await client.generate(text="hi", sampling={"max_tokens": 3, "temperature": 1e-6, "top_k": 10**6})
        assert len(good.token_ids) == 3


@pytest.mark.parametrize("key", ["", "hr_" + "x" * 43, "nonsense"])
async def test_a_bad_key_is_unauthenticated_and_no_engine_sees_the_request(fleet: Cluster, key: str) -> None:
    fleet.start_engine("a", simulate_itl_ms=0)
    await fleet.until_ready("a")
    async with fleet.client(api_key=key) as client:
        with pytest.raises(Unauthenticated):
            await client.generate(text="hi")
        with pytest.raises(Unauthenticated):
            await client.peer.unary(
                client.stub.ListModels, pb.ListModelsRequest(), deadline=Deadline.after(5), metadata=client.metadata
            )
    assert fleet.metric("a", "headrace_engine_prompt_tokens_total") == 0


async def test_errors_carry_error_info_and_bad_request_details(fleet: Cluster) -> None:
    from google.rpc import error_details_pb2
    from grpc_status import rpc_status

    async with fleet.client() as client:
        call: Any = client.stub.Generate(
            pb.GenerateRequest(model="test", text=""), timeout=5, metadata=tuple(client.metadata.items())
        )
        with pytest.raises(grpc.aio.AioRpcError) as raw:
            await call.read()
    status: Any = rpc_status.from_call(raw.value)  # type: ignore[arg-type]
    names = {d.type_url.rpartition("/")[2] for d in status.details}
    assert names == {"google.rpc.ErrorInfo", "google.rpc.BadRequest"}
    info = error_details_pb2.ErrorInfo()
    status.details[0].Unpack(info)
    assert (info.domain, bool(info.reason), "request_id" in info.metadata) == ("headrace", True, True)
