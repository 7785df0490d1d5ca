"""The whole stack against Hugging Face generate, on the shipped model, in one run: `make bench`.

Hugging Face computes in float32, Headrace in the precision asked for, on the same cores and in turn (A B A B …). In
float32 an answer that differs from the reference voids the numbers; in other precisions the share of equal leading
tokens is part of the report. Printed are medians with their spread, and ratios; nothing here decides a test.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from headrace.api.common.v1 import sampling_pb2
from headrace.api.engine.v1 import engine_service_pb2 as engine_pb
from headrace.api.engine.v1 import engine_service_pb2_grpc as engine_grpc
from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.base.deadline import Deadline
from headrace.bundle.shipped import shipped_model_path
from headrace.cli.intent import Wanted
from headrace.rpc.client import Peer
from headrace.testkit.cluster import DEPLOYMENT, Client, Cluster
from headrace.text.tokenizer import load_tokenizer

TOPICS = ["rivers", "mountains", "clocks", "bread", "ships", "stars", "gardens", "music", "letters", "bridges"]


def prompts(count: int) -> list[str]:
    """Different prompts of about 200 tokens each."""
    return [
        f"Essay {n}. " + " ".join(f"A sentence about {TOPICS[(n + i) % len(TOPICS)]} number {i}." for i in range(24))
        for n in range(count)
    ]


class Reference:
    """Hugging Face transformers: what the answers must be, and the time it takes one at a time."""

    def __init__(self, path: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        logging.set_verbosity_error()
        self._torch = torch
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._model: Any = AutoModelForCausalLM.from_pretrained(
                str(path.parent), gguf_file=path.name, dtype=torch.float32
            )
        self._tokenizer = load_tokenizer(path)

    def answer(self, prompt: str, tokens: int) -> tuple[list[int], float]:
        """Greedy token ids and the seconds they took."""
        ids = self._tokenizer.encode(prompt)
        began = time.perf_counter()
        out = self._model.generate(
            self._torch.tensor([ids]),
            attention_mask=self._torch.ones(1, len(ids)),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
        )
        return out[0, len(ids) :].tolist(), time.perf_counter() - began


async def closed_loop(client: Client, asked: Sequence[str], tokens: int) -> dict[str, Any]:
    """All prompts at once; seconds, TTFT and ITL as the gateway reports them."""
    began = time.perf_counter()
    sampling = {"max_tokens": tokens, "ignore_eos": True}
    answers = await asyncio.gather(
        *(client.generate(text=p, sampling=dict(sampling), deadline=Deadline.after(300)) for p in asked)
    )
    return {
        "seconds": time.perf_counter() - began,
        "tokens": [a.token_ids for a in answers],
        "ttft_ms": [a.end.timings.first_token_ms for a in answers],
        "itl_ms": [gap for a in answers for gap in a.end.timings.inter_token_ms],
    }


async def cancel_to_free_ms(client: Client, engine: str) -> float:
    """From leaving a stream to the engine reporting that nothing runs; polled, so up to one poll too long."""
    request = pb.GenerateRequest(
        model=DEPLOYMENT, text="On and on", sampling=sampling_pb2.SamplingParams(max_tokens=2000, ignore_eos=True)
    )
    async with Peer(engine) as peer:
        stub = engine_grpc.EngineServiceStub(peer.channel)

        async def running() -> int:
            answer = await peer.unary(stub.Describe, engine_pb.DescribeRequest(), deadline=Deadline.after(5))
            return int(answer.heartbeat.running)

        async with client.stream(request) as events:
            async for event in events:
                if event.WhichOneof("event") == "delta":
                    break
            while await running() == 0:
                await asyncio.sleep(0.001)
        began = time.perf_counter()
        while await running():
            await asyncio.sleep(0.001)
        return (time.perf_counter() - began) * 1000


def leading(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens at the beginning are the same."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def spread(values: Sequence[float], digits: int = 1) -> str:
    """median (min-max)"""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest rank."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


async def measure(rounds: int, tokens: int, precision: str, say: Callable[[str], None]) -> dict[str, Any]:
    """Everything, interleaved over `rounds`."""
    reference = await asyncio.to_thread(Reference, shipped_model_path())
    report: dict[str, Any] = {
        "tokens": tokens,
        "rounds": rounds,
        "precision": precision,
        "machine": platform.platform(),
        "streams": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        cluster = Cluster(Path(folder))
        try:
            await cluster.start_stores(Wanted(deployment=DEPLOYMENT, replicas=1, precision=precision))
            for kind in ("telemetry", "router", "controller", "gateway"):
                cluster.start_service(kind)
            await cluster.until_serving("telemetry", "router", "controller", "gateway")
            beats = await cluster.until_ready(f"{DEPLOYMENT}-1")
            asked = prompts(32)
            alone = [await asyncio.to_thread(reference.answer, p, tokens) for p in asked[:4]]
            async with cluster.client() as client:
                for streams in (1, 8, 32):
                    report["streams"][streams] = await _compare(
                        client, reference, asked, alone, streams, rounds, tokens, exact=precision == "float32"
                    )
                    say(_line(streams, report["streams"][streams]))
                address = beats[f"{DEPLOYMENT}-1"].address
                frees = [await cancel_to_free_ms(client, address) for _ in range(10)]
                report["cancel_to_free_ms"] = frees
                say(f"cancel to freed: {spread(frees)} ms")
        finally:
            await cluster.close()
    return report


async def _compare(
    client: Client,
    reference: Reference,
    asked: Sequence[str],
    alone: Sequence[tuple[list[int], float]],
    streams: int,
    rounds: int,
    tokens: int,
    *,
    exact: bool,
) -> dict[str, Any]:
    agreeing: list[float] = []
    ours: list[float] = []
    theirs: list[float] = []
    ttft: list[float] = []
    itl: list[float] = []
    for turn in range(rounds):
        result = await closed_loop(client, asked[:streams], tokens)
        for got, (expected, _) in zip(result["tokens"], alone, strict=False):
            agreeing.append(leading(got, expected) / tokens)
            if exact and got != expected:
                raise SystemExit(f"an answer differs from the reference at {streams} streams: the numbers are void")
        ours.append(streams * tokens / result["seconds"])
        ttft += result["ttft_ms"]
        itl += result["itl_ms"]
        _, seconds = await asyncio.to_thread(reference.answer, asked[turn % len(asked)], tokens)
        theirs.append(tokens / seconds)
    return {
        "leading_tokens_agreeing": statistics.mean(agreeing),
        "headrace_tokens_per_s": ours,
        "reference_tokens_per_s": theirs,
        "ratio": [a / b for a, b in zip(ours, theirs, strict=True)],
        "ttft_ms": {"p50": percentile(ttft, 0.5), "p99": percentile(ttft, 0.99)},
        "itl_ms": {"p50": percentile(itl, 0.5), "p99": percentile(itl, 0.99)},
    }


def _line(streams: int, r: dict[str, Any]) -> str:
    return (
        f"{streams:2} streams: {spread(r['headrace_tokens_per_s'])} tok/s,"
        f" {spread(r['ratio'], 2)} x Hugging Face generate (one at a time);"
        f" TTFT p50 {r['ttft_ms']['p50']:.0f} p99 {r['ttft_ms']['p99']:.0f} ms,"
        f" ITL p50 {r['itl_ms']['p50']:.1f} p99 {r['itl_ms']['p99']:.1f} ms;"
        f" {r['leading_tokens_agreeing']:.0%} of leading tokens as the reference's"
    )


def main() -> None:
    """Parse, measure, print, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64, help="answer length")
    parser.add_argument("--precision", default="bfloat16", help="float32, bfloat16, int8 or int4")
    parser.add_argument("--json", type=Path, default=None, help="write the report here")
    given = parser.parse_args()
    report = asyncio.run(measure(given.rounds, given.tokens, given.precision, lambda line: print(line, flush=True)))
    if given.json:
        given.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
