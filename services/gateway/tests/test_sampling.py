"""Sampling fields on their way to the engine, and log-probabilities on their way back."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headrace.api.common.v1.answer_pb2 import TokenLogprob, TokenLogprobs
from headrace.api.common.v1.sampling_pb2 import Choices, Constraint, LogitBias, SamplingParams
from headrace.api.engine.v1.engine_service_pb2 import PRIORITY_STANDARD, SlotLogprobs
from headrace.base.errors import InvalidRequest

SAID = "The headrace brings steady water to the mill; the wheel turns evenly."
EOS = 256


def likelihoods(token: int, logprob: float = -0.5) -> TokenLogprobs:
    return TokenLogprobs(
        token=TokenLogprob(token_id=token, logprob=logprob, rank=2),
        top=[TokenLogprob(token_id=token + 1, logprob=-0.25, rank=1)],
    )


PROMPT = [likelihoods(token) for token in b"ay it."]


async def say_likely(engine: Any, stream: Any, submit: Any) -> None:
    """As `say`, with log-probabilities for those who ask."""
    rest = [*engine.rest(submit), EOS][: submit.sampling.max_tokens]
    prompt = PROMPT if submit.sampling.HasField("prompt_logprobs") else []
    asked = submit.sampling.HasField("logprobs")
    for n, token in enumerate(rest):
        if submit.slot in engine.cancels:
            return
        entries = [SlotLogprobs(slot=submit.slot, logprobs=likelihoods(token))] if asked else []
        last = n == len(rest) - 1
        ends = [stream.finish(submit.slot, "STOP", prompt_logprobs=prompt, cached_tokens=4)] if last else []
        stream.step({submit.slot: token}, *ends, logprobs=entries)
        await asyncio.sleep(0)


async def break_after_5(engine: Any, stream: Any, submit: Any) -> None:
    for token in engine.rest(submit)[:5]:
        entry = SlotLogprobs(slot=submit.slot, logprobs=likelihoods(token))
        stream.step({submit.slot: token}, logprobs=[entry])
    stream.break_off()


async def test_every_field_reaches_the_engine_with_the_tenant_as_its_domain(world: Any) -> None:
    engine = await world.engine("e-1")
    client = await world.gateway()
    params = {
        "max_tokens": 50, "temperature": 0.5, "top_k": 3, "top_p": 0.25, "seed": 9, "stop_token_ids": [1],
        "ignore_eos": True, "min_p": 0.125, "repetition_penalty": 1.5, "frequency_penalty": -0.5,
        "presence_penalty": 0.75, "logit_bias": [LogitBias(token_id=5, bias=-2.0), LogitBias(token_id=4, bias=2.0)],
        "allowed_token_ids": [7, 6], "banned_token_ids": [9, 8], "min_tokens": 4,
        "constraint": Constraint(choice=Choices(texts=["a", "b"])),
    }  # fmt: skip

    await client.generate(**params)

    assert engine.submits[0].sampling == SamplingParams(**params)
    assert (engine.submits[0].isolation_domain, engine.submits[0].priority) == ("t", PRIORITY_STANDARD)


@pytest.mark.parametrize("constraint", [Constraint(json_schema='{"type": "integer"}'), Constraint(regex="[a-z]+")])
async def test_a_constraint_is_passed_on_for_the_engine_to_compile(world: Any, constraint: Constraint) -> None:
    engine = await world.engine("e-1")
    client = await world.gateway()

    await client.generate(constraint=constraint)

    assert engine.submits[0].sampling.constraint == constraint


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        ({"logit_bias": [LogitBias(token_id=5), LogitBias(token_id=300)]}, "sampling.logit_bias[1].token_id"),
        ({"allowed_token_ids": [0, 300]}, "sampling.allowed_token_ids[1]"),
        ({"min_p": float("nan")}, "sampling.min_p"),
        ({"min_tokens": 3, "max_tokens": 2}, "sampling.min_tokens"),
        ({"n": 0}, "sampling.n"),
        ({"constraint": Constraint()}, "sampling.constraint"),
        ({"constraint": Constraint(choice=Choices(texts=["x", ""]))}, "sampling.constraint.choice.texts[1]"),
    ],
)
async def test_a_bad_field_is_refused_by_name_before_any_router_is_asked(world: Any, sampling: Any, field: str) -> None:
    client = await world.gateway()

    with pytest.raises(InvalidRequest) as refused:
        await client.generate(**sampling)

    assert refused.value.field == field
    assert world.router.asked == []


async def test_min_tokens_is_cut_with_max_tokens_to_what_the_context_allows(world: Any) -> None:
    engine = await world.engine("e-1")
    client = await world.gateway()

    await client.generate("x" * 32760, min_tokens=20)

    assert (engine.submits[0].sampling.max_tokens, engine.submits[0].sampling.min_tokens) == (8, 8)


async def test_a_stop_text_counts_only_after_min_tokens(world: Any) -> None:
    await world.engine("e-1", break_after_5)
    await world.engine("e-2")
    client = await world.gateway()

    at = SAID.index("the ")
    early = await client.generate(stop=["the "], min_tokens=at + 1, max_tokens=60)
    exact = await client.generate(stop=["the "], min_tokens=at, max_tokens=60)

    assert early.text == SAID[: SAID.index("the wheel")]
    assert exact.text == SAID[:at]


async def test_each_token_comes_with_its_log_probabilities_and_the_prompt_s_come_last(world: Any) -> None:
    engine = await world.engine("e-1", say_likely)
    client = await world.gateway()

    heard = await client.generate("Say it.", logprobs=1, prompt_logprobs=1)

    assert [entry for delta in heard.deltas for entry in delta.logprobs] == [likelihoods(t) for t in heard.token_ids]
    assert all(len(delta.logprobs) == len(delta.token_ids) for delta in heard.deltas)
    assert list(heard.finished[0].prompt_logprobs) == PROMPT
    assert heard.finished[0].usage.cached_tokens == 4
    asked = engine.submits[0].sampling
    assert (asked.logprobs, asked.prompt_logprobs) == (1, 1)
    plain = await client.generate("Say it.")
    assert not any(delta.logprobs for delta in plain.deltas)
    assert not plain.finished[0].prompt_logprobs


async def test_logprobs_0_asks_for_the_tokens_own(world: Any) -> None:
    engine = await world.engine("e-1", say_likely)
    client = await world.gateway()

    await client.generate(logprobs=0, prompt_logprobs=0)

    assert engine.submits[0].sampling.HasField("logprobs")
    assert engine.submits[0].sampling.HasField("prompt_logprobs")


async def test_log_probabilities_survive_a_migration_and_a_stop_text_in_one_piece(world: Any) -> None:
    """The prompt's are asked of the second engine again, since the first took them along."""
    await world.engine("e-1", break_after_5)
    second = await world.engine("e-2", say_likely)
    client = await world.gateway()

    heard = await client.generate("Say it.", logprobs=1, prompt_logprobs=1)
    assert [entry for delta in heard.deltas for entry in delta.logprobs] == [
        likelihoods(t) for t in [*SAID.encode(), EOS]
    ]
    assert list(heard.finished[0].prompt_logprobs) == PROMPT
    assert second.submits[0].sampling.prompt_logprobs == 1

    cut = await client.generate("Say it.", logprobs=1, stop=["brings"])
    assert cut.text == "The headrace "
    assert [entry for delta in cut.deltas for entry in delta.logprobs] == [
        likelihoods(t) for t in b"The headrace brings"
    ]


