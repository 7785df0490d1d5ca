"""The matrix: whatever memory, chunks, batch, arrivals and number of answers, the tokens are the same.

{prefix cache on, off} x {chunks of one block, 64, unlimited} x {a pool that preempts, a large one} x {one at a
time, eight together, shuffled arrivals} x {1, 3 answers}: 72 cases, and those of eight together once more with guesses
at the next tokens, of which some come true. Greedy answers are compared with an oracle that
knows no cache, no batch and no chunks (Hugging Face generate; for the simulated backend a computation of the whole
prefix per token), sampled ones with the plainest case.
"""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from headrace.bundle.shipped import shipped_model_path
from headrace.engine.core.block_pool import BlockPool
from headrace.engine.core.kv_memory import KvMemory
from headrace.engine.core.ngram import NgramIndex, Speculation
from headrace.engine.core.placement import USUAL
from headrace.engine.core.sampling_plan import SamplingPlan
from headrace.engine.core.scheduler import BatchLimits, Scheduler
from headrace.engine.core.submission import ModelLimits
from headrace.engine.worker.backend import Backend
from headrace.engine.worker.config import WorkerConfig
from headrace.engine.worker.grammar import Grammars
from headrace.engine.worker.loop import StepLoop
from headrace.engine.worker.messages import Command, LongStep, StepEvent, Submit
from headrace.testkit.engine_bench import KEY, oracle, timeless_backend

BLOCK = 16
TOKENS = 20
SEED = 7
UNLIMITED = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One cell of the matrix."""

    caching: bool
    chunk: int
    preempts: bool
    arrival: str
    n: int
    guesses: int = 0

    def __str__(self) -> str:
        pool = "tiny" if self.preempts else "large"
        name = f"{'cache' if self.caching else 'nocache'}-chunk{self.chunk}-{pool}-{self.arrival}-n{self.n}"
        return f"{name}-guesses{self.guesses}" if self.guesses else name


MATRIX = [
    Case(caching=caching, chunk=chunk, preempts=preempts, arrival=arrival, n=n)
    for caching, chunk, preempts, arrival, n in itertools.product(
        (True, False), (BLOCK, 64, UNLIMITED), (True, False), ("alone", "together", "shuffled"), (1, 3)
    )
]
GUESSING = [replace(case, guesses=5) for case in MATRIX if case.arrival == "together"]
PLAINEST = Case(caching=False, chunk=UNLIMITED, preempts=False, arrival="alone", n=1)


class Over(Exception):
    """Everything is answered."""


class Clients:
    """Submits the prompts as the case's arrival has it and gathers what comes back."""

    def __init__(self, prompts: Sequence[list[int]], plan: SamplingPlan, case: Case) -> None:
        self.answers: dict[int, list[int]] = {}
        self.preemptions = 0
        self.cached_tokens = 0
        self.drafted = self.accepted = 0
        self._case = case
        self._open: set[int] = set()
        self._order = random.Random(11)
        self._pending = [
            Submit(
                sequence_id=1 + index * case.n,
                token_ids=prompt,
                plan=plan,
                arrived_at=0.0,
                deadline_at=float("inf"),
                n=case.n,
                placement=USUAL,
            )
            for index, prompt in enumerate(prompts)
        ]
        if case.arrival == "shuffled":
            self._order.shuffle(self._pending)

    def receive(self, wait_s: float, /) -> list[Command]:
        if not self._pending and not self._open:
            raise Over
        commands: list[Command] = []
        while self._pending and self._may_send():
            submit = self._pending.pop(0)
            self._open |= set(range(submit.sequence_id, submit.sequence_id + submit.n))
            commands.append(submit)
            if self._case.arrival == "shuffled":
                break
        return commands

    def _may_send(self) -> bool:
        if self._case.arrival == "alone":
            return not self._open
        return self._case.arrival == "together" or not self._open or self._order.random() < 0.4

    def send(self, report: StepEvent | LongStep, /) -> None:
        if isinstance(report, LongStep):
            return
        self.preemptions += report.preemptions
        self.drafted += report.drafted
        self.accepted += report.accepted
        for sequence_id, token_id in zip(report.sequence_ids, report.token_ids, strict=True):
            self.answers.setdefault(sequence_id, []).append(token_id)
        for finish in report.finishes:
            assert finish.problem is None, finish
            self.cached_tokens += finish.cached_tokens
            self._open.remove(finish.sequence_id)


