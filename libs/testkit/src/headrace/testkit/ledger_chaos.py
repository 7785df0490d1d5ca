"""Many requests while clients leave and processes are killed, and what the ledger must hold of them afterwards.

Engines tell a collector in this process how many tokens each sequence had, gateways tell telemetry. `differences` holds
the one against the other and against what clients received.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from headrace.api.common.v1 import answer_pb2, sampling_pb2
from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.api.telemetry.v1 import telemetry_service_pb2 as telemetry_pb
from headrace.base.deadline import Deadline
from headrace.base.errors import HeadraceError
from headrace.testkit.books import usage_rows, usage_sums, with_id
from headrace.testkit.cluster import DEPLOYMENT, Client, Cluster
from headrace.testkit.eventually import eventually
from headrace.testkit.spans import SequenceSpan, SpanCollector, span_collector

GATEWAYS = ("gateway-0", "gateway-1", "gateway-2")
STEADY, MORTAL = ("steady-0", "steady-1"), ("mortal-0", "mortal-1")
_LONGEST = 12
_DEADLINE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Storm:
    """How much of what: `parallel` clients; of a hundred requests `leave` lose their client mid-answer, `hasty` before
    they hear anything; a process is killed, and started again, `kills` times, gateways, engines and telemetry in turn.
    """

    requests: int
    parallel: int = 40
    leave: int = 15
    hasty: int = 5
    kills: int = 7
    seed: int = 1


@dataclass(slots=True, kw_only=True)
class Heard:
    """What the client of one request heard of it."""

    request_id: str
    started: bool = False
    tokens: int = 0
    finished: answer_pb2.AnswerFinished | None = None
    error: str = ""
    left: bool = False


@dataclass(slots=True, kw_only=True)
class Aftermath:
    """Everything that was written down about the requests, by whom."""

    heard: list[Heard]
    spans: list[SequenceSpan]
    rows: list[telemetry_pb.UsageRecord]
    sums: telemetry_pb.UsageSum
    engine_tokens: dict[str, int]
    spans_dropped: float
    kills: Counter[str] = field(default_factory=Counter)


async def ride_out(cluster: Cluster, storm: Storm) -> Aftermath:
    """Start everything on `cluster`, let the storm pass, and wait until all records have arrived."""
    async with span_collector() as collector:
        await _started(cluster, collector)
        heard: list[Heard] = []
        kills: Counter[str] = Counter()
        begun: list[int] = []
        async with AsyncExitStack() as stack:
            doors = [await stack.enter_async_context(cluster.client(gateway)) for gateway in GATEWAYS]
            await asyncio.gather(_crowd(doors, storm, heard, begun), _kill(cluster, storm, begun, kills))
        await cluster.until_serving("telemetry", *GATEWAYS)
        await eventually(lambda: _quiet(cluster), within_s=60, every_s=0.2)
        await eventually(lambda: _all_exported(cluster, collector), within_s=30, every_s=0.2)
        return Aftermath(
            heard=heard,
            spans=collector.sequences,
            rows=await usage_rows(cluster),
            sums=await usage_sums(cluster),
            engine_tokens={e: int(cluster.metric(e, "headrace_engine_tokens_total")) for e in STEADY},
            spans_dropped=sum(cluster.metric(e, "headrace_spans_dropped_total.*") for e in STEADY),
            kills=kills,
        )


def differences(after: Aftermath) -> list[str]:
    """What does not agree, in words; nothing may."""
    found = [*_once_each(after), *_missing(after), *_against_engines(after), *_against_clients(after)]
    if after.spans_dropped:
        found.append(f"{after.spans_dropped:.0f} spans were dropped: engines did not say everything")
    return found


async def _started(cluster: Cluster, collector: SpanCollector) -> None:
    await cluster.start_stores()
    cluster.engine_spans_to = collector.address
    for kind, names in (("telemetry", ["telemetry"]), ("router", ["router"]), ("gateway", GATEWAYS)):
        for name in names:
            # Their spans are of no use here, and cost telemetry more than all records.
            cluster.start_service(kind, name=name, environ={"HEADRACE_OTLP_ENDPOINT": ""})
    for engine_id in (*STEADY, *MORTAL):
        cluster.start_engine(engine_id, simulate_itl_ms=2, simulate_step_ms=0, max_num_seqs=64)
    await cluster.until_serving("telemetry", "router", *GATEWAYS)
    await cluster.until_ready(*STEADY, *MORTAL)


async def _crowd(doors: Sequence[Client], storm: Storm, heard: list[Heard], begun: list[int]) -> None:
    chance = random.Random(storm.seed)
    numbers = iter(range(storm.requests))

    async def one() -> None:
        for number in numbers:
            begun.append(number)
            kind = chance.randrange(100)
            leave_after = chance.randrange(1, _LONGEST) if kind < storm.leave else None
            patience_s = chance.random() * 0.03 if storm.leave <= kind < storm.leave + storm.hasty else None
            tokens = chance.randrange(2, _LONGEST + 1)
            for turn in itertools.count():
                record = Heard(request_id=f"storm-{storm.seed}-{number:06d}-{turn}")
                heard.append(record)
                await _ask(doors[(number + turn) % len(doors)], record, tokens, leave_after, patience_s)
                if not record.error:
                    break  # else a new request, with its own record, at the next gateway

    await asyncio.gather(*(one() for _ in range(storm.parallel)))


async def _ask(door: Client, record: Heard, tokens: int, leave_after: int | None, patience_s: float | None) -> None:
    request = pb.GenerateRequest(
        model=DEPLOYMENT,
        text=f"question {record.request_id}",
        sampling=sampling_pb2.SamplingParams(max_tokens=tokens, ignore_eos=True),
    )
    metadata = with_id(door, record.request_id)
    try:
        async with asyncio.timeout(patience_s):
            async with door.peer.stream(
                door.stub.Generate, request, deadline=Deadline.after(_DEADLINE_S), metadata=metadata
            ) as events:
                async for event in events:
                    _hear(record, event)
                    if leave_after is not None and record.tokens >= leave_after:
                        record.left = True
                        return
    except TimeoutError:
        record.left = True
    except HeadraceError as error:
        record.error = error.reason
        await asyncio.sleep(0.02)


def _hear(record: Heard, event: pb.GenerateResponse) -> None:
    record.started = True
    match event.WhichOneof("event"):
        case "delta":
            record.tokens += len(event.delta.token_ids)
        case "finished":
            record.finished = event.finished


async def _kill(cluster: Cluster, storm: Storm, begun: list[int], kills: Counter[str]) -> None:
    """At even parts of the load, each of them by the number of requests, never by the clock."""
    chance = random.Random(storm.seed + 1)
    for turn in range(storm.kills):
        due = storm.requests * (turn + 1) // (storm.kills + 1)
        while len(begun) < due:
            await asyncio.sleep(0.005)
        match turn % 3:
            case 0:
                victim = chance.choice(GATEWAYS)
            case 1:
                victim = chance.choice(MORTAL)
            case _:
                victim = "telemetry"
        os.kill(cluster.children[victim].pid, signal.SIGKILL)
        kills[victim] += 1
        await asyncio.to_thread(cluster.children[victim].wait, 10.0)
        cluster.children[victim].start()


async def _quiet(cluster: Cluster) -> bool:
    """Nothing runs, and no gateway keeps a record that telemetry has not got."""
    for gateway in GATEWAYS:
        for name in ("requests_in_flight", "open_slots", "ledger_backlog_records.*"):
            assert cluster.metric(gateway, f"headrace_gateway_{name}") == 0, f"{gateway}: {name}"
    for engine in STEADY:
        assert cluster.metric(engine, "headrace_engine_sequences_open") == 0, engine
    before = await usage_sums(cluster)
    await asyncio.sleep(0.5)
    after = await usage_sums(cluster)
    assert before == after, "records still arrive"
    return True


def _all_exported(cluster: Cluster, collector: SpanCollector) -> bool:
    counted = Counter(span.engine_id for span in collector.sequences)
    for engine in STEADY:
        finished = cluster.metric(engine, "headrace_engine_finishes_total.*")
        assert counted[engine] == finished, f"{engine} ended {finished} sequences and told of {counted[engine]}"
    return True


def _once_each(after: Aftermath) -> list[str]:
    times = Counter(row.request_id for row in after.rows)
    found = [f"{request_id} has {count} rows" for request_id, count in times.items() if count > 1]
    if after.sums.requests != len(times):
        found.append(f"telemetry counts {after.sums.requests} requests, and lists {len(times)}")
    for name in ("prompt_tokens", "cached_tokens", "output_tokens"):
        listed, summed = sum(getattr(row, name) for row in after.rows), getattr(after.sums, name)
        if listed != summed:
            found.append(f"{name}: rows have {listed}, sums {summed}")
    return found


def _missing(after: Aftermath) -> list[str]:
    there = {row.request_id for row in after.rows}
    seen = {span.request_id for span in after.spans} | {heard.request_id for heard in after.heard if heard.started}
    return [f"{request_id} was served and has no row" for request_id in sorted(seen - there)]


def _against_engines(after: Aftermath) -> list[str]:
    """Attempt by attempt on the engines that lived: equal, but for what a killed gateway had not received yet."""
    rows = {row.request_id: row for row in after.rows}
    attempts = {(r.request_id, a.attempt): (r, a) for r in after.rows for a in r.attempts}
    found, unreceived = [], Counter[str]()
    made: dict[str, int] = defaultdict(int)
    for span in after.spans:
        made[span.engine_id] += span.tokens
        row, attempt = attempts.get((span.request_id, span.attempt), (None, None))
        if row is None or attempt is None:
            if span.request_id in rows:
                found.append(f"{span} is no attempt of its row")
            continue
        short = span.tokens - attempt.output_tokens
        unreceived[span.engine_id] += short
        lossy = row.recovered or span.engine_id in MORTAL
        if short < 0 or (short > 0 and not lossy) or attempt.engine_id != span.engine_id:
            found.append(f"{span} has {attempt.output_tokens} tokens from {attempt.engine_id} in its row")
    noted = Counter[str]()
    for _, attempt in attempts.values():
        noted[attempt.engine_id] += attempt.output_tokens
    for engine, tokens in after.engine_tokens.items():
        if tokens != made[engine]:
            found.append(f"{engine} counts {tokens} tokens, its sequences had {made[engine]}")
        if noted[engine] + unreceived[engine] != tokens:
            found.append(f"{engine} made {tokens} tokens, the ledger has {noted[engine]} + {unreceived[engine]} lost")
    return found


def _against_clients(after: Aftermath) -> list[str]:
    rows = {row.request_id: row for row in after.rows}
    found = []
    for heard in after.heard:
        row = rows.get(heard.request_id)
        if row is None:
            continue
        whole = sum(attempt.output_tokens for attempt in row.attempts)
        if not heard.tokens <= row.output_tokens <= whole or (row.outcome == "CANCELLED" and row.output_tokens < whole):
            found.append(f"{row.request_id}: client {heard.tokens}, row {row.output_tokens}, attempts {whole} tokens")
        if heard.finished is not None:
            usage = heard.finished.usage
            told = (usage.prompt_tokens, usage.completion_tokens)
            if told != (row.prompt_tokens, row.output_tokens) or heard.tokens != row.output_tokens:
                found.append(f"{row.request_id}: its client was told {told}, its row is {row}")
            if row.outcome not in ("OK", "GATEWAY_LOST"):
                found.append(f"{row.request_id} was answered and its row says {row.outcome}")
        elif heard.left and row.outcome not in ("CANCELLED", "OK", "GATEWAY_LOST"):
            found.append(f"{row.request_id}: its client left and its row says {row.outcome}")
    return found


__all__ = ["GATEWAYS", "MORTAL", "STEADY", "Aftermath", "Storm", "differences", "ride_out"]
