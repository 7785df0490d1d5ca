"""What a request costs, whatever happens on its way: one usage record, one settled reservation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import product
from typing import Any

import pytest

from headrace.api.control.v1.intent_pb2 import Limits, Tenant
from headrace.api.telemetry.v1 import telemetry_service_pb2 as telemetry_pb2
from headrace.api.telemetry.v1 import telemetry_service_pb2_grpc as telemetry_grpc
from headrace.base.errors import Exhausted, Forbidden, InvalidRequest, StreamBroken
from headrace.bundle import intent, keys
from headrace.coord.embedded import EmbeddedRedis
from headrace.coord.redis.store import open_redis
from headrace.rpc.server import Server, ServerSettings

SAID = "The headrace brings steady water to the mill; the wheel turns evenly."


class Telemetry(telemetry_grpc.TelemetryServiceServicer):
    """Keeps what it is sent."""

    def __init__(self) -> None:
        self.usage: list[telemetry_pb2.UsageRecord] = []
        self.audit: list[telemetry_pb2.AuditEvent] = []

    async def RecordUsage(self, request: Any, context: Any) -> telemetry_pb2.RecordUsageResponse:
        self.usage.extend(request.records)
        return telemetry_pb2.RecordUsageResponse(new_records=len(request.records))

    async def RecordAudit(self, request: Any, context: Any) -> telemetry_pb2.RecordAuditResponse:
        self.audit.extend(request.events)
        return telemetry_pb2.RecordAuditResponse(new_events=len(request.events))


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with EmbeddedRedis.start(tmp_path_factory.mktemp("redis")) as redis:
        yield redis.url


@pytest.fixture
async def telemetry(redis_url: str, world: Any) -> AsyncIterator[Any]:
    redis = open_redis(redis_url)
    await redis.flushdb()
    await redis.aclose()
    await world.etcd.delete(keys.tenant_key("t"))
    servicer = Telemetry()
    server = Server(ServerSettings(reflection=False), service_name="telemetry")
    server.add(
        telemetry_grpc.add_TelemetryServiceServicer_to_server, servicer, "headrace.api.telemetry.v1.TelemetryService"
    )
    servicer.settings = {"telemetry_address": await server.start(), "redis_url": redis_url}  # type: ignore[attr-defined]
    yield servicer
    await server.drain(grace_s=0)
    await world.etcd.delete(keys.tenant_key("t"))


async def limited(world: Any, **fields: Any) -> None:
    """Give the tests' tenant terms."""
    await world.etcd.put(keys.tenant_key("t"), intent.encode(Tenant(name="t", **fields)))


async def only(telemetry: Telemetry, eventually: Any) -> telemetry_pb2.UsageRecord:
    """The one record of the one request."""
    await eventually(lambda: telemetry.usage)
    await asyncio.sleep(0.2)  # time for a second one that must not come
    assert len(telemetry.usage) == 1
    return telemetry.usage[0]


async def test_an_answer_leaves_one_record_with_what_the_client_was_told(
    world: Any, telemetry: Any, eventually: Any
) -> None:
    await world.engine("e-1")
    client = await world.gateway(**telemetry.settings)

    heard = await client.generate("Say it.", max_tokens=20)

    record = await only(telemetry, eventually)
    assert record.request_id == heard.started[0].request_id
    assert (record.tenant, record.credential, record.model, record.outcome) == ("t", "test", "bytes", "OK")
    assert (record.prompt_tokens, record.output_tokens) == (7, 20)
    assert [(a.attempt, a.engine_id, a.epoch, a.output_tokens, a.outcome) for a in record.attempts] == [
        (1, "e-1", 7, 20, "OK")
    ]


async def test_a_client_that_leaves_pays_for_what_the_engine_had_sent(
    world: Any, telemetry: Any, eventually: Any
) -> None:
    async def endless(engine: Any, stream: Any, submit: Any) -> None:
        while submit.slot not in engine.cancels:
            stream.step({submit.slot: 65})
            engine.sent += 1
            await asyncio.sleep(0.001)

    engine = await world.engine("e-1", endless)
    client = await world.gateway(**telemetry.settings)
    tokens = 0
    async with client.stream(max_tokens=5000) as events:
        async for event in events:
            tokens += len(event.delta.token_ids)
            if tokens >= 20:
                break

    record = await only(telemetry, eventually)
    assert record.outcome == "CANCELLED"
    assert record.prompt_tokens == 7
    assert record.output_tokens >= 20
    # The script sends one more when the cancel comes between its look and its step.
    assert record.output_tokens in (engine.sent, engine.sent - 1)


