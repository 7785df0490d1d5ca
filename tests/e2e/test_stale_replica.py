"""The stale-replica trace: evidence older than the bound excludes a replica, whatever else speaks for it."""

from __future__ import annotations

import os
import signal

from headrace.api.routing.v1 import routing_service_pb2 as pb
from headrace.api.routing.v1 import routing_service_pb2_grpc as rpc
from headrace.base.deadline import Deadline
from headrace.rpc.client import Peer
from headrace.testkit.cluster import DEPLOYMENT, Cluster
from headrace.testkit.eventually import eventually

FRESHNESS_S = 10.0


async def test_req_1842_goes_to_b_because_a_is_stale_and_the_record_says_so(fleet: Cluster) -> None:
    # A is by far the fastest: only its age can speak against it. C serves another deployment.
    fleet.start_engine("A", simulate_itl_ms=1, simulate_prefill_tokens_per_s=1e6)
    fleet.start_engine("B", simulate_itl_ms=10)
    fleet.start_engine("C", simulate_itl_ms=1, deployment="other")
    beats = await fleet.until_ready("A", "B", "C")
    async with Peer(fleet.addresses["router"]) as router, fleet.client() as client:
        stub = rpc.RoutingServiceStub(router.channel)

        async def decide(request_id: str) -> tuple[str, dict[str, str], dict[str, float]]:
            placed = await router.unary(
                stub.Place,
                pb.PlaceRequest(
                    request_id=request_id,
                    attempt=1,
                    deployment=DEPLOYMENT,
                    bundle_digest=fleet.bundle_digest,
                    prompt_tokens=100,
                    max_tokens=20,
                ),
                deadline=Deadline.after(5),
            )
            verdicts = {c.engine_id: pb.Verdict.Name(c.verdict) for c in placed.considered}
            return placed.engine_id, verdicts, {c.engine_id: c.age_s for c in placed.considered}

        async def preferred() -> bool:
            chosen, verdicts, _ = await decide("req-1841")
            assert verdicts == {"A": "VERDICT_CHOSEN", "B": "VERDICT_SLOWER", "C": "VERDICT_OTHER_BUNDLE"}
            return chosen == "A"

        await eventually(preferred)  # the router's view is up to one poll older than Redis

        os.kill(beats["A"].pid, signal.SIGSTOP)
        try:

            async def excluded() -> bool:
                return (await decide("req-probe"))[1]["A"] == "VERDICT_STALE"

            await eventually(excluded, within_s=FRESHNESS_S + 5, every_s=0.2)
            chosen, verdicts, ages = await decide("req-1842")
            assert chosen == "B"
            assert verdicts == {"A": "VERDICT_STALE", "B": "VERDICT_CHOSEN", "C": "VERDICT_OTHER_BUNDLE"}
            assert ages["A"] > FRESHNESS_S > ages["B"]

            client.metadata["x-request-id"] = "req-1842"
            answer = await client.generate(text="hello", sampling={"max_tokens": 20})
            assert answer.started is not None
            assert answer.started.request_id == "req-1842"
            assert answer.end.engine_id == "B"
            assert answer.end.attempts == 1
            assert len(answer.token_ids) == 20
        finally:
            os.kill(beats["A"].pid, signal.SIGCONT)
