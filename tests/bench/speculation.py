"""Guessing by n-grams against not guessing, on the shipped model: ``python tests/bench/speculation.py``.

Prompts whose answers say again what they were given (quote this, change this code) and ordinary ones, 1 to 8 at a time,
through the real scheduler and the native bfloat16 kernels. Both ways take turns; printed is how many times as fast the
decoding steps are with guesses as without in the same round, as median and spread, and how many guesses came true. Both
must say the same tokens, or the run ends. Nothing here decides a test.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import json
import os
import random
import statistics
import textwrap
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path

from headrace.api.engine.v1.engine_service_pb2 import Message
from headrace.bundle.shipped import shipped_model_path
from headrace.engine.core.block_pool import BlockPool
from headrace.engine.core.kv_memory import KvMemory
from headrace.engine.core.ngram import Speculation
from headrace.engine.core.request import Sequence
from headrace.engine.core.sampling_plan import SamplingPlan
from headrace.engine.core.scheduler import BatchLimits, Scheduler
from headrace.engine.worker.backend import Backend
from headrace.engine.worker.backend_native import load_native_backend
from headrace.engine.worker.config import WorkerConfig
from headrace.text.tokenizer import load_tokenizer

BLOCK, ANSWER = 16, 160
CODE = (statistics.fmean, statistics.median_low, textwrap.indent, random.Random.sample, textwrap.fill)
QUOTED = (textwrap, statistics, random, json, inspect)
QUESTIONS = (
    "Why is the sky blue?",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "Give me five ideas for a birthday party.",
    "What happened in the year 1969?",
    "How does a bicycle stay upright?",
)


@dataclass(frozen=True, slots=True)
class Run:
    """One batch, answered."""

    answers: list[list[int]]
    decode_s: float
    drafted: int
    accepted: int


def prompts(kind: str) -> list[str]:
    """Five of them."""
    if kind == "code edit":
        ask = "Rename the variables of this Python function and write the whole function again.\n\n"
        return [ask + inspect.getsource(function)[:900] for function in CODE]
    if kind == "quote":
        return ["Repeat the following text word for word.\n\n" + (module.__doc__ or "")[:600] for module in QUOTED]
    return list(QUESTIONS)


def answer(backend: Backend, batch: Seq[list[int]], plan: SamplingPlan, speculation: Speculation | None) -> Run:
    """All of the batch at once; only steps without a prompt are timed."""
    limits = BatchLimits(max_num_seqs=32, max_num_batched_tokens=512, enable_chunked_prefill=True, max_waiting=64)
    memory = KvMemory(BlockPool(backend.num_blocks, BLOCK))
    scheduler = Scheduler(limits, memory, backend.eos_ids, speculation)
    for id, ids in enumerate(batch):
        own = replace(plan, seed=id)
        scheduler.submit(Sequence(id=id, token_ids=list(ids), prompt_length=len(ids), plan=own, arrived_at=0.0), 0.0)
    run = {"decode_s": 0.0, "drafted": 0, "accepted": 0}
    answers: list[list[int]] = [[] for _ in batch]
    while scheduler.running or scheduler.waiting:
        began = time.perf_counter()
        step = scheduler.schedule(0.0)
        outcome = scheduler.update(step, backend.execute(step.slices, {}), 0.0)
        if step.decodes == len(step.slices):
            run["decode_s"] += time.perf_counter() - began
        run["drafted"] += outcome.drafted
        run["accepted"] += outcome.accepted
        for id, token in zip(outcome.sequence_ids, outcome.token_ids, strict=True):
            answers[id].append(token)
    return Run(answers, run["decode_s"], int(run["drafted"]), int(run["accepted"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--precision", default="bfloat16")
    parser.add_argument("--tokens", type=int, default=4, help="num_speculative_tokens")
    parser.add_argument("--longest", type=int, default=4, help="prompt_lookup_max")
    parser.add_argument("--shortest", type=int, default=2, help="prompt_lookup_min")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--json", type=Path, help="write the numbers here, too")
    options = parser.parse_args()
    path = shipped_model_path()
    tokenizer = load_tokenizer(path)
    backend = load_native_backend(
        WorkerConfig(model=str(path), precision=options.precision, kv_cache_memory_bytes=512 << 20)
    )
    backend.warm_up()
    speculation = Speculation(
        tokens=options.tokens, longest=options.longest, shortest=options.shortest, most_sequences=64
    )
    print(f"{backend.computes_on}; load {os.getloadavg()[0]:.1f}; {speculation}")
    found = []
    for kind, temperature in itertools.product(("code edit", "quote", "ordinary"), options.temperatures):
        plan = SamplingPlan(max_tokens=ANSWER, temperature=temperature)
        ids = [tokenizer.encode_chat([Message(role="user", content=text)]) for text in prompts(kind)]
        for size in options.batches:
            batch = list(itertools.islice(itertools.cycle(ids), size)) if size > 1 else ids
            batches = [[one] for one in ids] if size == 1 else [batch]
            ratios = []
            for _ in range(options.rounds):
                plain = [answer(backend, part, plan, None) for part in batches]
                guessed = [answer(backend, part, plan, speculation) for part in batches]
                if [run.answers for run in plain] != [run.answers for run in guessed]:
                    raise SystemExit(f"{kind}, {size} at a time: guesses changed an answer")
                ratios.append(sum(r.decode_s for r in plain) / sum(r.decode_s for r in guessed))
            drafted, accepted = sum(r.drafted for r in guessed), sum(r.accepted for r in guessed)
            tokens = sum(len(a) for r in guessed for a in r.answers)
            row = {
                "prompts": kind, "temperature": temperature, "batch": size, "ratios": ratios, "tokens": tokens,
                "tokens_per_s_without": tokens / sum(r.decode_s for r in plain), "drafted": drafted,
                "accepted": accepted,
            }  # fmt: skip
            found.append(row)
            print(
                f"{kind:10} t={temperature:g} batch {size}: {statistics.median(ratios):.2f} x"
                f" ({min(ratios):.2f} to {max(ratios):.2f}), {tokens} tokens,"
                f" {row['tokens_per_s_without']:.0f} tok/s without, {accepted} of {drafted} guesses came true",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