async def test_an_answer_that_moves_is_one_record_and_each_token_is_counted_once(
    world: Any, telemetry: Any, eventually: Any
) -> None:
    async def break_after_5(engine: Any, stream: Any, submit: Any) -> None:
        for token in engine.rest(submit)[:5]:
            stream.step({submit.slot: token})
        stream.break_off()

    await world.engine("e-1", break_after_5)
    await world.engine("e-2")
    client = await world.gateway(**telemetry.settings)

    heard = await client.generate("Say it.", max_tokens=40)

    assert heard.text == SAID[:40]
    record = await only(telemetry, eventually)
    assert (record.prompt_tokens, record.output_tokens, record.outcome) == (7, 40, "OK")
    assert [(a.engine_id, a.output_tokens, a.outcome) for a in record.attempts] == [
        ("e-1", 5, "BROKEN"),
        ("e-2", 35, "OK"),
    ]
    await eventually(lambda: len(world.router.reports) == 2)
    lost, served = sorted(world.router.reports, key=lambda report: report.attempt)
    assert (lost.outcome, lost.engine_id, lost.output_tokens) == (5, "e-1", 5)  # OUTCOME_TRANSPORT
    assert (served.outcome, served.output_tokens) == (1, 35)
    assert 0 < served.first_token_s <= served.total_s


async def test_an_answer_that_cannot_go_on_is_still_paid_for_once(world: Any, telemetry: Any, eventually: Any) -> None:
    async def break_after_5(engine: Any, stream: Any, submit: Any) -> None:
        for token in engine.rest(submit)[:5]:
            stream.step({submit.slot: token})
        stream.break_off()

    await world.engine("e-1", break_after_5)
    client = await world.gateway(**telemetry.settings, resume_wait_s=0.0)

    with pytest.raises(StreamBroken):
        await client.generate("Say it.", max_tokens=40)

    record = await only(telemetry, eventually)
    assert (record.prompt_tokens, record.output_tokens, record.outcome) == (7, 5, "STREAM_BROKEN")


async def test_an_answer_cut_at_a_stop_text_costs_what_its_usage_says(
    world: Any, telemetry: Any, eventually: Any
) -> None:
    await world.engine("e-1")
    client = await world.gateway(**telemetry.settings)

    heard = await client.generate(stop=["brings"])

    record = await only(telemetry, eventually)
    assert record.output_tokens == heard.finished[0].usage.completion_tokens
    assert record.attempts[0].output_tokens >= record.output_tokens


class Meeting:
    """An engine's script that after 5 tokens waits for `now`, and then ends the answer, its stream or both."""

    def __init__(self) -> None:
        self.now = asyncio.Event()
        self.steps: tuple[str, ...] = ()
        self.pause_s = 0.0

    async def script(self, engine: Any, stream: Any, submit: Any) -> None:
        if not submit.emitted_tokens:
            for token in engine.rest(submit)[:5]:
                stream.step({submit.slot: token})
            await self.now.wait()
        for what in ("end",) if submit.emitted_tokens else self.steps:  # one that has moved simply ends
            if what == "end":
                stream.step({}, stream.finish(submit.slot, "STOP"))
            else:
                stream.break_off()
            await asyncio.sleep(self.pause_s)

    async def ask(self, client: Any, leave_after_s: float | None) -> None:
        """One request, whose client may leave when it has 5 tokens."""
        self.now.clear()
        tokens = 0
        async with client.stream(max_tokens=40) as events:
            async for event in events:
                tokens += len(event.delta.token_ids)
                if tokens < 5:
                    continue
                self.now.set()
                if leave_after_s is not None:
                    await asyncio.sleep(leave_after_s)
                    return


async def test_however_end_break_and_leaving_meet_all_is_given_back_exactly_once(
    world: Any, telemetry: Any, eventually: Any, gauges: Any
) -> None:
    meeting = Meeting()
    await limited(world, limits=Limits(max_concurrent_requests=1))
    engines = [await world.engine(name, meeting.script) for name in ("e-1", "e-2")]
    client = await world.gateway(**telemetry.settings)
    cases = list(
        product((("end",), ("break",), ("end", "break"), ("break", "end")), (0.0, 0.002), (None, 0.0, 0.001, 0.003))
    )
    for meeting.steps, meeting.pause_s, leave in cases:
        await meeting.ask(client, leave)
        await eventually(lambda: gauges()["in_flight"] == gauges()["open_slots"] == 0)

    begun = [(submit.request_id, submit.attempt) for engine in engines for submit in engine.submits]
    await eventually(lambda: set(begun) <= set(world.router.released))
    assert len(world.router.released) == len(set(world.router.released))
    await eventually(lambda: len(telemetry.usage) >= len(cases))
    assert len({record.request_id for record in telemetry.usage}) == len(telemetry.usage) == len(cases)
    meeting.now.clear()  # one permit, neither lost nor gained
    async with client.stream(max_tokens=40) as events:
        await anext(aiter(events))
        with pytest.raises(Exhausted):
            await client.generate(max_tokens=5)