async def test_merged_messages_keep_one_entry_per_token(world: Any, eventually: Any) -> None:
    total = 12000

    async def fast(engine: Any, stream: Any, submit: Any) -> None:
        for n in range(total):
            token = 97 + n % 26
            ends = [stream.finish(submit.slot, "LENGTH")] if n == total - 1 else []
            entry = SlotLogprobs(slot=submit.slot, logprobs=likelihoods(token))
            stream.step({submit.slot: token}, *ends, logprobs=[entry])
            if n % 50 == 0:
                await asyncio.sleep(0)

    await world.engine("e-1", fast)
    client = await world.gateway()

    deltas = []
    async with client.stream(max_tokens=total, logprobs=1) as events:
        await anext(events)
        await eventually(lambda: world.app._pool.open_slots == 0)
        async for event in events:
            deltas.append(event.delta)

    tokens = [token for delta in deltas for token in delta.token_ids]
    assert len(tokens) == total
    assert [entry.token.token_id for delta in deltas for entry in delta.logprobs] == tokens
    assert len(deltas) < total / 2


@pytest.mark.parametrize(
    "entries",
    [
        pytest.param([], id="missing"),
        pytest.param([SlotLogprobs(slot=1, logprobs=likelihoods(66))], id="of another token"),
        pytest.param([SlotLogprobs(slot=9, logprobs=likelihoods(65))], id="of another slot"),
        pytest.param([SlotLogprobs(slot=1, logprobs=likelihoods(65, float("nan")))], id="not a number"),
        pytest.param([SlotLogprobs(slot=1, logprobs=likelihoods(65, float("-inf")))], id="infinite"),
    ],
)
async def test_log_probabilities_that_cannot_be_true_never_reach_a_client(world: Any, entries: Any) -> None:
    async def wrong(engine: Any, stream: Any, submit: Any) -> None:
        stream.step({submit.slot: 65}, logprobs=entries)

    await world.engine("e-1", wrong)
    await world.engine("e-2", say_likely)
    client = await world.gateway()

    heard = await client.generate(logprobs=1)

    assert (heard.text, heard.finished[0].attempts) == (SAID, 2)