def answers(backend: Backend, prompts: Sequence[list[int]], plan: SamplingPlan, case: Case) -> Clients:
    """Run the prompts through a fresh scheduler over `backend`, with the whole pool accounted for at the end."""
    longest = max(len(p) for p in prompts) + TOKENS
    # Two whole sequences and a bit: a third is admitted while the others are short, and somebody has to give way.
    tiny = 2 * -(-longest // BLOCK) + (2 * case.n)
    pool = BlockPool(tiny if case.preempts else backend.num_blocks, BLOCK)
    limits = BatchLimits(max_num_seqs=8, max_num_batched_tokens=case.chunk, enable_chunked_prefill=True, max_waiting=64)
    memory = KvMemory(pool, KEY if case.caching else None, "bundle")
    speculation = Speculation(tokens=case.guesses, longest=3, shortest=1, most_sequences=8) if case.guesses else None
    scheduler = Scheduler(limits, memory, backend.eos_ids, speculation)
    grammars = Grammars(None, vocab_size=backend.vocab_size, eos_ids=backend.eos_ids)
    model = ModelLimits(vocab_size=backend.vocab_size, max_model_len=backend.max_model_len)
    loop = StepLoop(scheduler, backend, grammars, model, clock=lambda: 0.0)
    clients = Clients(prompts, plan, case)
    with pytest.raises(Over):
        loop.serve(clients)
    scheduler.check()
    assert pool.free_blocks == pool.total_blocks
    return clients


def make_prompts(vocab_size: int, count: int) -> list[list[int]]:
    """Prompts that share prefixes of several lengths and end on block borders and beside them; one comes twice."""
    order = random.Random(5)
    stem = [order.randrange(3, vocab_size) for _ in range(48)]
    tails = (0, 1, 15, 16, 17, 3, 0, 33)
    stems = (48, 48, 32, 48, 16, 5, 48, 32)
    return [
        stem[:kept] + [order.randrange(3, vocab_size) for _ in range(tail)]
        for kept, tail in itertools.islice(zip(stems, tails, strict=True), count)
    ]


@dataclass(frozen=True, slots=True)
class Subject:
    """A backend, its prompts, and what the greedy answers must be."""

    backend: Backend
    prompts: list[list[int]]
    expected: list[list[int]]


def reference(model: Any, prompts: Sequence[list[int]]) -> list[list[int]]:
    """Hugging Face's greedy answers, one prompt at a time, end-of-sequence ignored."""
    import torch

    found = []
    for ids in prompts:
        out = model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids)),
            max_new_tokens=TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        found.append(out[0, len(ids) :].tolist())
    return found


def load(path: Path) -> Backend:
    from headrace.engine.worker.backend_model import load_model_backend

    return load_model_backend(WorkerConfig(model=str(path), kv_cache_memory_bytes=64 << 20, block_size=BLOCK))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    """A random two-layer Llama with grouped queries."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(1)
        config = LlamaConfig(
            vocab_size=211,
            hidden_size=48,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=6,
            num_key_value_heads=2,
            max_position_embeddings=512,
            # Large enough that the likeliest token is far ahead of the next: float noise decides nothing.
            initializer_range=0.4,
        )
        model = LlamaForCausalLM(config).eval()
        folder = tmp_path_factory.mktemp("tiny")
        model.save_pretrained(folder)
        prompts = make_prompts(211, 8)
        yield Subject(load(folder), prompts, reference(model, prompts))


@pytest.fixture(scope="module")
def simulated() -> Subject:
    """The simulated backend: each KV slot holds a hash of its prefix, so a wrong block is a wrong answer."""
    prompts = make_prompts(49_152, 8)
    plan = SamplingPlan(max_tokens=TOKENS, ignore_eos=True)
    return Subject(timeless_backend(256, BLOCK), prompts, [oracle(p, TOKENS, plan) for p in prompts])


@pytest.fixture(scope="module")
def echoing() -> Subject:
    """The simulated backend, saying again what was said before, but for one token in eight."""
    prompts = make_prompts(49_152, 8)
    plan = SamplingPlan(max_tokens=TOKENS, ignore_eos=True)
    return Subject(timeless_backend(256, BLOCK, echo=3), prompts, [oracle(p, TOKENS, plan, echo=3) for p in prompts])


class KnowAll:
    """Stands for the n-grams: its guesses are the right answers but for every fourth token, so all ends are seen."""

    def __init__(self, prompts: Sequence[list[int]], expected: Sequence[Sequence[list[int]]]) -> None:
        self._whole = [
            (prompt, prompt + tokens) for prompt, family in zip(prompts, expected, strict=True) for tokens in family
        ]

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        at = len(tokens)
        whole = next(w for prompt, w in self._whole if w[:at] == tokens and len(prompt) <= at)
        return [token if place % 4 else (token + 1) % 200 for place, token in enumerate(whole[at : at + count], at)]


def know_all(monkeypatch: pytest.MonkeyPatch, subject: Subject, expected: Sequence[Sequence[list[int]]]) -> None:
    guesser = KnowAll(subject.prompts, expected)
    monkeypatch.setattr(NgramIndex, "propose", lambda self, tokens, count: guesser.propose(tokens, count))


@pytest.fixture(scope="module")
def shipped() -> Iterator[Subject]:
    """The model that ships, with three prompts."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch
        from transformers import AutoModelForCausalLM

        path = shipped_model_path()
        model: Any = AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=torch.float32)
        prompts = make_prompts(49_152, 3)
        yield Subject(load(path), prompts, reference(model, prompts))


