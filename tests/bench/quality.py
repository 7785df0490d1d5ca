"""What fewer bits for weights, keys and values cost on the shipped model: ``python tests/bench/quality.py``.

The text is Python's own documentation strings, in windows of 512 tokens. Against float32 in torch: perplexity, how
often the likeliest next token is the same with the same text before it, and how many tokens of a free greedy answer
agree before the first that does not.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import itertools
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from headrace.bundle.shipped import shipped_model_path
from headrace.engine.core.sampling_plan import SamplingPlan
from headrace.engine.core.step import SequenceSlice
from headrace.engine.worker.backend import Backend
from headrace.engine.worker.backend_model import load_model_backend
from headrace.engine.worker.backend_native import load_native_backend
from headrace.engine.worker.config import KvCacheDtype, WorkerConfig
from headrace.text.tokenizer import load_tokenizer

WINDOW, ANSWER, BLOCK = 512, 64, 16
MODULES = (
    "argparse", "ast", "asyncio", "collections", "contextlib", "csv", "dataclasses", "datetime", "decimal", "difflib",
    "doctest", "email.message", "fractions", "functools", "heapq", "inspect", "ipaddress", "json", "logging", "math",
    "optparse", "pathlib", "pickle", "random", "re", "shutil", "socket", "statistics", "string", "subprocess",
    "tarfile", "textwrap", "threading", "turtle", "typing", "unittest", "zipfile",
)  # fmt: skip
SCORING = SamplingPlan(max_tokens=1, prompt_logprobs=1, ignore_eos=True)
GREEDY = SamplingPlan(max_tokens=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a backend makes of the windows: each next token's log-probability, and the likeliest in its place."""

    logprobs: Sequence[float]
    likeliest: Sequence[int]
    answers: Sequence[Sequence[int]]

    @property
    def perplexity(self) -> float:
        return math.exp(-statistics.fmean(self.logprobs))


def documentation() -> str:
    """The documentation strings of the modules, their classes and functions, in order."""
    texts: list[str] = []
    for name in MODULES:
        module = importlib.import_module(name)
        texts.append(inspect.getdoc(module) or "")
        for _, member in sorted(vars(module).items()):
            if (inspect.isclass(member) or inspect.isfunction(member)) and member.__module__ == name:
                texts.append(inspect.getdoc(member) or "")
    return "\n\n".join(text for text in texts if len(text) > 80)


def windows(path: Path, count: int) -> list[list[int]]:
    tokens = load_tokenizer(path).encode(documentation())
    stride = max(WINDOW, (len(tokens) - WINDOW) // count)  # spread over the text
    found = [tokens[i : i + WINDOW] for i in range(0, len(tokens) - WINDOW, stride)][:count]
    return found


def read(backend: Backend, texts: list[list[int]]) -> Reading:
    logprobs: list[float] = []
    likeliest: list[int] = []
    for text in texts:
        (computed,) = backend.execute([_slice(text, 0, SCORING)], {})
        logprobs += [entry.token.logprob for entry in computed.prompt_logprobs]
        likeliest += [entry.top[0].token_id for entry in computed.prompt_logprobs]
    return Reading(logprobs=logprobs, likeliest=likeliest, answers=[_answer(backend, text[:64]) for text in texts])


def _answer(backend: Backend, prompt: list[int]) -> list[int]:
    known, start = list(prompt), 0
    for _ in range(ANSWER):
        (computed,) = backend.execute([_slice(known, start, GREEDY)], {})
        assert computed.token_id is not None
        start = len(known)
        known.append(computed.token_id)
    return known[len(prompt) :]


def _slice(known: list[int], start: int, plan: SamplingPlan) -> SequenceSlice:
    table = range(-(-len(known) // BLOCK))
    return SequenceSlice(
        sequence_id=0, token_ids=known[start:], start=start, block_table=table, samples=True, plan=plan,
        known_token_ids=known, prompt_length=len(known),
    )  # fmt: skip


def agreed(answer: Sequence[int], reference: Sequence[int]) -> int:
    """Tokens before the first difference."""
    return next((i for i, pair in enumerate(zip(answer, reference, strict=True)) if pair[0] != pair[1]), len(reference))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--json", type=Path, help="write the numbers here, too")
    options = parser.parse_args()
    path = shipped_model_path()
    texts = windows(path, options.windows)
    config = WorkerConfig(model=str(path))
    reference = read(load_model_backend(config), texts)
    print(f"{len(texts)} windows of {WINDOW} tokens; torch float32: perplexity {reference.perplexity:.3f}")
    result: dict[str, dict[str, float]] = {"float32": {"perplexity": reference.perplexity}}
    for precision, kept in itertools.product(("bfloat16", "int8", "int4"), KvCacheDtype):
        name = precision if kept is KvCacheDtype.AUTO else f"{precision}, int8 KV"
        reading = read(load_native_backend(replace(config, precision=precision, kv_cache_dtype=kept)), texts)
        same = [a == b for a, b in zip(reading.likeliest, reference.likeliest, strict=True)]
        lengths = [agreed(a, b) for a, b in zip(reading.answers, reference.answers, strict=True)]
        result[name] = {
            "perplexity": reading.perplexity,
            "ratio": reading.perplexity / reference.perplexity,
            "same likeliest token": statistics.fmean(same),
            "agreeing tokens of a greedy answer": statistics.fmean(lengths),
        }
        print(
            f"native {name:17} perplexity {reading.perplexity:.3f}"
            f" ({100 * (result[name]['ratio'] - 1):+.2f} %),"
            f" same likeliest token {100 * statistics.fmean(same):.1f} %,"
            f" {statistics.fmean(lengths):.1f} of {ANSWER} greedy tokens agree"
        )
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
