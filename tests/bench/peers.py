"""Headrace beside the others, on the same checkpoint in the same precision: `make bench`.

Each round starts a server, measures it and ends it (or freezes it, where starting takes minutes) before the next one
has its turn, so that all meet the same machine. Answers are judged against transformers in float32 before anything is
timed; one wrong answer voids the server's numbers. Peers are looked for on this machine: `llama-server` on PATH or in
HEADRACE_BENCH_LLAMA_SERVER, vLLM by HEADRACE_BENCH_VLLM_PYTHON. Needs a quiet machine and about 20 minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import signal
import time
from collections import defaultdict
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from checkpoint import load_reference, write_folder, write_gguf
from comparison import write_report
from contestants import CONTEXT, Contestant, NotStarted, found
from judge import judge
from workload import Prompts, closed_loop, newcomer, open_loop, prefill, repeated_prefix

from headrace.base.turns import take_short_turns
from headrace.bundle.shipped import shipped_model_path
from headrace.text.tokenizer import load_tokenizer

STREAMS = (1, 8, 32)
TOKENS = 128
SINGLE = {"HF generate"}
"""Takes one request at a time: more streams would only queue."""

Facts = dict[str, Any]


class Comparison:
    """All rounds over all servers; results by server, then by stage, one entry per round."""

    def __init__(self, servers: list[Contestant], prompts: Prompts, reference: Any, precision: str) -> None:
        self._servers = servers
        self._prompts = prompts
        self._reference = reference
        self._precision = precision
        self._frozen: dict[str, Contestant] = {}
        self.results: dict[str, dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))
        self.void: dict[str, str] = {}

    async def run(self, rounds: int, other_rounds: int, rate: float, arrivals: int) -> None:
        """Closed loops in `rounds`, then the rest in `other_rounds`; servers that stay up are ended at last."""
        try:
            for _ in range(rounds):
                for streams in STREAMS:
                    for server in self._ready(streams):
                        await self._stage(server, f"closed {streams}", streams, 512, self._closed(streams))
            for turn in range(other_rounds):
                for server in self._ready(STREAMS[-1]):
                    await self._stage(server, "open", 32, 512, self._open(rate, arrivals, turn))
                for server in self._ready(1):
                    await self._stage(server, "alone", 2, CONTEXT, self._alone())
                for server in self._ready(STREAMS[-1]):
                    await self._stage(server, "newcomer", 6, CONTEXT, self._newcomer())
        finally:
            for server in self._frozen.values():
                server.thaw()
                await server.stop()

    def _ready(self, streams: int) -> list[Contestant]:
        return [s for s in self._servers if s.name not in self.void and (streams == 1 or s.name not in SINGLE)]

    async def _stage(self, server: Contestant, stage: str, streams: int, context: int, work: Any) -> None:
        try:
            await self._awake(server, streams, context)
            await self._checked(server)
            if server.name not in self.void:
                facts = await work(server)
                self.results[server.name][stage].append(facts)
                print(f"{stage:10} {server.name:16} {_short(facts)}", flush=True)
        except NotStarted as reason:  # the others are still worth comparing
            self.void[server.name] = str(reason)
            print(f"VOID       {server.name} {reason}", flush=True)
        finally:
            if server.name in self._frozen:
                server.freeze()
            else:
                await server.stop()

    async def _awake(self, server: Contestant, streams: int, context: int) -> None:
        if server.name in self._frozen:
            server.thaw()
            return
        began = time.perf_counter()
        await server.start(streams, context)
        self.results[server.name]["start_s"].append(time.perf_counter() - began)
        if server.keeps_running:
            self._frozen[server.name] = server

    async def _checked(self, server: Contestant) -> None:
        """Warm it up with two answers and judge them."""
        for prompt in self._prompts.take(2):
            heard = await server.ask(prompt, 32)
            verdict = await asyncio.to_thread(judge, self._reference, prompt, heard.token_ids)
            self.results[server.name]["judged"].append([verdict.worst, verdict.mean, verdict.equal])
            if len(heard.token_ids) != 32 or not verdict.stands(self._precision):
                self.void[server.name] = f"{len(heard.token_ids)} tokens, {verdict}"
                print(f"VOID       {server.name}: {self.void[server.name]}", flush=True)

    def _closed(self, streams: int) -> Any:
        async def work(server: Contestant) -> Facts:
            prompts = self._prompts.take(max(4, 2 * streams))
            return (await closed_loop(server, prompts, streams, TOKENS)).facts()

        return work

    def _open(self, rate: float, arrivals: int, turn: int) -> Any:
        async def work(server: Contestant) -> Facts:
            return (await open_loop(server, self._prompts.take(arrivals), rate, TOKENS, seed=turn)).facts()

        return work

    def _alone(self) -> Any:
        async def work(server: Contestant) -> Facts:
            return {
                "prefill_tokens_per_s": await prefill(server, self._prompts, 1024),
                "prefix": await repeated_prefix(server, self._prompts, 1000),
            }

        return work

    def _newcomer(self) -> Any:
        async def work(server: Contestant) -> Facts:
            return await newcomer(server, self._prompts, running=4, length=4000)

        return work


def _short(facts: Facts) -> str:
    parts = []
    for name, value in facts.items():
        inner = value.items() if isinstance(value, dict) else [("", value)]
        parts.append(name + " " + " ".join(f"{k}{' ' if k else ''}{v:.4g}" for k, v in inner))
    return "; ".join(parts)


def main() -> None:
    """Parse, measure, print, write JSON and plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--other-rounds", type=int, default=0, help="of all but the closed loops; 0: as many")
    parser.add_argument("--precision", choices=["bfloat16", "int8"], default="bfloat16")
    parser.add_argument("--rate", type=float, default=1.5, help="open loop: requests per second")
    parser.add_argument("--arrivals", type=int, default=30, help="open loop: requests per round")
    parser.add_argument("--only", default="", help="servers whose name contains this")
    parser.add_argument(
        "--work", type=Path, default=Path.home() / ".cache/headrace/bench", help="converted checkpoints"
    )
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"), help="where JSON and plot go")
    given = parser.parse_args()
    source = shipped_model_path()
    given.work.mkdir(parents=True, exist_ok=True)
    gguf = write_gguf(source, given.work / f"smollm2-135m-{given.precision}.gguf", given.precision)
    folder = write_folder(source, given.work / "smollm2-135m-bfloat16")
    tokenizer = load_tokenizer(source)
    servers = [s for s in found(given.precision, source, gguf, folder) if given.only in s.name]
    comparison = Comparison(servers, Prompts(tokenizer), load_reference(source), given.precision)
    began = time.strftime("%Y-%m-%d %H:%M")
    take_short_turns()  # a client of its own machine would not wait for a core that the server computes on
    try:
        rounds = (given.rounds, given.other_rounds or given.rounds)
        asyncio.run(_until_told(comparison.run(*rounds, given.rate, given.arrivals)))
    finally:  # what was measured before an interruption was measured
        _write(given, began, servers, comparison)


def _write(given: argparse.Namespace, began: str, servers: list[Contestant], comparison: Comparison) -> None:
    report = {
        "precision": given.precision, "rounds": given.rounds, "began": began, "tokens": TOKENS, "prompt_tokens": 200,
        "open_loop_requests_per_s": given.rate, "machine": _machine(), "void": comparison.void,
        "versions": {s.name: s.version() for s in servers},
        "results": {name: dict(stages) for name, stages in comparison.results.items()},
    }  # fmt: skip
    given.out.mkdir(parents=True, exist_ok=True)
    write_report(report, given.out)


async def _until_told(work: Coroutine[Any, Any, None]) -> None:
    """A SIGTERM ends the servers like Ctrl-C does: none of them may outlive the benchmark."""
    task = asyncio.ensure_future(work)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    await task


def _machine() -> Facts:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    flags = next((line for line in lines if line.startswith("flags")), "").split()
    wanted = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16") if flag in flags]
    return {"cpu": model, "cores": os.cpu_count(), "flags": wanted, "kernel": platform.release()}


if __name__ == "__main__":
    main()
