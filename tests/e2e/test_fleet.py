"""Whole fleets of simulated engines behind a real gateway and router: load, cancels, faults."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from headrace.api.common.v1 import answer_pb2, sampling_pb2
from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.base.deadline import Deadline
from headrace.base.errors import Unavailable
from headrace.testkit.cluster import DEPLOYMENT, Cluster
from headrace.testkit.eventually import eventually

LENGTH = answer_pb2.FINISH_REASON_LENGTH
SIMULATED_KV_BYTES_PER_TOKEN = 46_080


async def assert_idle(cluster: Cluster, *engine_ids: str) -> None:
    """Every gauge of load is back to zero: nothing leaked on any way out."""

    def zero() -> bool:
        for engine_id in engine_ids:
            for name in ("sequences_open", "running", "waiting", "kv_blocks_used"):
                value = cluster.metric(engine_id, f"headrace_engine_{name}")
                assert value == 0, f"{engine_id}: {name} = {value}"
        for name in ("gateway", "router"):
            for sample, value in cluster.metrics(name).items():
                # Attach streams and watches stay open on purpose; requests and slots may not.
                if any(word in sample for word in ("in_flight", "open_slots", "bookings")) and "Attach" not in sample:
                    assert value == 0, f"{name}: {sample} = {value}"
        return True

    await eventually(zero, within_s=10)


async def test_32_concurrent_streams_all_finish_and_every_gauge_returns_to_zero(fleet: Cluster) -> None:
    engines = ("e-0", "e-1")
    for engine_id in engines:
        # Eight at a time each: whatever the measured rates, a queue of 24 makes the other replica the faster one.
        fleet.start_engine(engine_id, simulate_itl_ms=5, max_num_seqs=8)
    await fleet.until_ready(*engines)
    async with fleet.client() as client:
        answers = await asyncio.gather(
            *(client.generate(text=f"question {n}", sampling={"max_tokens": 40}) for n in range(32))
        )
    assert [a.end.finish_reason for a in answers] == [LENGTH] * 32
    assert [len(a.token_ids) for a in answers] == [40] * 32
    assert [a.end.usage.completion_tokens for a in answers] == [40] * 32
    assert {a.end.engine_id for a in answers} == set(engines), "both replicas take part"
    await assert_idle(fleet, *engines)


async def test_equal_prompts_get_equal_answers_from_every_replica(fleet: Cluster) -> None:
    answers = []
    async with fleet.client() as client:
        for engine_id in ("e-0", "e-1"):
            engine = fleet.start_engine(engine_id, simulate_itl_ms=1)
            await fleet.until_ready(engine_id)
            answers.append(await client.generate(text="the same", sampling={"max_tokens": 24}))
            engine.stop()
    assert [a.end.engine_id for a in answers] == ["e-0", "e-1"]
    assert answers[0].token_ids == answers[1].token_ids
    assert answers[0].text == answers[1].text


async def test_a_cancelled_stream_frees_its_sequence_within_ten_steps(fleet: Cluster) -> None:
    fleet.start_engine("e-0", simulate_itl_ms=20)
    await fleet.until_ready("e-0")
    request = pb.GenerateRequest(
        model=DEPLOYMENT, text="go on and on", sampling=sampling_pb2.SamplingParams(max_tokens=2000)
    )
    async with fleet.client() as client:
        async with client.stream(request) as events:
            deltas = 0
            async for event in events:
                deltas += event.WhichOneof("event") == "delta"
                if deltas == 3:
                    break
            assert fleet.metric("e-0", "headrace_engine_sequences_open") == 1
        emitted = fleet.metric("e-0", "headrace_engine_tokens_total")
        # The answer would last 40 s more. How many milliseconds it takes is tests/bench/cancel.py's to measure.
        await eventually(lambda: fleet.metric("e-0", "headrace_engine_sequences_open") == 0, within_s=5)
        after = fleet.metric("e-0", "headrace_engine_tokens_total") - emitted
    assert after <= 10, "200 ms are ten steps of 20 ms"
    await assert_idle(fleet, "e-0")


async def test_a_deadline_that_passes_mid_answer_frees_the_sequence(fleet: Cluster) -> None:
    from headrace.base.errors import DeadlinePassed

    fleet.start_engine("e-0", simulate_itl_ms=20)
    await fleet.until_ready("e-0")
    async with fleet.client() as client:
        with pytest.raises(DeadlinePassed):
            await client.generate(text="slow", sampling={"max_tokens": 2000}, deadline=Deadline.after(0.5))
    await assert_idle(fleet, "e-0")


async def test_an_engine_killed_before_its_first_token_costs_the_client_nothing(fleet: Cluster) -> None:
    # A 4,000-token prompt at 400 tokens/s: ten seconds in which the first engine can be killed.
    fleet.start_engine("slow", simulate_prefill_tokens_per_s=400, simulate_itl_ms=1)
    beats = await fleet.until_ready("slow")
    async with fleet.client() as client:
        answer = asyncio.ensure_future(
            client.generate(text="word " * 1500, sampling={"max_tokens": 16}, deadline=Deadline.after(60))
        )
        await eventually(lambda: fleet.metric("slow", "headrace_engine_sequences_open") == 1)
        fleet.start_engine("spare", simulate_prefill_tokens_per_s=50_000, simulate_itl_ms=1)
        await fleet.until_ready("spare")
        os.kill(beats["slow"].pid, signal.SIGKILL)
        result = await answer
    assert result.end.engine_id == "spare"
    assert result.end.attempts == 2
    assert len(result.token_ids) == 16
    await assert_idle(fleet, "spare")


async def test_an_engine_killed_mid_answer_is_continued_elsewhere_without_gap_or_repeat(fleet: Cluster) -> None:
    fleet.start_engine("a", simulate_itl_ms=30)
    beats = await fleet.until_ready("a")
    async with fleet.client() as client:
        answer = asyncio.ensure_future(client.generate(text="tell me", sampling={"max_tokens": 60}))
        await eventually(lambda: fleet.metric("a", "headrace_engine_tokens_total") >= 5)
        fleet.start_engine("b", simulate_itl_ms=1)
        await fleet.until_ready("b")
        os.kill(beats["a"].pid, signal.SIGKILL)
        broken = await answer
        unbroken = await client.generate(text="tell me", sampling={"max_tokens": 60})
    assert broken.end.attempts == 2
    assert broken.end.engine_id == "b"
    assert broken.token_ids == unbroken.token_ids
    assert broken.text == unbroken.text
    assert broken.end.usage == unbroken.end.usage


async def test_a_frozen_engine_is_noticed_and_its_answer_continued_elsewhere(fleet: Cluster) -> None:
    frozen = fleet.start_engine("a", simulate_itl_ms=5, fault="freeze_after_tokens=10")
    await fleet.until_ready("a")
    async with fleet.client() as client:
        answer = asyncio.ensure_future(client.generate(text="tell me", sampling={"max_tokens": 40}))
        await eventually(lambda: _state(frozen.pid) == "T")
        fleet.start_engine("b", simulate_itl_ms=1)
        await fleet.until_ready("b")
        result = await answer
        unbroken = await client.generate(text="tell me", sampling={"max_tokens": 40})
    assert result.end.engine_id == "b"
    assert result.token_ids == unbroken.token_ids
    frozen.kill()  # it cannot drain


def _state(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


async def test_garbage_from_an_engine_never_reaches_the_client(fleet: Cluster) -> None:
    fleet.start_engine("a", simulate_itl_ms=2, fault="garbage_after_tokens=5")
    await fleet.until_ready("a")
    async with fleet.client() as client:
        answer = asyncio.ensure_future(client.generate(text="tell me", sampling={"max_tokens": 30}))
        fleet.start_engine("b", simulate_itl_ms=1)
        result = await answer
        unbroken = await client.generate(text="tell me", sampling={"max_tokens": 30})
    assert result.token_ids == unbroken.token_ids


async def test_no_replica_is_unavailable_with_a_retry_hint(fleet: Cluster) -> None:
    async with fleet.client() as client:
        with pytest.raises(Unavailable) as away:
            await client.generate(text="anyone?", sampling={"max_tokens": 4})
    assert away.value.retry_after_s is not None


async def test_a_full_cache_delays_and_never_fails_what_can_fit_later(fleet: Cluster) -> None:
    # 64 blocks of 16 tokens hold two of these sequences at a time, and a third only until they grow.
    fleet.start_engine("a", simulate_itl_ms=1, kv_cache_memory_bytes=64 * 16 * SIMULATED_KV_BYTES_PER_TOKEN)
    await fleet.until_ready("a")
    async with fleet.client() as client:
        answers = await asyncio.gather(
            *(client.generate(text="word " * 300, sampling={"max_tokens": 64}) for _ in range(12))
        )
    assert [len(a.token_ids) for a in answers] == [64] * 12
    await assert_idle(fleet, "a")
