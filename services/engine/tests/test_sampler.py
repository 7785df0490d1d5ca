from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from headrace.engine.core.sampling_plan import SamplingPlan
from headrace.engine.core.step import SequenceSlice
from headrace.engine.layers.noise import gumbel, loudest
from headrace.engine.layers.sampler import Sampler

GREEDY = SamplingPlan(max_tokens=1)
RANDOM = SamplingPlan(max_tokens=1, temperature=1.0, seed=7)
DRAWS = 100_000


def sample(logits: torch.Tensor, draws: Sequence[tuple[SamplingPlan, int]]) -> list[int]:
    """The token of each row, for its plan and the position it takes."""
    slices = [
        SequenceSlice(sequence_id=i, token_ids=[0], start=position - 1, block_table=(), samples=True, plan=plan)
        for i, (plan, position) in enumerate(draws)
    ]
    tokens = [computed.token_id for computed in Sampler(frozenset()).sample(logits, slices, {})]
    assert None not in tokens
    return tokens  # type: ignore[return-value]


def draws_of(logits: torch.Tensor, plan: SamplingPlan, count: int) -> np.ndarray:
    """`count` tokens drawn from one row of logits, at positions 1, 2, …"""
    return np.concatenate(
        [
            np.array(
                sample(
                    logits.expand(min(1000, count - first), -1),
                    [(plan, p) for p in range(first + 1, min(first + 1000, count) + 1)],
                )
            )
            for first in range(0, count, 1000)
        ]
    )


def chi_square(tokens: np.ndarray, expected: np.ndarray) -> float:
    """Deviations above the mean of the chi-square statistic, in its standard deviations; beyond 5 is no chance."""
    counts = np.bincount(tokens, minlength=len(expected))
    likely = expected * len(tokens) >= 5
    observed = np.append(counts[likely], counts[~likely].sum())
    wanted = np.append(expected[likely], expected[~likely].sum()) * len(tokens)
    if wanted[-1] == 0:
        assert observed[-1] == 0
        observed, wanted = observed[:-1], wanted[:-1]
    degrees = len(wanted) - 1
    return float((((observed - wanted) ** 2 / wanted).sum() - degrees) / np.sqrt(2 * degrees))


def test_greedy_takes_the_likeliest_and_the_lowest_of_equals() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [5.0, 1.0, 1.0, 5.0]])
    assert sample(logits, [(GREEDY, 1), (GREEDY, 9)]) == [1, 0]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax_of_scaled_logits_down_to_its_tail(temperature: float) -> None:
    torch.manual_seed(1)
    logits = torch.randn(60) * 2
    logits[:10] -= 6  # a tail with about a thousandth of the mass
    expected = torch.softmax(logits.double() / temperature, 0).numpy()
    tokens = draws_of(logits, replace(RANDOM, temperature=temperature), DRAWS)
    assert chi_square(tokens, expected) < 5
    tail, mass = (tokens < 10).sum(), expected[:10].sum() * DRAWS
    assert abs(tail - mass) < 5 * np.sqrt(mass)


def test_draws_with_different_seeds_at_one_position_follow_the_softmax() -> None:
    torch.manual_seed(2)
    logits = torch.randn(40)
    tokens = sample(logits.expand(20_000, -1), [(replace(RANDOM, seed=s), 100) for s in range(20_000)])
    assert chi_square(np.array(tokens), torch.softmax(logits.double(), 0).numpy()) < 5


def test_top_k_top_p_and_min_p_draw_from_the_renormalised_rest() -> None:
    torch.manual_seed(3)
    logits = torch.randn(300)
    p = torch.softmax(logits.double(), 0).numpy()
    order = np.argsort(-p)
    nucleus = np.searchsorted(p[order].cumsum(), 0.6) + 1
    both = np.searchsorted((p[order] / p[order[:20]].sum()).cumsum(), 0.5) + 1
    cases = (
        ({"top_k": 20}, 20),
        ({"top_p": 0.6}, nucleus),
        ({"min_p": 0.1}, (p >= 0.1 * p.max()).sum()),
        ({"top_k": 20, "top_p": 0.5}, both),
        ({"top_k": 20, "top_p": 0.99, "min_p": 0.7}, (p >= 0.7 * p.max()).sum()),
    )
    for limits, count in cases:
        plan, kept = replace(RANDOM, **limits), order[:count]  # type: ignore[arg-type]
        expected = np.zeros_like(p)
        expected[kept] = p[kept] / p[kept].sum()
        tokens = draws_of(logits, plan, DRAWS)
        assert set(tokens) == set(kept.tolist())
        assert chi_square(tokens, expected) < 5


def test_min_p_is_of_the_temperature_s_distribution() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0])
    assert set(draws_of(logits, replace(RANDOM, min_p=0.3), 2000)) == {0, 1}
    assert set(draws_of(logits, replace(RANDOM, min_p=0.3, temperature=2.0), 2000)) == {0, 1, 2}
    assert set(draws_of(logits, replace(RANDOM, min_p=1.0), 2000)) == {0}


def test_leaving_out_hopeless_tokens_changes_no_draw() -> None:
    rng = np.random.default_rng(8)
    for position in range(60):
        scaled = (rng.standard_normal(20_000) * rng.uniform(0.1, 8)).astype(np.float32)
        scaled -= scaled.max()
        noise = gumbel(9, position, np.arange(len(scaled), dtype=np.uint32))
        assert loudest(scaled, 9, position) == int((scaled + noise).argmax())