async def test_a_refused_request_leaves_no_record_and_reaches_no_engine(
    world: Any, telemetry: Any, eventually: Any
) -> None:
    engine = await world.engine("e-1")
    client = await world.gateway(**telemetry.settings)

    with pytest.raises(InvalidRequest):
        await client.generate(temperature=9.0)
    await client.generate(max_tokens=1)

    await only(telemetry, eventually)
    assert len(engine.submits) == 1


async def test_limits_of_the_tenant_hold_and_say_when_to_come_back(world: Any, telemetry: Any) -> None:
    await limited(world, limits=Limits(requests_per_minute=2))
    engine = await world.engine("e-1")
    client = await world.gateway(**telemetry.settings)

    for _ in range(2):
        await client.generate(max_tokens=1)
    with pytest.raises(Exhausted) as refused:
        await client.generate(max_tokens=1)

    assert refused.value.reason == "RATE_LIMITED"
    assert 0 < (refused.value.retry_after_s or 0) <= 61
    assert len(engine.submits) == 2


async def test_a_reservation_is_settled_to_what_was_used(world: Any, telemetry: Any, eventually: Any) -> None:
    await limited(world, limits=Limits(tokens_per_minute=120))
    await world.engine("e-1")
    client = await world.gateway(**telemetry.settings)

    await client.generate("Say it.", max_tokens=100, stop=["headrace"])  # reserves 107, uses about 7 + 12

    async def fits() -> bool:
        try:
            await client.generate("Say it.", max_tokens=80, stop=["headrace"])
        except Exhausted:
            return False
        return True

    await eventually(fits)


async def test_policy_filters_refuse_and_clamp_and_both_are_audited(
    world: Any, telemetry: Any, eventually: Any
) -> None:
    await limited(world, max_output_tokens=5, denied_patterns=["forbidden (fruit|words)"])
    engine = await world.engine("e-1")
    client = await world.gateway(**telemetry.settings)

    heard = await client.generate("Say it.", max_tokens=40)
    with pytest.raises(Forbidden) as refused:
        await client.generate("Tell me of forbidden fruit.")

    assert heard.text == SAID[:5]
    assert "fruit" not in refused.value.message
    assert len(engine.submits) == 1
    await eventually(lambda: len(telemetry.audit) == 2)
    assert sorted((e.subject, e.decision) for e in telemetry.audit) == [
        ("policy.denied_patterns", "REFUSED"),
        ("policy.max_output", "CHANGED"),
    ]
    assert "fruit" not in str(telemetry.audit)


async def test_a_prompt_s_hashes_reach_the_router_and_are_those_of_the_tenant(world: Any, telemetry: Any) -> None:
    from headrace.base.prefix import PrefixKey

    await world.engine("e-1")
    client = await world.gateway(**telemetry.settings, prefix_cache_key="ab" * 32)

    await client.generate("x" * 40, max_tokens=1)

    key = PrefixKey.parse("ab" * 32)
    root = key.root(bundle_digest=world.bundle_digest, adapter_digest="", isolation_domain="t")
    asked = world.router.asked[0]
    assert asked.block_hashes == b"".join(key.chain(root, list(b"x" * 40), 16))
    assert (asked.block_size, asked.tenant, asked.sequences) == (16, "t", 1)


async def test_an_engine_started_again_may_finish_the_answer_it_lost(world: Any, telemetry: Any) -> None:
    async def die_once(engine: Any, stream: Any, submit: Any) -> None:
        if engine.epoch > 7:
            for token in engine.rest(submit)[: submit.sampling.max_tokens - 1]:
                stream.step({submit.slot: token})
            last = engine.rest(submit)[submit.sampling.max_tokens - 1]
            stream.step({submit.slot: last}, stream.finish(submit.slot, "LENGTH"))
            return
        for token in engine.rest(submit)[:5]:
            stream.step({submit.slot: token})
        engine.epoch = 8
        stream.break_off()

    await world.engine("e-1", die_once)
    client = await world.gateway(**telemetry.settings)

    heard = await client.generate(max_tokens=30)

    assert (heard.text, heard.finished[0].attempts) == (SAID[:30], 2)
