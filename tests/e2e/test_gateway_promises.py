"""What the gateway promises each tenant while all goes well, and while an engine's worker stands still."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import openai
import psutil
import pytest
import pytest_asyncio

from headrace.api.common.v1 import sampling_pb2
from headrace.api.control.v1.intent_pb2 import Limits
from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.base.deadline import Deadline
from headrace.base.errors import DeadlinePassed, Exhausted, HeadraceError
from headrace.cli.intent import Wanted, apply
from headrace.coord.etcd.client import EtcdClient
from headrace.rpc.ids import new_request_id
from headrace.testkit.books import tenant_key, the_row, with_id
from headrace.testkit.cluster import DEPLOYMENT, Answer, Client, Cluster
from headrace.testkit.eventually import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")

WIDE = "wide"
MOST_WAITING = 5
AT_ONCE = 4
STREAMS = 1500
_SATURATED = rf'headrace_router_saturation\{{deployment="{DEPLOYMENT}"\}}'


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def standing(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """All services; `narrow` runs two sequences at a time, `wide` as many as come."""
    cluster = Cluster(tmp_path_factory.mktemp("standing"))
    try:
        await cluster.start_stores()
        await _deploy(cluster, WIDE)
        for kind in ("telemetry", "router"):
            cluster.start_service(kind)
        cluster.start_service("gateway", environ={"HEADRACE_GATEWAY_QUEUE_MAX_REQUESTS": str(MOST_WAITING)})
        patient: dict[str, object] = {"worker_stall_s": 300, "worker_lost_s": 300, "max_waiting": 2 * STREAMS}
        cluster.start_engine("narrow", simulate_itl_ms=2, max_num_seqs=2, **patient)
        cluster.start_engine(
            WIDE,
            deployment=WIDE,
            simulate_itl_ms=1,
            max_num_seqs=2 * STREAMS,
            max_num_batched_tokens=2 * STREAMS,
            kv_cache_memory_bytes=8 << 30,
            **patient,
        )
        await cluster.until_serving("telemetry", "router", "gateway")
        await cluster.until_ready("narrow", WIDE)
        yield cluster
    finally:
        assert await cluster.close() == []


async def _deploy(cluster: Cluster, name: str) -> None:
    etcd = EtcdClient([cluster.etcd.endpoint])
    try:
        await apply(etcd, Wanted(deployment=name, replicas=0))
    finally:
        await etcd.close()


@contextmanager
def worker_stopped(cluster: Cluster, engine_id: str) -> Iterator[None]:
    """The engine takes everything and makes nothing while the block runs."""
    (worker,) = psutil.Process(cluster.children[engine_id].pid).children()
    worker.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        worker.send_signal(signal.SIGCONT)


async def idle(cluster: Cluster) -> None:
    """Wait until nothing is counted as under way anywhere."""

    def zero() -> bool:
        for name in ("requests_in_flight", "open_slots", "queue_waiting.*", "quota_pending_writes"):
            value = cluster.metric("gateway", f"headrace_gateway_{name}")
            assert value == 0, f"{name} = {value}"
        for engine_id in ("narrow", WIDE):
            assert cluster.metric(engine_id, "headrace_engine_sequences_open") == 0, engine_id
        return True

    await eventually(zero, within_s=30)


def open_sequences(cluster: Cluster, engine_id: str) -> float:
    return cluster.metric(engine_id, "headrace_engine_sequences_open")


async def test_1500_streams_at_once_through_one_gateway_all_progress_and_finish(standing: Cluster) -> None:
    async with standing.client() as client:
        with worker_stopped(standing, WIDE):
            answers = [
                asyncio.create_task(
                    client.generate(
                        model=WIDE,
                        token_ids=[338, 351 + n % 64],
                        sampling={"max_tokens": 6, "ignore_eos": True},
                        deadline=Deadline.after(100),
                    )
                )
                for n in range(STREAMS)
            ]

            def all_under_way() -> bool:
                slots, ended = (
                    standing.metric("gateway", "headrace_gateway_open_slots"),
                    [a for a in answers if a.done()],
                )
                assert (slots, ended) == (STREAMS, [])
                return True

            await eventually(all_under_way, within_s=60, every_s=0.2)
        ended = await asyncio.gather(*answers)
    assert [len(answer.token_ids) for answer in ended] == [6] * STREAMS
    await idle(standing)


async def test_the_queue_keeps_exactly_its_cap_in_the_class_that_the_key_allows(standing: Cluster) -> None:
    key = await tenant_key(standing, "low", priority="batch")
    async with standing.client(api_key=key) as client:
        for _ in range(2):  # the second burst comes after the queue was idle
            with worker_stopped(standing, "narrow"):
                asked = [asyncio.create_task(_ended(client, priority=pb.PRIORITY_INTERACTIVE)) for _ in range(20)]
                await eventually(lambda asked=asked: _in_hand(standing, asked) == 20)
                assert _waiting(standing, "batch") == MOST_WAITING
                assert _waiting(standing, "interactive") + _waiting(standing, "standard") == 0
            ends = await asyncio.gather(*asked)
            assert set(ends) == {"OK", "QUEUE_FULL"}
            assert ends.count("OK") >= MOST_WAITING + 2, "whatever was not refused is answered"
            await idle(standing)


async def test_a_hundred_refused_requests_are_nobody_s_load_once_they_are_gone(standing: Cluster) -> None:
    async with standing.client() as client:
        with worker_stopped(standing, "narrow"):
            held = [asyncio.create_task(_ended(client)) for _ in range(MOST_WAITING + 4)]
            await eventually(lambda: _waiting(standing, "standard") == MOST_WAITING)
            refused = await asyncio.gather(*(_ended(client) for _ in range(100)))
            assert set(refused) == {"QUEUE_FULL"}
            assert _waiting(standing, "standard") == MOST_WAITING
        await asyncio.gather(*held)
    await idle(standing)

    def no_load() -> bool:
        """What routers place by, and the controller would add replicas by."""
        loads = [standing.metric("router", "headrace_router_bookings"), standing.metric("router", _SATURATED)]
        assert loads == [0, 0]
        return True

    await eventually(no_load, within_s=2)


def _waiting(cluster: Cluster, priority: str) -> float:
    return cluster.metric("gateway", rf'headrace_gateway_queue_waiting\{{priority="{priority}"\}}')


def _in_hand(cluster: Cluster, asked: list[asyncio.Task[str]]) -> float:
    return sum(task.done() for task in asked) + open_sequences(cluster, "narrow") + _waiting(cluster, "batch")


async def _ended(client: Client, **fields: Any) -> str:
    """How a short request ended; a refusal must say when to come back."""
    deadline = fields.pop("deadline", None) or Deadline.after(60)
    try:
        await client.generate(text="anything", sampling={"max_tokens": 4}, deadline=deadline, **fields)
    except Exhausted as refusal:
        return refusal.reason if refusal.retry_after_s else "no hint"
    except HeadraceError as error:
        return error.reason
    return "OK"


async def test_permits_return_after_a_hundred_cancels_before_the_first_byte(standing: Cluster) -> None:
    key = await tenant_key(standing, "few", Limits(max_concurrent_requests=AT_ONCE))
    chance = random.Random(3)
    async with standing.client(api_key=key) as client:
        for _ in range(25):
            asked = [asyncio.create_task(_ended(client, model=WIDE)) for _ in range(AT_ONCE)]
            await asyncio.wait(asked, timeout=chance.random() * 0.02)
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        await idle(standing)
        await _exactly_four_fit(standing, client)


async def test_permits_return_after_timeouts_though_the_engine_never_confirms_an_end(standing: Cluster) -> None:
    key = await tenant_key(standing, "late", Limits(max_concurrent_requests=AT_ONCE))
    async with standing.client(api_key=key) as client:
        with worker_stopped(standing, WIDE):
            late = [asyncio.create_task(_late(client)) for _ in range(AT_ONCE)]
            await eventually(lambda: open_sequences(standing, WIDE) == AT_ONCE)
            assert await asyncio.gather(*late) == [True] * AT_ONCE
            again: list[asyncio.Task[str]] = []

            async def admitted() -> bool:
                again.append(asyncio.create_task(_ended(client, model=WIDE)))
                await asyncio.wait(again[-1:], timeout=0.5)
                return not again[-1].done()

            await eventually(admitted, within_s=20)
        await asyncio.gather(*again)
        await idle(standing)
        await _exactly_four_fit(standing, client)


async def _late(client: Client) -> bool:
    try:
        await client.generate(model=WIDE, text="anything", sampling={"max_tokens": 4}, deadline=Deadline.after(1.0))
    except DeadlinePassed:
        return True
    return False


async def _exactly_four_fit(cluster: Cluster, client: Client) -> None:
    with worker_stopped(cluster, WIDE):
        asked = [asyncio.create_task(_ended(client, model=WIDE)) for _ in range(AT_ONCE)]
        await eventually(lambda: open_sequences(cluster, WIDE) == AT_ONCE)
        assert await _ended(client, model=WIDE) == "TOO_MANY_CONCURRENT"
    assert await asyncio.gather(*asked) == ["OK"] * AT_ONCE
    await idle(cluster)


async def test_the_time_to_the_first_token_is_that_of_the_first_and_gaps_are_those_between(standing: Cluster) -> None:
    def seconds(name: str) -> tuple[float, float]:
        return tuple(standing.metric("gateway", f"headrace_gateway_{name}_{part}") for part in ("sum", "count"))  # type: ignore[return-value]

    first_before, gaps_before = seconds("first_token_seconds"), seconds("inter_token_seconds")
    async with standing.client() as client:
        answer = await client.generate(model=WIDE, text="count", sampling={"max_tokens": 300, "ignore_eos": True})
    first_after, gaps_after = seconds("first_token_seconds"), seconds("inter_token_seconds")

    timings = answer.end.timings
    assert len(timings.inter_token_ms) == 299
    assert timings.first_token_ms + sum(timings.inter_token_ms) <= timings.total_ms + 1
    assert sum(timings.inter_token_ms) >= 299, "300 steps of a millisecond each lie behind the first token"
    assert first_after[1] - first_before[1] == 1
    assert 1000 * (first_after[0] - first_before[0]) == pytest.approx(timings.first_token_ms, rel=0.01, abs=0.5)
    assert gaps_after[1] - gaps_before[1] == 299
    assert 1000 * (gaps_after[0] - gaps_before[0]) == pytest.approx(sum(timings.inter_token_ms), rel=0.01, abs=0.5)


async def test_a_client_that_leaves_is_recorded_as_cancelled_with_all_that_its_engine_made(standing: Cluster) -> None:
    request_id = new_request_id()
    made_before = standing.metric(WIDE, "headrace_engine_tokens_total")
    ok_before = standing.metric("gateway", r'headrace_gateway_requests_total\{.*outcome="OK".*\}')
    request = pb.GenerateRequest(
        model=WIDE, text="on and on", sampling=sampling_pb2.SamplingParams(max_tokens=4000, ignore_eos=True)
    )
    heard = Answer()
    async with standing.client() as client:
        metadata = with_id(client, request_id)
        async with client.peer.stream(
            client.stub.Generate, request, deadline=Deadline.after(60), metadata=metadata
        ) as events:
            async for event in events:
                heard.take(event)
                if len(heard.token_ids) >= 20:
                    break
    row = await the_row(standing, request_id)
    await idle(standing)
    made = standing.metric(WIDE, "headrace_engine_tokens_total") - made_before
    assert (row.outcome, row.tenant, row.model) == ("CANCELLED", "tests", WIDE)
    assert heard.started is not None
    assert row.prompt_tokens == heard.started.prompt_tokens > 0
    assert row.output_tokens == made >= 20
    assert standing.metric("gateway", r'headrace_gateway_requests_total\{.*outcome="OK".*\}') == ok_before
    assert standing.metric("gateway", r'headrace_gateway_requests_total\{.*outcome="CANCELLED".*\}') >= 1


async def test_a_key_alone_says_who_pays_and_where_it_runs_whatever_headers_say(standing: Cluster) -> None:
    key = await tenant_key(standing, "honest", Limits(requests_per_minute=1))
    forged = {
        "x-tenant": "tests",
        "x-headrace-tenant": "tests",
        "x-user": "somebody",
        "x-headrace-engine": "narrow",
        "x-gateway-destination-endpoint": "127.0.0.1:1",
        "x-routing-strategy": "random",
        "routing-strategy": "random",
        "external-filter": "engine=narrow",
        "x-label-filter": "engine=narrow",
        "x-headrace-priority": "interactive",
    }
    ids = [new_request_id() for _ in range(2)]
    async with standing.client(api_key=key) as client:
        client.metadata |= forged | {"x-request-id": ids[0]}
        answer = await client.generate(model=WIDE, text="who am I", sampling={"max_tokens": 4})
        client.metadata |= {"x-request-id": ids[1], "x-tenant": "another"}
        with pytest.raises(Exhausted):
            await client.generate(model=WIDE, text="who am I", sampling={"max_tokens": 4})
    assert answer.end.engine_id == WIDE
    assert (await the_row(standing, ids[0])).tenant == "honest"


async def test_usage_is_metered_though_the_client_did_not_ask_to_see_it(standing: Cluster) -> None:
    request_id = new_request_id()
    async with openai.AsyncOpenAI(
        base_url=f"http://{standing.http_addresses['gateway']}/v1", api_key=standing.api_key, max_retries=0
    ) as client:
        stream = await client.chat.completions.create(
            model=DEPLOYMENT,
            messages=[{"role": "user", "content": "hello"}],
            stream=True,
            max_tokens=12,
            extra_headers={"x-request-id": request_id},
            extra_body={"ignore_eos": True},
        )
        chunks = [chunk async for chunk in stream]
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)
    row = await the_row(standing, request_id)
    assert (row.outcome, row.output_tokens) == ("OK", 12)
    assert row.prompt_tokens > 0
