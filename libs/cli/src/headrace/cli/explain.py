"""`headrace explain`: why a request went where it went, and how that turned out."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from headrace.api.routing.v1 import routing_service_pb2 as pb
from headrace.api.routing.v1 import routing_service_pb2_grpc as rpc
from headrace.base.deadline import Deadline
from headrace.base.errors import HeadraceError, NotFound, StartError
from headrace.cli import render
from headrace.cli.home import Home
from headrace.rpc.client import Peer

ANSWER_S = 3.0
_COLUMNS = (
    ("replica", False), ("verdict", False), ("age s", True), ("queue s", True), ("prefill s", True),
    ("decode s", True), ("total s", True), ("cached", True), ("booked", True), ("running", True), ("waiting", True),
    ("ramp", True),
)  # fmt: skip


def router_addresses(home: Home) -> list[str]:
    """HEADRACE_ROUTER_ADDRESSES, else the running stack's; StartError when there is neither."""
    given = os.environ.get("HEADRACE_ROUTER_ADDRESSES", "")
    addresses = [part.strip() for part in given.split(",") if part.strip()]
    return addresses or [home.running().addresses["router"]]


async def explain(addresses: Sequence[str], request_id: str) -> None:
    """Print what all routers remember of a request, by attempt; StartError when none remembers anything."""
    asked = await asyncio.gather(*(_ask(address, request_id) for address in addresses))
    attempts = merged([decision for decisions, _ in asked for decision in decisions])
    if not attempts:
        silent = "; ".join(f"{a}: {why}" for a, (_, why) in zip(addresses, asked, strict=True) if why)
        raise StartError(
            f"no router remembers request {request_id!r}: it is not known, or older than the newest few thousand"
            + (f" (no answer from {silent})" if silent else "")
        )
    console = render.console()
    for decision in attempts:
        console.print(Text(headline(decision)))
        console.print(table(decision))
        console.print(Text(outcome_line(decision)))


async def _ask(address: str, request_id: str) -> tuple[list[pb.Decision], str]:
    """A router's decisions, and why it gave none at all; one that remembers nothing has answered, too."""
    async with Peer(address) as peer:
        stub = rpc.RoutingServiceStub(peer.channel)
        request = pb.ExplainRequest(request_id=request_id)
        try:
            answer = await peer.unary(stub.Explain, request, deadline=Deadline.after(ANSWER_S))
        except NotFound:
            return [], ""
        except HeadraceError as error:
            return [], error.message
    return list(answer.decisions), ""


def merged(decisions: Sequence[pb.Decision]) -> list[pb.Decision]:
    """One decision per attempt: one router may have placed it and another have heard how it went."""
    attempts: dict[int, pb.Decision] = {}
    for decision in sorted(decisions, key=lambda d: d.decided_unix_ns):
        attempts.setdefault(decision.attempt, pb.Decision()).MergeFrom(decision)
    return [attempts[number] for number in sorted(attempts)]


def headline(decision: pb.Decision) -> str:
    """Who runs an attempt, or why nobody does."""
    asked, placed = decision.asked, decision.placed
    what = f"attempt {decision.attempt}"
    if decision.HasField("asked"):
        what += f": {asked.deployment}, {asked.prompt_tokens} prompt tokens, at most {asked.max_tokens} to answer"
    if decision.refusal:
        return f"{what}\nrefused: {decision.refusal}"
    if not decision.HasField("placed"):
        return f"{what}\nplaced by a router that does not remember it"
    policy = pb.Policy.Name(placed.policy).removeprefix("POLICY_").lower()
    without = ", decided without Redis" if placed.degraded else ""
    return f"{what}\nplaced on {placed.engine_id} by {policy}{without}"


def table(decision: pb.Decision) -> Table:
    """A row for every replica that was looked at, the chosen one first, then those that could have been."""
    rows = Table(box=box.SIMPLE)
    for name, number in _COLUMNS:
        rows.add_column(name, justify="right" if number else "left")
    considered = decision.placed.considered if decision.HasField("placed") else decision.considered
    for one in sorted(considered, key=_order):
        rows.add_row(*(Text(cell) for cell in _cells(one)))
    return rows


def outcome_line(decision: pb.Decision) -> str:
    """How it went, against the estimate."""
    if not decision.HasField("outcome"):
        return "outcome: not reported (yet)"
    outcome, estimate = decision.outcome, decision.placed.estimate
    line = f"outcome: {pb.Outcome.Name(outcome.outcome).removeprefix('OUTCOME_').lower()}"
    if outcome.first_token_s:
        line += f", first token after {outcome.first_token_s:.3f} s"
        if decision.placed.HasField("estimate"):
            line += f" (estimated {estimate.queue_s + estimate.prefill_s:.3f})"
    line += f", {outcome.output_tokens} tokens in {outcome.total_s:.3f} s"
    most = decision.asked.max_tokens
    if decision.placed.HasField("estimate") and outcome.output_tokens and most:
        so_many_s = estimate.queue_s + estimate.prefill_s + estimate.decode_s * min(1, outcome.output_tokens / most)
        line += f" (estimated {so_many_s:.3f})"
    if outcome.HasField("cached_tokens"):
        line += f", {outcome.cached_tokens} prompt tokens were cached (believed {decision.placed.cached_tokens})"
    return line


_FIRST = {pb.VERDICT_CHOSEN: 0, pb.VERDICT_SLOWER: 1, pb.VERDICT_SATURATED: 2}


def _order(one: pb.Considered) -> tuple[int, float, str]:
    return _FIRST.get(one.verdict, 3), one.estimate.total_s, one.engine_id


def _cells(one: pb.Considered) -> list[str]:
    verdict = pb.Verdict.Name(one.verdict).removeprefix("VERDICT_").lower()
    cells = [one.engine_id, verdict, f"{one.age_s:.2f}"]
    if one.HasField("estimate"):
        e = one.estimate
        cells += [f"{seconds:.3f}" for seconds in (e.queue_s, e.prefill_s, e.decode_s, e.total_s)]
    else:
        cells += ["-"] * 4
    numbers = (one.cached_tokens, one.bookings, one.running, one.waiting)
    return [*cells, *(str(n) for n in numbers), f"{one.ramp:.2f}" if one.ramp else "-"]
