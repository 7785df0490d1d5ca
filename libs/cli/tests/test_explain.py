"""`headrace explain`: the table, the outcome against the estimate, several routers, and nobody who remembers."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from rich.console import Console

from headrace.api.routing.v1 import routing_service_pb2 as pb
from headrace.api.routing.v1 import routing_service_pb2_grpc as rpc
from headrace.base.errors import StartError
from headrace.cli import explain
from headrace.cli.home import Home

PLACED = pb.Decision(
    attempt=1,
    decided_unix_ns=5,
    asked=pb.PlaceRequest(request_id="req-1842", deployment="chat", prompt_tokens=140, max_tokens=80),
    placed=pb.PlaceResponse(
        engine_id="B",
        policy=pb.POLICY_LEAST_COMPLETION_TIME,
        cached_tokens=64,
        estimate=pb.Estimate(queue_s=0.1, prefill_s=0.3, decode_s=1.6, total_s=2.0),
        considered=[
            pb.Considered(engine_id="A", verdict=pb.VERDICT_STALE, age_s=12.0),
            pb.Considered(
                engine_id="B",
                verdict=pb.VERDICT_CHOSEN,
                age_s=0.25,
                estimate=pb.Estimate(queue_s=0.1, prefill_s=0.3, decode_s=1.6, total_s=2.0),
                cached_tokens=64,
                bookings=3,
                ramp=1.0,
            ),
        ],
    ),
)
ENDED = pb.Decision(
    attempt=1,
    outcome=pb.ReleaseRequest(
        outcome=pb.OUTCOME_OK, first_token_s=0.5, total_s=1.5, output_tokens=40, cached_tokens=48
    ),
)


class Remembering(rpc.RoutingServiceServicer):
    """A router with one decision, or none."""

    def __init__(self, decision: pb.Decision | None) -> None:
        self._decision = decision

    async def Explain(self, request: pb.ExplainRequest, context: Any) -> pb.ExplainResponse:
        if self._decision is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no decision")
        return pb.ExplainResponse(decisions=[self._decision])


@asynccontextmanager
async def routers(*decisions: pb.Decision | None) -> AsyncIterator[list[str]]:
    servers, addresses = [], []
    for decision in decisions:
        server = grpc.aio.server()
        rpc.add_RoutingServiceServicer_to_server(Remembering(decision), server)
        addresses.append(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
        await server.start()
        servers.append(server)
    try:
        yield addresses
    finally:
        for server in servers:
            await server.stop(0)


def printed(decision: pb.Decision) -> str:
    out = io.StringIO()
    Console(file=out, width=200).print(explain.table(decision))
    return out.getvalue()


def test_every_replica_has_a_row_with_its_verdict_and_numbers_the_chosen_one_first():
    rows = [line.split() for line in printed(PLACED).splitlines() if line.strip()]
    assert rows[2][:7] == ["B", "chosen", "0.25", "0.100", "0.300", "1.600", "2.000"]
    assert rows[2][7:9] == ["64", "3"]
    assert rows[3][:7] == ["A", "stale", "12.00", "-", "-", "-", "-"]


async def test_what_one_router_placed_and_another_heard_the_end_of_is_told_as_one(capsys: pytest.CaptureFixture[str]):
    async with routers(ENDED, None, PLACED) as addresses:
        await explain.explain([*addresses, "127.0.0.1:1"], "req-1842")
    out = capsys.readouterr().out
    assert "placed on B by least_completion_time" in out
    assert "first token after 0.500 s (estimated 0.400)" in out
    # Half of the 80 tokens that were estimated for: 0.4 + 1.6 / 2.
    assert "40 tokens in 1.500 s (estimated 1.200)" in out
    assert "48 prompt tokens were cached (believed 64)" in out


def test_a_refusal_is_told_with_its_reason_and_the_replicas_that_stood_in_the_way():
    refused = pb.Decision(
        attempt=2, refusal="ALL_STALE: old", considered=[pb.Considered(engine_id="A", verdict=pb.VERDICT_STALE)]
    )
    assert explain.headline(refused).endswith("refused: ALL_STALE: old")
    assert "stale" in printed(refused)


async def test_a_request_that_nobody_remembers_is_an_error_that_names_who_did_not_answer():
    async with routers(None) as addresses:
        with pytest.raises(StartError, match=r"no router remembers request 'gone'.*127\.0\.0\.1:1: "):
            await explain.explain([*addresses, "127.0.0.1:1"], "gone")


def test_routers_are_those_of_the_environment_else_the_running_stacks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("HEADRACE_ROUTER_ADDRESSES", "a:1, b:2")
    assert explain.router_addresses(Home(tmp_path)) == ["a:1", "b:2"]
    monkeypatch.delenv("HEADRACE_ROUTER_ADDRESSES")
    with pytest.raises(StartError):
        explain.router_addresses(Home(tmp_path))
