"""What a long prompt does to streams that were there first: ``python tests/bench/newcomer.py --json FILE``.

Two engines with the shipped model take turns, one with pacing (``max_itl_stretch`` as it is by default, or as given)
and one without; the one that is not measured is frozen. In each round 1, 4 and 16 streams run when a prompt of 4,000
tokens arrives. Reported are the median time between two tokens before it came, median and 99th percentile while it is
computed, as multiples of that median, and the newcomer's time to first token as a multiple of what it is on an idle
engine. Then eight prompts of 500 tokens come at once, to an idle engine and beside four streams. Nothing here decides a
test.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contestants import Engine, free_port
from stream_client import Heard
from workload import Prompts

from headrace.api.common.v1 import sampling_pb2
from headrace.api.engine.v1 import engine_service_pb2 as engine_pb
from headrace.api.engine.v1 import engine_service_pb2_grpc as engine_grpc
from headrace.base.deadline import Deadline
from headrace.bundle.shipped import shipped_model_path
from headrace.engine.settings import EngineSettings
from headrace.rpc.client import Peer
from headrace.text.tokenizer import load_tokenizer

STREAM_PROMPT, SETTLED, ANSWER = 100, 60, 7000
BURST, BURST_PROMPT, BURST_ANSWER = 8, 500, 16


class PacedEngine(Engine):
    """Headrace's engine with one setting of its own."""

    def __init__(self, model: Path, precision: str, stretch: float, flags: Sequence[str]) -> None:
        super().__init__(model, precision)
        self.name = f"stretch {stretch:g}" if stretch else "off"
        self._flags = ["--max-itl-stretch", str(stretch), *flags]

    async def start(self, streams: int, context: int) -> None:
        self.port = free_port()
        address = f"127.0.0.1:{self.port}"
        settings = ["--model", str(self._model), "--precision", self._precision, "--address", address]
        self._spawn([sys.executable, "-m", "headrace.engine", *settings, *self._flags], {})
        self._peer = Peer(address)
        await self._until_answering(120)

    async def listen(self, prompt: str, tokens: int, heard: Heard) -> Heard:
        """As `ask`, while others may look at what has been heard so far; the prompt is text already."""
        assert self._peer is not None
        sampling = sampling_pb2.SamplingParams(max_tokens=tokens, ignore_eos=True)
        request = engine_pb.GenerateRequest(prompt=prompt, sampling=sampling)
        stub = engine_grpc.EngineServiceStub(self._peer.channel)
        async with self._peer.stream(stub.Generate, request, deadline=Deadline.after(600)) as events:
            async for event in events:
                heard.note(event.delta.token_ids)
        return heard


@dataclass(frozen=True, slots=True)
class Beside:
    """Gaps of the streams before and beside a newcomer, in seconds, and its time to first token."""

    before: list[float]
    beside: list[float]
    ttft_s: float


def texts(prompts: Prompts, count: int, length: int) -> list[str]:
    """Prompts of so many tokens, as text: making them would otherwise count as waiting."""
    return [prompts.tokenizer.decode(ids) for ids in prompts.take(count, length)]


@asynccontextmanager
async def running(engine: PacedEngine, prompts: Prompts, streams: int) -> AsyncIterator[list[Heard]]:
    """So many streams, each begun when the one before it speaks, so that their ages differ; all have settled."""
    heard: list[Heard] = []
    async with asyncio.TaskGroup() as group:
        tasks = []
        for prompt in texts(prompts, streams, STREAM_PROMPT):
            one = Heard(time.perf_counter())
            tasks.append(group.create_task(engine.listen(prompt, ANSWER, one)))
            heard.append(one)
            await until_tokens([one], 2)
        await until_tokens(heard, SETTLED)
        try:
            yield heard
        finally:
            for task in tasks:
                task.cancel()


async def until_tokens(heard: Sequence[Heard], more: int) -> None:
    """Until each has `more` tokens than now."""
    wanted = [len(one.token_ids) + more for one in heard]
    while any(len(one.token_ids) < least for one, least in zip(heard, wanted, strict=True)):
        await asyncio.sleep(0.005)


