"""Bans, bias, penalties, least lengths and grammar masks against a plain reference on random data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from headrace.engine.core.finish import ErrorReason
from headrace.engine.core.sampling_plan import SamplingPlan
from headrace.engine.core.step import Computed, SequenceSlice
from headrace.engine.layers.rules import bits_of
from headrace.engine.layers.sampler import Sampler

VOCAB = 1000
EOS = frozenset({2, 7})
GREEDY = SamplingPlan(max_tokens=100)
RANDOM = SamplingPlan(max_tokens=100, temperature=1.0, seed=3)


def piece(
    plan: SamplingPlan, known: Sequence[int] = (5,), prompt_length: int = 1, sequence_id: int = 1, last: int = 1
) -> SequenceSlice:
    return SequenceSlice(
        sequence_id=sequence_id,
        token_ids=known[-last:],
        start=len(known) - last,
        block_table=(),
        samples=True,
        plan=plan,
        known_token_ids=known,
        prompt_length=prompt_length,
    )


def computed(logits: Any, *slices: SequenceSlice, masks: Any = None, sampler: Sampler | None = None) -> list[Computed]:
    rows = torch.as_tensor(np.asarray(logits, dtype=np.float32)).reshape(len(slices), -1)
    return (sampler or Sampler(EOS)).sample(rows, slices, masks or {})


def token(logits: Any, one: SequenceSlice, **options: Any) -> int:
    chosen = computed(logits, one, **options)[0].token_id
    assert chosen is not None
    return chosen


def reference(row: np.ndarray, plan: SamplingPlan, known: Sequence[int], prompt_length: int) -> np.ndarray:
    """The same rules, token by token, in float64."""
    out = row.astype(np.float64)
    answer = list(known[prompt_length:])
    for t in range(len(out)):
        if (plan.allowed_token_ids is not None and t not in plan.allowed_token_ids) or t in plan.banned_token_ids:
            out[t] = -np.inf
        if len(answer) < plan.min_tokens and (t in plan.stop_token_ids or (t in EOS and not plan.ignore_eos)):
            out[t] = -np.inf
        out[t] += plan.logit_bias.get(t, 0.0)
        if t in known:
            out[t] = out[t] / plan.repetition_penalty if out[t] > 0 else out[t] * plan.repetition_penalty
        out[t] -= plan.frequency_penalty * answer.count(t) + plan.presence_penalty * (t in answer)
    return out


def random_plan(rng: np.random.Generator) -> SamplingPlan:
    def some(count: int) -> tuple[int, ...]:
        return tuple(rng.choice(VOCAB, count, replace=False).tolist())

    return SamplingPlan(
        max_tokens=100,
        repetition_penalty=float(rng.choice([1.0, 0.5, 1.3, 10.0])),
        frequency_penalty=float(rng.choice([0.0, -2.0, 0.3, 2.0])),
        presence_penalty=float(rng.choice([0.0, -1.0, 0.7])),
        logit_bias={t: float(rng.uniform(-5, 5)) for t in some(5)} if rng.random() < 0.5 else {},
        allowed_token_ids=some(300) if rng.random() < 0.3 else None,
        banned_token_ids=some(30) if rng.random() < 0.5 else (),
        stop_token_ids=some(3),
        ignore_eos=bool(rng.random() < 0.5),
        min_tokens=int(rng.integers(0, 8)),
    )


def test_every_rule_agrees_with_a_plain_reference_while_sequences_grow() -> None:
    """Sixteen sequences of one batch, each with its own random plan, over twelve steps of one sampler."""
    rng = np.random.default_rng(1)
    plans = [random_plan(rng) for _ in range(16)]
    prompts = [rng.integers(0, 60, rng.integers(1, 40)).tolist() for _ in plans]
    known = [list(prompt) for prompt in prompts]
    sampler = Sampler(EOS)
    for _ in range(12):
        logits = (rng.standard_normal((16, VOCAB)) * 3).astype(np.float32)
        logits[:, :60] += 4  # where the known tokens are
        slices = [piece(p, k, len(prompts[i]), i) for i, (p, k) in enumerate(zip(plans, known, strict=True))]
        for i, result in enumerate(computed(logits, *slices, sampler=sampler)):
            expected = reference(logits[i], plans[i], known[i], len(prompts[i]))
            assert result.token_id is not None
            assert expected[result.token_id] == pytest.approx(expected.max(), abs=1e-5)
            known[i].append(result.token_id)


def test_what_a_sampler_remembers_changes_nothing() -> None:
    """Steps in a row, each step with a fresh sampler, and a pause for a preemption: the same answer."""
    rng = np.random.default_rng(2)
    rows = (rng.standard_normal((30, VOCAB)) * 2).astype(np.float32)
    plan = replace(RANDOM, repetition_penalty=1.4, frequency_penalty=0.5, presence_penalty=0.2, min_tokens=20)
    prompt = rng.integers(0, VOCAB, 10).tolist()

    def answer(samplers: Any, last: int = 1) -> list[int]:
        known = list(prompt)
        for row in rows:
            known.append(token(row, piece(plan, known, 10, last=last), sampler=next(samplers)))
        return known

    def interrupted(sampler: Sampler) -> Any:
        while True:
            yield sampler
            computed(rows[0], piece(plan, [1, 2], 1, sequence_id=9), sampler=sampler)

    steady, paused = Sampler(EOS), Sampler(EOS)
    whole = answer(iter([steady] * 30))
    assert answer(iter(Sampler(EOS) for _ in rows)) == whole
    assert answer(interrupted(paused)) == whole
    assert answer(iter([Sampler(EOS)] * 30), last=10) == whole  # recomputed in one go


def test_an_id_used_again_for_another_sequence_does_not_inherit_its_counts() -> None:
    plan = replace(GREEDY, frequency_penalty=2.0)
    sampler = Sampler(EOS)
    row = np.zeros(VOCAB)
    row[[10, 11]] = 1.5, 1.0
    assert token(row, piece(plan, [5, 10], 1), sampler=sampler) == 11
    assert token(row, piece(plan, [5], 1), sampler=sampler) == 10
    assert token(row, piece(replace(plan), [5, 11, 11], 1), sampler=sampler) == 10


def test_the_prompt_counts_for_repetition_only_and_migrated_tokens_are_answer() -> None:
    row = np.zeros(VOCAB)
    row[[10, 11]] = 1.5, 1.0
    known = [10, 10, 10]
    assert token(row, piece(replace(GREEDY, repetition_penalty=2.0), known, 3)) == 11
    assert token(row, piece(replace(GREEDY, frequency_penalty=1.0), known, 3)) == 10
    assert token(row, piece(replace(GREEDY, presence_penalty=1.0), known, 3)) == 10
    assert token(row, piece(replace(GREEDY, frequency_penalty=1.0), known, 2)) == 11
    assert token(row, piece(replace(GREEDY, min_tokens=2, logit_bias={2: 100.0}), known, 1)) == 2
    assert token(row, piece(replace(GREEDY, min_tokens=2, logit_bias={2: 100.0}), known, 2)) == 10


@pytest.mark.parametrize("end", sorted(EOS | {40}))
@pytest.mark.parametrize("plan", [GREEDY, RANDOM])
def test_min_tokens_holds_against_every_end_biased_upwards(plan: SamplingPlan, end: int) -> None:
    """min_tokens 4 gives exactly 5 tokens when the end is all but certain (vllm#5849, #15407)."""
    plan = replace(plan, min_tokens=4, logit_bias=dict.fromkeys([2, 7, 40], 90.0) | {end: 100.0}, stop_token_ids=(40,))
    known, sampler = [5, 6], Sampler(EOS)
    while known[-1] not in {2, 7, 40}:
        known.append(
            token(np.random.default_rng(len(known)).standard_normal(VOCAB), piece(plan, known, 2), sampler=sampler)
        )
    assert len(known) - 2 == 5
    assert known[-1] == end


def test_an_ignored_eos_may_come_before_min_tokens_but_a_stop_token_may_not() -> None:
    row = np.zeros(VOCAB)
    row[[2, 40]] = 5.0, 6.0
    plan = replace(GREEDY, ignore_eos=True, min_tokens=4, stop_token_ids=(40,))
    assert token(row, piece(plan)) == 2


@pytest.mark.parametrize("base", [GREEDY, RANDOM, replace(RANDOM, top_k=50), replace(RANDOM, top_p=0.9, min_p=0.01)])
def test_only_allowed_tokens_are_drawn_and_banned_ones_never(base: SamplingPlan) -> None:
    rng = np.random.default_rng(4)
    mask = bits_of(range(0, VOCAB, 2), VOCAB)
    for n in range(200):
        row = rng.standard_normal(VOCAB) * 3
        plan = replace(base, seed=n, allowed_token_ids=(3, 4, 8, 9, 12), banned_token_ids=(4, 500))
        assert token(row, piece(plan)) in {3, 8, 9, 12}
        assert token(row, piece(plan), masks={1: mask}) in {8, 12}
        assert token(row, piece(base), masks={1: mask}) % 2 == 0
        assert token(row, piece(replace(base, banned_token_ids=tuple(range(1, VOCAB))))) == 0


def test_a_vocabulary_that_fills_no_whole_word_is_masked_to_its_last_token() -> None:
    for vocab in (1, 31, 32, 33, 95):
        row = np.zeros(vocab)
        assert token(row, piece(GREEDY), masks={1: bits_of([vocab - 1], vocab)}) == vocab - 1


def test_a_batch_of_greedy_masked_and_hopeless_rows_has_no_nan_and_only_the_hopeless_fail() -> None:
    """One row of everything (vllm#22180): neighbours get the tokens they get alone."""
    rng = np.random.default_rng(5)
    logits = rng.standard_normal((7, VOCAB)).astype(np.float32)
    logits[1, 3] = np.nan
    logits[2, 900] = np.inf
    logits[3] = -np.inf
    logits[4, 5:] = -np.inf
    plans = [
        replace(GREEDY, logprobs=2),
        RANDOM,
        GREEDY,
        RANDOM,
        replace(RANDOM, logprobs=3, top_p=0.9),
        replace(RANDOM, allowed_token_ids=(6,), banned_token_ids=(6,)),
        replace(GREEDY, repetition_penalty=1e-45, logprobs=0),
    ]
    slices = [piece(plan, [5, 5], 1, i) for i, plan in enumerate(plans)]
    masks = {0: bits_of([11], VOCAB), 3: bits_of([1], VOCAB)}
    results = computed(logits, *slices, masks=masks)

    reasons = [result.problem and result.problem.reason for result in results]
    bad = ErrorReason.NUMERICAL
    assert reasons == [None, bad, bad, bad, None, ErrorReason.NO_TOKEN_ALLOWED, None]
    for i in (0, 4, 6):
        assert results[i] == computed(logits[i], slices[i], masks=masks)[0]
        found = results[i].logprobs
        assert found is not None
        assert all(np.isfinite(one.logprob) for one in (found.token, *found.top))
    assert results[0].token_id == 11
    assert all(result.token_id is None for result in results if result.problem)


def test_the_caller_s_logits_are_left_as_they_are() -> None:
    row = np.random.default_rng(6).standard_normal(VOCAB).astype(np.float32)
    logits = torch.from_numpy(row.copy()).reshape(1, -1)
    plan = replace(RANDOM, banned_token_ids=(1,), logit_bias={2: 3.0}, presence_penalty=1.0)
    Sampler(EOS).sample(logits, [piece(plan, [1, 2], 1)], {1: bits_of([4, 5], VOCAB)})
    assert np.array_equal(logits.numpy()[0], row)


def test_rules_of_sequences_that_are_gone_are_not_kept() -> None:
    sampler = Sampler(EOS)
    row = np.zeros(VOCAB)
    for n in range(100):
        token(row, piece(replace(GREEDY, presence_penalty=1.0), sequence_id=n), sampler=sampler)
    assert len(sampler._rules) == 1


def test_a_grammar_that_allows_only_an_end_wins_over_min_tokens() -> None:
    """An answer moved to another replica after its last token has met its shape, not its least length."""
    plan = replace(GREEDY, min_tokens=10)
    only_end = bits_of([2], VOCAB)
    more = bits_of([2, 40], VOCAB)
    assert token(np.zeros(VOCAB), piece(plan), masks={1: only_end}) == 2
    assert token(np.zeros(VOCAB), piece(plan), masks={1: more}) == 40
