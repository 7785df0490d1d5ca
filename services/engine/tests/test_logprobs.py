"""Log-probabilities against float64, their ranks and order, and the prompt's, whole and in chunks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from headrace.engine.core.finish import Problem
from headrace.engine.core.sampling_plan import SamplingPlan
from headrace.engine.core.step import SequenceSlice
from headrace.engine.layers.logprob import LEAST_LOGPROB, logprobs_of
from headrace.engine.layers.rules import bits_of
from headrace.engine.layers.sampler import Sampler, prompt_logprobs


@pytest.mark.parametrize("scale", [0.1, 3.0, 30.0])
def test_values_ranks_and_order_agree_with_a_float64_log_softmax(scale: float) -> None:
    rng = np.random.default_rng(1)
    for _ in range(20):
        row = (rng.standard_normal(49_152) * scale).astype(np.float32)
        expected = torch.log_softmax(torch.from_numpy(row).double(), 0).numpy()
        order = np.argsort(-row, kind="stable")
        token = int(rng.integers(0, len(row)))
        found = logprobs_of(row, token, 20)
        assert found.token.logprob == pytest.approx(max(expected[token], LEAST_LOGPROB), abs=1e-4)
        assert found.token.rank == 1 + int((row > row[token]).sum())
        assert [one.token_id for one in found.top] == order[:20].tolist()
        assert [one.rank for one in found.top] == [1 + int((row > row[t]).sum()) for t in order[:20]]
        assert [one.logprob for one in found.top] == pytest.approx(expected[order[:20]].tolist(), abs=1e-4)


def test_equal_tokens_share_a_rank_and_come_by_id() -> None:
    row = np.zeros(10, dtype=np.float32)
    row[[4, 8]] = 1.0
    found = logprobs_of(row, 9, 4)
    assert [(one.token_id, one.rank) for one in found.top] == [(4, 1), (8, 1), (0, 3), (1, 3)]
    assert found.token.rank == 3


def test_an_impossible_token_has_the_least_logprob_and_a_certain_one_has_0() -> None:
    row = np.full(8, -np.inf, dtype=np.float32)
    row[3] = 50.0
    assert logprobs_of(row, 1, 0).token.logprob == LEAST_LOGPROB
    assert logprobs_of(row, 3, 0).token.logprob == 0.0
    assert len(logprobs_of(row, 3, 20).top) == 8  # the vocabulary has no more


def test_they_are_of_the_model_s_own_distribution_whatever_the_plan_does_to_it() -> None:
    row = np.random.default_rng(2).standard_normal(500).astype(np.float32)
    plan = SamplingPlan(
        max_tokens=5, temperature=0.3, top_k=5, banned_token_ids=(int(row.argmax()),), logit_bias={9: 100.0}, logprobs=3
    )
    piece = SequenceSlice(
        sequence_id=1, token_ids=[9], start=1, block_table=(), samples=True, plan=plan,
        known_token_ids=[9, 9], prompt_length=1,
    )  # fmt: skip
    for changed, mask in ((plan, {}), (replace(plan, repetition_penalty=2.0), {1: bits_of([9, 10], 500)})):
        result = Sampler(frozenset()).sample(torch.from_numpy(row)[None], [replace(piece, plan=changed)], mask)[0]
        assert result.token_id == 9
        assert result.logprobs == logprobs_of(row, 9, 3)
    silent = replace(piece, plan=replace(plan, logprobs=None))
    assert Sampler(frozenset()).sample(torch.from_numpy(row)[None], [silent], {})[0].logprobs is None


def test_a_prompt_s_are_one_per_row_or_a_problem_when_a_row_is_not_numbers() -> None:
    rows = np.random.default_rng(3).standard_normal((5, 100)).astype(np.float32)
    found = prompt_logprobs(torch.from_numpy(rows), [7, 8, 9, 10, 11], 2)
    assert found == [logprobs_of(row, 7 + i, 2) for i, row in enumerate(rows)]
    rows[4, 50] = np.nan
    assert isinstance(prompt_logprobs(torch.from_numpy(rows), [7, 8, 9, 10, 11], 2), Problem)
