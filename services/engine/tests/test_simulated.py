"""The simulated backend's clock and words, and its faults as parsed."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import numpy as np
import pytest

from headrace.base.errors import StartError
from headrace.bundle.shipped import shipped_model_path
from headrace.engine.core.sampling_plan import SamplingPlan
from headrace.engine.simulated.backend import SimulatedBackend
from headrace.engine.simulated.fault import Faults, parse_faults
from headrace.engine.simulated.faulty import FaultyBackend
from headrace.engine.simulated.timing import Timing
from headrace.engine.worker.backend import Backend, SequenceSlice
from headrace.engine.worker.config import WorkerConfig
from headrace.text.tokenizer import load_tokenizer

GREEDY = SamplingPlan(max_tokens=100)
TIMING = Timing(step_s=0.001, prefill_tokens_per_s=1000.0, itl_s=0.010)


def backend(**changes: object) -> SimulatedBackend:
    values: dict[str, object] = {
        "simulate_step_ms": 0.0,
        "simulate_itl_ms": 0.0,
        "simulate_prefill_tokens_per_s": 1e12,
    }
    return SimulatedBackend(WorkerConfig(**(values | changes)))  # type: ignore[arg-type]


def piece(
    token_ids: list[int],
    *,
    start: int = 0,
    blocks: range = range(16),
    table: list[int] | None = None,
    plan: SamplingPlan = GREEDY,
    samples: bool = True,
) -> SequenceSlice:
    return SequenceSlice(
        sequence_id=1, token_ids=token_ids, start=start, block_table=table or blocks, samples=samples, plan=plan
    )


def tokens(engine: Backend, pieces: list[SequenceSlice]) -> list[int]:
    """What those of the slices that sample came to."""
    return [result.token_id for result in engine.execute(pieces, {}) if result.token_id is not None]


def answer(prompt: list[int], count: int, plan: SamplingPlan = GREEDY) -> list[int]:
    engine = backend()
    words = tokens(engine, [piece(prompt, plan=plan)])
    while len(words) < count:
        words += tokens(engine, [piece(words[-1:], start=len(prompt) + len(words) - 1, plan=plan)])
    return words


@pytest.mark.parametrize(
    ("prefill_tokens", "decodes", "duration_s"),
    [
        (0, 1, 0.001 + 0.010),
        (0, 11, 0.001 + 0.010 * 1.2),
        (500, 0, 0.001 + 0.5),
        (500, 1, 0.001 + 0.5 + 0.010),
    ],
)
def test_a_step_takes_its_fixed_part_its_prompts_and_one_pass_for_its_decodes(
    prefill_tokens: int, decodes: int, duration_s: float
) -> None:
    assert TIMING.duration_s(prefill_tokens=prefill_tokens, decodes=decodes) == pytest.approx(duration_s)


def test_slow_multiplies_every_part() -> None:
    slow = Timing(step_s=0.001, prefill_tokens_per_s=1000.0, itl_s=0.010, slow=4.0)
    assert slow.duration_s(prefill_tokens=7, decodes=3) == pytest.approx(
        4 * TIMING.duration_s(prefill_tokens=7, decodes=3)
    )


def test_a_step_really_takes_its_time() -> None:
    engine = backend(simulate_itl_ms=10.0, fault="slow=3")
    tokens(engine, [piece([5, 6])])
    began = time.monotonic()
    tokens(engine, [piece([7], start=2)])
    assert time.monotonic() - began >= 0.030


def test_the_same_prompt_gives_the_same_words_and_another_prompt_gives_others() -> None:
    assert answer([5, 6, 7], 20) == answer([5, 6, 7], 20)
    assert answer([5, 6, 7], 20) != answer([5, 6, 8], 20)


def test_the_words_vary_and_never_end_the_answer() -> None:
    words = answer([5, 6, 7], 200)
    assert len(set(words)) > 40
    assert not set(words) & backend().eos_ids
    assert max(words) < backend().vocab_size


def test_where_a_prompt_is_cut_does_not_change_the_next_word() -> None:
    prompt = list(range(10, 40))
    engine = backend()
    assert tokens(engine, [piece(prompt[:7], samples=False)]) == []
    assert tokens(engine, [piece(prompt[7:], start=7)]) == answer(prompt, 1)


def test_neighbours_in_the_batch_do_not_change_a_word() -> None:
    both = tokens(backend(), [piece([1, 2, 3], blocks=range(4)), piece([9, 8], blocks=range(4, 8))])
    assert both == [*answer([1, 2, 3], 1), *answer([9, 8], 1)]


def test_an_answer_moved_to_another_replica_goes_on_as_if_unbroken() -> None:
    whole = answer([5, 6, 7], 30)
    assert answer([5, 6, 7, *whole[:11]], 19) == whole[11:]


def test_the_seed_matters_only_when_sampling() -> None:
    sampled = [SamplingPlan(max_tokens=9, temperature=1.0, seed=seed) for seed in (1, 2)]
    assert answer([5], 9, sampled[0]) == answer([5], 9, sampled[0])
    assert answer([5], 9, sampled[0]) != answer([5], 9, sampled[1])
    assert answer([5], 9, SamplingPlan(max_tokens=9, seed=1)) == answer([5], 9, SamplingPlan(max_tokens=9, seed=2))


def test_a_wrong_block_table_changes_the_answer() -> None:
    engine = backend()
    tokens(engine, [piece([5, 6, 7])])
    right, wrong = piece([8], start=3), piece([8], start=3, blocks=range(1, 16))
    assert tokens(engine, [right]) != tokens(engine, [wrong])


def test_a_copied_block_carries_its_tokens_along() -> None:
    engine = backend()
    whole = answer(list(range(10, 30)), 5)
    tokens(engine, [piece(list(range(10, 30)))])  # blocks 0 and 1
    engine.copy_blocks([(1, 9), (9, 5)])  # in this order
    assert tokens(engine, [piece(whole[:1], start=20, table=[0, 5, 7])]) == whole[1:2]


def test_allowed_and_banned_tokens_and_masks_are_obeyed() -> None:
    only = SamplingPlan(max_tokens=100, allowed_token_ids=(7, 8), banned_token_ids=(7,))
    assert answer([5, 6], 4, only) == [8] * 4
    mask = np.zeros(49_152 // 32, dtype=np.int32)
    mask[1] = 0b110
    (result,) = backend().execute([piece([5, 6])], {1: mask})
    assert result.token_id in (33, 34)
    (result,) = backend().execute([piece([5, 6], plan=replace(only, banned_token_ids=(7, 8)))], {})
    assert result.problem is not None


def test_log_probabilities_are_those_of_words_that_are_equally_likely() -> None:
    plan = SamplingPlan(max_tokens=1, logprobs=3, prompt_logprobs=1)
    known = [5, 338, 7]
    (result,) = backend().execute([replace(piece(known, plan=plan), known_token_ids=known, prompt_length=3)], {})
    assert result.logprobs is not None
    assert result.logprobs.token.logprob == pytest.approx(-math.log(64), abs=1e-5)
    assert (result.logprobs.token.rank, len(result.logprobs.top)) == (1, 3)
    assert [entry.token.token_id for entry in result.prompt_logprobs] == [338, 7]
    assert [entry.token.rank for entry in result.prompt_logprobs] == [1, 65]


def test_every_word_is_a_space_and_letters_in_the_shipped_tokenizer() -> None:
    tokenizer = load_tokenizer(shipped_model_path())
    assert tokenizer.eos_ids == backend().eos_ids
    assert tokenizer.vocab_size == backend().vocab_size
    for word in set(answer([5, 6, 7], 200)):
        text = tokenizer.decode([word])
        assert text[0] == " "
        assert text[1:].isalpha()


def test_faults_are_read_together() -> None:
    assert parse_faults(" slow=1.5, die_after_tokens=0 ,full_cache") == Faults(
        slow=1.5, die_after_tokens=0, full_cache=True
    )
    assert parse_faults("freeze_after_tokens=3,garbage_after_tokens=4") == Faults(
        freeze_after_tokens=3, garbage_after_tokens=4
    )
    assert parse_faults("") == Faults()


@pytest.mark.parametrize(
    "text", ["explode", "slow", "slow=0", "slow=nan", "slow=inf", "die_after_tokens=-1", "full_cache=1"]
)
def test_a_fault_that_does_not_exist_is_a_start_error_with_the_ones_that_do(text: str) -> None:
    with pytest.raises(StartError, match="is not one of: slow=FACTOR, freeze_after_tokens=N"):
        parse_faults(text)


def test_garbage_begins_after_the_given_number_of_tokens() -> None:
    engine = FaultyBackend(backend(), Faults(garbage_after_tokens=2))
    pieces = [piece([n], blocks=range(n, n + 1)) for n in range(3)]
    assert [token < engine.vocab_size for token in tokens(engine, pieces)] == [True, True, False]
    assert tokens(engine, pieces[:1])[0] >= engine.vocab_size