def test_top_p_widens_its_candidates_until_they_hold_the_mass() -> None:
    """20,000 equally likely tokens: 128 candidates hold less than a hundredth of the mass."""
    logits = torch.zeros(20_000)
    logits[5_000:] = torch.linspace(-0.5, -1e-3, 15_000)
    tokens = draws_of(logits, replace(RANDOM, top_p=0.5), 300)
    p = torch.softmax(logits.double(), 0)
    least = p.sort(descending=True).values[int((p.sort(descending=True).values.cumsum(0) < 0.5).sum())]
    assert len(set(tokens)) > 250
    assert bool((p[tokens] >= least).all())


def test_noise_has_the_gumbel_distribution_including_values_beyond_the_reach_of_24_bits() -> None:
    noise = np.concatenate([gumbel(5, p, np.arange(1 << 20, dtype=np.uint32)) for p in range(64)]).astype(np.float64)
    assert np.isfinite(noise).all()
    assert noise.mean() == pytest.approx(0.5772157, abs=1e-3)
    assert noise.var() == pytest.approx(np.pi**2 / 6, abs=3e-3)
    for bound in (-2.0, 0.0, 5.0, 10.0, 15.0):
        expected = len(noise) * -np.expm1(-np.exp(-bound))
        assert abs((noise > bound).sum() - expected) < 5 * np.sqrt(expected)
    assert noise.max() > 16.7


def test_noise_is_fixed_for_ever_because_answers_are_continued_on_other_versions() -> None:
    noise = gumbel(2**64 - 1, 8191, np.array([0, 1, 49_151], dtype=np.uint32))
    assert noise.tolist() == pytest.approx([0.4061320, 0.8552777, -0.4256020], rel=1e-6)


def test_the_same_seed_gives_the_same_token_and_other_seeds_and_positions_other_ones() -> None:
    logits = torch.zeros(1, 1000)
    first = sample(logits, [(RANDOM, 40)])
    assert sample(logits, [(RANDOM, 40)]) == first
    assert len({sample(logits, [(replace(RANDOM, seed=s), 40)])[0] for s in range(20)}) > 15
    assert len({sample(logits, [(RANDOM, p)])[0] for p in range(20)}) > 15
    assert sample(logits, [(replace(RANDOM, seed=7 + 2**40), 40)]) != first


def test_a_row_s_token_does_not_depend_on_its_neighbours() -> None:
    torch.manual_seed(4)
    logits = torch.randn(12, 5_000)
    plans = [GREEDY, RANDOM, replace(RANDOM, top_k=3), replace(RANDOM, top_p=0.99), replace(RANDOM, temperature=1.7)]
    draws = [(replace(plans[i % 5], seed=i), 10 + i) for i in range(12)]
    together = sample(logits, draws)
    assert together == [sample(logits[i : i + 1], [draws[i]])[0] for i in range(12)]
    assert together[::-1] == sample(logits.flip(0), draws[::-1])


def test_limits_at_their_edges_mean_what_they_say() -> None:
    torch.manual_seed(5)
    logits = torch.randn(1, 500)
    likeliest = int(logits.argmax())
    for position in range(50):
        everything = sample(logits, [(RANDOM, position)])
        assert sample(logits, [(replace(RANDOM, top_k=500), position)]) == everything
        assert sample(logits, [(replace(RANDOM, top_k=4_000_000_000), position)]) == everything
        assert sample(logits, [(replace(RANDOM, top_p=1.0), position)]) == everything
        assert sample(logits, [(replace(RANDOM, top_p=0.999999999), position)]) == everything
        assert sample(logits, [(replace(RANDOM, min_p=1e-30), position)]) == everything
        assert sample(logits, [(replace(RANDOM, top_k=1), position)]) == [likeliest]
        assert sample(logits, [(replace(RANDOM, top_p=1e-9), position)]) == [likeliest]


def test_equal_logits_at_the_limit_are_all_kept() -> None:
    logits = torch.tensor([4.0] + [2.0] * 5 + [-9.0] * 50)
    assert set(draws_of(logits, replace(RANDOM, top_k=2), 500)) == {0, 1, 2, 3, 4, 5}
    assert set(draws_of(logits, replace(RANDOM, top_p=0.7), 500)) == {0, 1, 2, 3, 4, 5}


def test_a_tiny_temperature_is_greedy_and_does_not_overflow() -> None:
    torch.manual_seed(6)
    logits = torch.randn(1, 1000) * 1e4
    for temperature in (1e-6, 1e-30):
        for plan in (RANDOM, replace(RANDOM, top_p=0.9), replace(RANDOM, top_k=40)):
            assert sample(logits, [(replace(plan, temperature=temperature), 3)]) == [int(logits.argmax())]


def test_tokens_masked_out_are_never_drawn() -> None:
    logits = torch.full((100,), -torch.inf)
    logits[[3, 50]] = 1.0
    for plan in (RANDOM, replace(RANDOM, top_k=10), replace(RANDOM, top_p=0.95)):
        assert set(draws_of(logits, plan, 100)) == {3, 50}