def check_greedy(subject: Subject, case: Case) -> Clients:
    plan = SamplingPlan(max_tokens=TOKENS, ignore_eos=True)
    got = answers(subject.backend, subject.prompts, plan, case)
    for index, expected in enumerate(subject.expected):
        for child in range(case.n):
            assert got.answers[1 + index * case.n + child] == expected, f"prompt {index}, answer {child}"
    return got


@pytest.mark.parametrize("case", MATRIX, ids=str)
@pytest.mark.parametrize("kind", ["simulated", "tiny"])
def test_greedy_answers_equal_the_oracles(request: pytest.FixtureRequest, kind: str, case: Case) -> None:
    got = check_greedy(request.getfixturevalue(kind), case)
    if case.preempts and case.arrival == "together":
        assert got.preemptions > 0, "the case is there to preempt"
    if case.caching and not case.preempts:
        assert got.cached_tokens > 0, "the case is there to share"
    if not case.caching:
        assert got.cached_tokens == 0


@pytest.mark.parametrize(
    "case",
    [case for case in MATRIX if case.caching and case.preempts and case.arrival == "together" and case.chunk != 64],
    ids=str,
)
@pytest.mark.timeout(300)
def test_the_shipped_models_greedy_answers_equal_the_references(shipped: Subject, case: Case) -> None:
    check_greedy(shipped, case)


@pytest.mark.parametrize("case", GUESSING, ids=str)
def test_greedy_answers_with_guesses_equal_the_references(
    tiny: Subject, monkeypatch: pytest.MonkeyPatch, case: Case
) -> None:
    know_all(monkeypatch, tiny, [[tokens] for tokens in tiny.expected])
    got = check_greedy(tiny, case)
    assert 0 < got.accepted < got.drafted


@pytest.mark.parametrize("case", GUESSING, ids=str)
def test_answers_that_repeat_themselves_are_the_same_with_n_grams(echoing: Subject, case: Case) -> None:
    got = check_greedy(echoing, case)
    assert 0 < got.accepted < got.drafted


@pytest.fixture(scope="module")
def plainest(tiny: Subject) -> Callable[[SamplingPlan], list[list[int]]]:
    """Sampled answers in the plainest case, for seeds SEED to SEED + 2: [prompt * 3 + answer]."""
    known: dict[float, list[list[int]]] = {}

    def sampled(plan: SamplingPlan) -> list[list[int]]:
        if plan.temperature not in known:
            runs = [answers(tiny.backend, tiny.prompts, replace(plan, seed=SEED + i), PLAINEST) for i in range(3)]
            known[plan.temperature] = [runs[i].answers[1 + p] for p in range(len(tiny.prompts)) for i in range(3)]
        return known[plan.temperature]

    return sampled


@pytest.mark.parametrize("case", [*MATRIX, *GUESSING], ids=str)
def test_seeded_samples_equal_those_of_the_plainest_case(
    tiny: Subject,
    plainest: Callable[[SamplingPlan], list[list[int]]],
    monkeypatch: pytest.MonkeyPatch,
    case: Case,
) -> None:
    plan = SamplingPlan(
        max_tokens=TOKENS,
        ignore_eos=True,
        temperature=1.0,
        top_p=0.95,
        seed=SEED,
        repetition_penalty=1.1,
        frequency_penalty=0.2,
    )
    expected = plainest(plan)
    if case.guesses:
        know_all(monkeypatch, tiny, [expected[3 * p : 3 * p + 3] for p in range(len(tiny.prompts))])
    got = answers(tiny.backend, tiny.prompts, plan, case)
    for index in range(len(tiny.prompts)):
        for child in range(case.n):
            assert got.answers[1 + index * case.n + child] == expected[index * 3 + child]
    assert (0 < got.accepted < got.drafted) if case.guesses else got.drafted == 0
    assert len({tuple(expected[i]) for i in range(3)}) == 3, "different seeds, different answers"