async def newcomer(engine: PacedEngine, prompts: Prompts, streams: int, length: int) -> Beside:
    """A prompt of `length` tokens beside so many streams."""
    async with running(engine, prompts, streams) as heard:
        begun = [len(one.token_ids) - SETTLED // 2 for one in heard]
        (prompt,) = texts(prompts, 1, length)
        asked_at = time.perf_counter()
        late = await engine.listen(prompt, 1, Heard(asked_at))
        until = late.arrived_at[0]
        await until_tokens(heard, 2)
    before, beside = [], []
    for one, start in zip(heard, begun, strict=True):
        for earlier, later in zip(one.arrived_at[start:], one.arrived_at[start + 1 :], strict=False):
            if later <= asked_at:
                before.append(later - earlier)
            elif earlier < until:
                beside.append(later - earlier)
    return Beside(before, beside, late.ttft_s)


async def burst(engine: PacedEngine, prompts: Prompts) -> list[float]:
    """Times to first token of prompts that come at once."""
    made = texts(prompts, BURST, BURST_PROMPT)
    asked = [engine.listen(prompt, BURST_ANSWER, Heard(time.perf_counter())) for prompt in made]
    return [heard.ttft_s for heard in await asyncio.gather(*asked)]


async def measured(engine: PacedEngine, prompts: Prompts, counts: Sequence[int], length: int) -> list[dict[str, Any]]:
    """One engine's turn of a round."""
    rows: list[dict[str, Any]] = []
    (prompt,) = texts(prompts, 1, length)
    alone_s = (await engine.listen(prompt, 1, Heard(time.perf_counter()))).ttft_s
    for streams in counts:
        found = await newcomer(engine, prompts, streams, length)
        median_s = statistics.median(found.before)
        rows.append({
            "case": f"{streams} streams", "itl_before_ms": 1000 * median_s,
            "p50_beside": statistics.median(found.beside) / median_s, "p99_beside": p99(found.beside) / median_s,
            "p99_before": p99(found.before) / median_s, "gaps": len(found.beside),
            "ttft_alone_ms": 1000 * alone_s, "ttft_ms": 1000 * found.ttft_s, "ttft_ratio": found.ttft_s / alone_s,
        })  # fmt: skip
    for streams in (0, 4):
        async with running(engine, prompts, streams):
            ttft_s = await burst(engine, prompts)
        mean_ms, last_ms = 1000 * statistics.fmean(ttft_s), 1000 * max(ttft_s)
        rows.append({"case": f"burst beside {streams}", "ttft_mean_ms": mean_ms, "ttft_last_ms": last_ms})
    return rows


def p99(gaps: Sequence[float]) -> float:
    """By nearest rank."""
    return sorted(gaps)[min(len(gaps) - 1, len(gaps) * 99 // 100)]


def report(rows: list[dict[str, Any]]) -> None:
    """Medians over the rounds, with the spread."""
    by_case: defaultdict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        by_case[row["case"], row["engine"]].append(row)
    for (case, engine), found in by_case.items():

        def shown(name: str, digits: int = 1, found: list[dict[str, Any]] = found) -> str:
            values = [row[name] for row in found]
            spread = f" ({min(values):.{digits}f} to {max(values):.{digits}f})" if len(values) > 1 else ""
            return f"{statistics.median(values):.{digits}f}{spread}"

        if "itl_before_ms" in found[0]:
            print(
                f"{case:16} {engine:12} median gap {shown('itl_before_ms')} ms; p99 {shown('p99_before')} x before,"
                f" p50 {shown('p50_beside')} x and p99 {shown('p99_beside')} x beside; newcomer's TTFT"
                f" {shown('ttft_ms', 0)} ms, {shown('ttft_ratio', 2)} x alone"
            )
        else:
            print(f"{case:16} {engine:12} TTFT mean {shown('ttft_mean_ms', 0)} ms, last {shown('ttft_last_ms', 0)} ms")


async def compare(options: argparse.Namespace) -> list[dict[str, Any]]:
    """All rounds."""
    model = Path(options.model or shipped_model_path())
    tokenizer = load_tokenizer(model)
    prompts = Prompts(tokenizer)
    engines = [PacedEngine(model, options.precision, stretch, options.engine_flag) for stretch in options.stretch]
    rows: list[dict[str, Any]] = []
    try:
        for engine in engines:
            await engine.start(max(options.streams), options.prompt)
            engine.freeze()
        for turn in range(options.rounds):
            for engine in engines if turn % 2 == 0 else reversed(engines):
                engine.thaw()
                found = await measured(engine, prompts, options.streams, options.prompt)
                rows += [{"engine": engine.name, "round": turn, **row} for row in found]
                engine.freeze()
    finally:
        for engine in engines:
            engine.thaw()
            await engine.stop()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", help="default: the model that ships")
    parser.add_argument("--precision", default="bfloat16")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--prompt", type=int, default=4000, help="tokens of the newcomer's prompt")
    default = EngineSettings().max_itl_stretch
    parser.add_argument("--stretch", type=float, nargs="+", default=[default, 0], help="max_itl_stretch; 0: no pacing")
    parser.add_argument("--engine-flag", action="append", default=[], help="passed on to the engines, --name=value")
    parser.add_argument("--json", type=Path, help="write the numbers of each round here, too")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    print(f"load {load:.1f}")
    rows = asyncio.run(compare(options))
    report(rows)
    if options.json:
        options.json.write_text(json.dumps({"load": load, "precision": options.precision, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
