"""One prompt through five services, on the model that ships, against the Hugging Face reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.api.common.v1 import answer_pb2
from headrace.api.telemetry.v1 import telemetry_service_pb2 as telemetry_pb
from headrace.api.telemetry.v1 import telemetry_service_pb2_grpc as telemetry_grpc
from headrace.base.deadline import Deadline
from headrace.base.errors import HeadraceError
from headrace.bundle.shipped import shipped_model_path
from headrace.cli.intent import Wanted
from headrace.rpc.client import Peer
from headrace.testkit.cluster import DEPLOYMENT, Cluster
from headrace.testkit.eventually import eventually
from headrace.text.tokenizer import Message, Tokenizer, load_tokenizer

PROMPT = "Why is the sky blue?"
TOKENS = 48

pytestmark = pytest.mark.timeout(300)


def reference_answers(tokenizer: Tokenizer, path: Path) -> dict[str, list[int]]:
    """Greedy float32 continuations by transformers, of the chat prompt and of the bare text."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers' own deprecations are not ours to mend
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        model: Any = AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=torch.float32)
        prompts = {
            "chat": tokenizer.encode_chat([Message("user", PROMPT)]),
            "text": tokenizer.encode("Once upon a time"),
        }
        answers = {}
        for name, ids in prompts.items():
            out = model.generate(
                torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), max_new_tokens=TOKENS, do_sample=False
            )
            answers[name] = out[0, len(ids) :].tolist()
    return answers


async def spans_of(cluster: Cluster, trace_id: str, wanted: set[str]) -> list[telemetry_pb.Span]:
    """The trace's spans once all of `wanted` services have sent theirs, with all parents named."""
    async with Peer(cluster.addresses["telemetry"]) as peer:
        stub = telemetry_grpc.TelemetryServiceStub(peer.channel)

        async def complete() -> list[telemetry_pb.Span]:
            try:
                answer = await peer.unary(
                    stub.GetTrace, telemetry_pb.GetTraceRequest(trace_id=trace_id), deadline=Deadline.after(5)
                )
            except HeadraceError:
                return []
            spans = list(answer.spans)
            sent = {s.span_id for s in spans} | {""}
            whole = wanted <= {s.service for s in spans} and {s.parent_span_id for s in spans} <= sent
            return spans if whole else []

        found: list[telemetry_pb.Span] = await eventually(complete, within_s=10)
        return found


async def test_an_answer_streams_through_all_services_equal_to_the_reference_in_one_trace(cluster: Cluster) -> None:
    await cluster.start_stores(Wanted(deployment=DEPLOYMENT, replicas=1))
    for kind in ("telemetry", "router", "controller", "gateway"):
        cluster.start_service(kind)
    path = shipped_model_path()
    tokenizer = load_tokenizer(path)
    expected = reference_answers(tokenizer, path)
    await cluster.until_serving("telemetry", "router", "controller", "gateway")
    await cluster.until_ready(f"{DEPLOYMENT}-1", within_s=120)
    async with cluster.client() as client:
        chat = await client.chat(messages=[("user", PROMPT)], sampling={"max_tokens": TOKENS})
        text = await client.generate(text="Once upon a time", sampling={"max_tokens": TOKENS})
    assert chat.token_ids == expected["chat"]
    assert text.token_ids == expected["text"]
    assert chat.text == tokenizer.decode(expected["chat"])
    assert chat.end.finish_reason == answer_pb2.FINISH_REASON_LENGTH
    assert chat.end.usage.completion_tokens == TOKENS
    assert chat.messages > TOKENS // 4, "the answer streams, it does not come at once"

    timings = chat.end.timings
    assert 0 < timings.queue_ms + timings.prefill_ms <= timings.first_token_ms * 1.01 + 1
    assert timings.first_token_ms < timings.total_ms
    assert len(timings.inter_token_ms) == TOKENS - 1

    assert chat.started is not None
    spans = await spans_of(cluster, chat.started.trace_id, {"gateway", "router", "engine"})
    by_id = {s.span_id: s for s in spans}
    roots = [s for s in spans if s.parent_span_id not in by_id]
    assert [s.service for s in roots] == ["gateway"], "one trace, one root, every other span hangs below it"
    assert {s.attributes["headrace.request_id"] for s in spans if "headrace.request_id" in s.attributes} == {
        chat.started.request_id
    }
