"""What sampling costs: milliseconds for 32 rows of 49,152 logits, by feature. ``python tests/bench/sampler.py``"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from headrace.engine.core.sampling_plan import SamplingPlan
from headrace.engine.core.step import SequenceSlice
from headrace.engine.layers.rules import bits_of
from headrace.engine.layers.sampler import Sampler, prompt_logprobs

VOCAB, ROWS, ANSWER = 49_152, 32, 4096
GREEDY = SamplingPlan(max_tokens=ANSWER)
RANDOM = SamplingPlan(max_tokens=ANSWER, temperature=0.8)
CASES = {
    "greedy": GREEDY,
    "temperature": RANDOM,
    "top_k 40": replace(RANDOM, top_k=40),
    "top_p 0.95": replace(RANDOM, top_p=0.95),
    "min_p 0.05": replace(RANDOM, min_p=0.05),
    "top_k 40, top_p 0.95, min_p 0.05": replace(RANDOM, top_k=40, top_p=0.95, min_p=0.05),
    "flat, top_p 0.95 (sorts)": replace(RANDOM, temperature=2.0, top_p=0.95),
    "frequency and presence": replace(GREEDY, frequency_penalty=0.5, presence_penalty=0.2),
    "repetition": replace(GREEDY, repetition_penalty=1.1),
    "logit_bias of 300": replace(GREEDY, logit_bias={token * 7: 1.0 for token in range(300)}),
    "65,536 allowed": replace(GREEDY, allowed_token_ids=tuple(range(VOCAB))),
    "min_tokens": replace(GREEDY, min_tokens=ANSWER + 1),
    "logprobs 0": replace(GREEDY, logprobs=0),
    "logprobs 20": replace(GREEDY, logprobs=20),
}


def main() -> None:
    """Print a table."""
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    logits = torch.from_numpy((rng.standard_normal((ROWS, VOCAB)) * 3).astype(np.float32))
    known = rng.integers(0, VOCAB, 500 + ANSWER).tolist()
    for name, plan in CASES.items():
        rows = logits / 30 if "flat" in name else logits
        pieces = [_piece(i, replace(plan, seed=i), known) for i in range(ROWS)]
        _show(name, _sampling(rows, pieces, {}))
    mask = bits_of(np.flatnonzero(rng.random(VOCAB) < 0.5), VOCAB)
    pieces = [_piece(i, GREEDY, known) for i in range(ROWS)]
    _show("grammar mask", _sampling(logits, pieces, dict.fromkeys(range(ROWS), mask)))
    _show("prompt_logprobs 20, of 32 tokens", lambda: prompt_logprobs(logits, known[:ROWS], 20))


def _piece(sequence_id: int, plan: SamplingPlan, known: list[int]) -> SequenceSlice:
    return SequenceSlice(
        sequence_id=sequence_id,
        token_ids=known[-1:],
        start=len(known) - 1,
        block_table=(),
        samples=True,
        plan=plan,
        known_token_ids=list(known),
        prompt_length=500,
    )


def _sampling(logits: torch.Tensor, pieces: list[SequenceSlice], masks: dict[int, np.ndarray]) -> Callable[[], object]:
    """One step, after which each sequence has one more token, as in an engine."""
    sampler = Sampler(frozenset({2}))

    def step() -> None:
        for number, computed in enumerate(sampler.sample(logits, pieces, masks)):
            pieces[number].known_token_ids.append(computed.token_id)  # type: ignore[attr-defined]

    return step


def _show(name: str, step: Callable[[], object]) -> None:
    step()  # makes the rules, counts the answers
    times = []
    for _ in range(30):
        started = time.perf_counter()
        step()
        times.append(time.perf_counter() - started)
    print(f"{name:36} {1000 * float(np.median(times)):6.2f} ms")


if __name__ == "__main__":
    main()