async def test_only_the_first_of_many_answers_carries_the_prompt_s_log_probabilities(world: Any) -> None:
    async def two(engine: Any, stream: Any, submit: Any) -> None:
        first, second = submit.slot, submit.slot + 1
        stream.step({first: 65, second: 66})
        stream.step(
            {first: 67, second: 68},
            stream.finish(first, "LENGTH", prompt_logprobs=PROMPT),
            stream.finish(second, "LENGTH"),
        )

    await world.engine("e-1", two)
    client = await world.gateway()

    heard = await client.generate("Say it.", n=2, max_tokens=2, prompt_logprobs=1)

    assert heard.texts == {0: "AC", 1: "BD"}
    assert list(heard.finished[0].prompt_logprobs) == PROMPT


async def say_three_a_step(engine: Any, stream: Any, submit: Any) -> None:
    """Three tokens of one slot in each step, as an engine does whose guesses come true; the finish with the last."""
    rest = [*engine.rest(submit), EOS][: submit.sampling.max_tokens]
    asked = submit.sampling.HasField("logprobs")
    for first in range(0, len(rest), 3):
        if submit.slot in engine.cancels:
            return
        part = rest[first : first + 3]
        entries = [SlotLogprobs(slot=submit.slot, logprobs=likelihoods(token)) for token in part if asked]
        ends = [stream.finish(submit.slot, "STOP")] if first + 3 >= len(rest) else []
        stream.steps += 1
        stream.raw(stream.steps, [submit.slot] * len(part), part, ends, entries)
        await asyncio.sleep(0)


async def test_several_tokens_of_a_step_are_an_answer_like_any_other(world: Any) -> None:
    await world.engine("e-1", say_three_a_step)
    client = await world.gateway()

    whole = await client.generate("Say it.", logprobs=1)
    short = await client.generate("Say it.", max_tokens=7)
    cut = await client.generate("Say it.", stop=["steady"])

    assert whole.text == SAID
    assert [entry for delta in whole.deltas for entry in delta.logprobs] == [likelihoods(t) for t in whole.token_ids]
    assert cut.text == SAID[: SAID.index("steady")]
    assert short.text == SAID[:7]


async def test_more_tokens_in_a_step_than_the_answer_has_room_for_are_garbage(world: Any) -> None:
    async def too_many(engine: Any, stream: Any, submit: Any) -> None:
        stream.steps += 1
        stream.raw(stream.steps, [submit.slot] * 3, engine.rest(submit)[:3])

    await world.engine("e-1", too_many)
    await world.engine("e-2", say_three_a_step)
    client = await world.gateway()

    heard = await client.generate("Say it.", max_tokens=2)

    assert heard.text == SAID[:2]
    assert heard.finished[0].attempts == 2
