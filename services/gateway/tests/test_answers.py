"""Answers that go well: what a client hears, and what the gateway says to router and engine."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headrace.api.common.v1.sampling_pb2 import SamplingParams
from headrace.api.inference.v1 import inference_service_pb2 as pb

SAID = "The headrace brings steady water to the mill; the wheel turns evenly."
EOS = 256
MODEL = "bytes"


async def test_an_answer_streams_as_started_deltas_finished(world: Any) -> None:
    engine = await world.engine("e-1")
    client = await world.gateway()

    heard = await client.generate("Say it.", seed=11)

    assert [s.model for s in heard.started] == [MODEL]
    assert (heard.started[0].prompt_tokens, heard.started[0].seed) == (7, 11)
    assert heard.started[0].request_id == world.router.asked[0].request_id
    assert heard.text == SAID
    assert heard.token_ids == [*SAID.encode(), EOS]
    assert heard.reason == "STOP"
    finished = heard.finished[0]
    assert (finished.engine_id, finished.attempts) == ("e-1", 1)
    assert (finished.usage.prompt_tokens, finished.usage.completion_tokens) == (7, len(SAID) + 1)
    assert list(engine.submits[0].token_ids) == list(b"Say it.")


@pytest.mark.parametrize("n", [1, 2])
async def test_a_client_hears_that_it_has_begun_while_the_engine_computes_the_prompt(world: Any, n: int) -> None:
    heard = asyncio.Event()

    async def long_prompt(engine: Any, stream: Any, submit: Any) -> None:
        await heard.wait()
        for slot in range(submit.slot, submit.slot + n):
            stream.step({slot: ord("a")}, stream.finish(slot, "LENGTH"))

    await world.engine("e-1", long_prompt)
    client = await world.gateway()
    kinds = []
    async with client.stream(n=n) as events:
        async for event in events:
            kinds.append(event.WhichOneof("event"))
            heard.set()
    assert kinds == ["started", *["delta"] * n, "finished"]


async def test_the_timings_add_up_and_have_a_gap_for_each_later_token(world: Any) -> None:
    async def paced(engine: Any, stream: Any, submit: Any) -> None:
        for token in b"abc":
            await asyncio.sleep(0.05)
            stream.step({submit.slot: token})
        stream.step({}, stream.finish(submit.slot, "LENGTH"))

    await world.engine("e-1", paced)
    client = await world.gateway()

    timings = (await client.generate()).finished[0].timings

    assert len(timings.inter_token_ms) == 2
    assert all(gap > 40 for gap in timings.inter_token_ms)
    assert timings.first_token_ms > 49
    assert timings.queue_ms > 3.0  # the engine's own 3 ms, after ours
    assert timings.prefill_ms == 7.0
    assert timings.total_ms >= timings.first_token_ms + sum(timings.inter_token_ms)


async def test_every_sampling_field_reaches_the_engine_resolved(world: Any) -> None:
    engine = await world.engine("e-1")
    client = await world.gateway()

    await client.generate(
        max_tokens=5, temperature=0.5, top_k=3, top_p=0.25, seed=9, stop_token_ids=[1, 2], ignore_eos=True
    )
    await client.generate()

    full = SamplingParams(
        max_tokens=5, temperature=0.5, top_k=3, top_p=0.25, seed=9, stop_token_ids=[1, 2], ignore_eos=True
    )
    assert engine.submits[0].sampling == full
    bare = engine.submits[1].sampling
    assert (bare.max_tokens, bare.temperature, bare.top_k, bare.top_p) == (1024, 0.0, 0, 1.0)
    assert bare.HasField("seed")
    assert 19_000 < engine.submits[0].deadline_ms < 20_500  # gRPC rounds the client's 20 s up a little


async def test_a_drawn_seed_is_told_to_client_and_engine_alike(world: Any) -> None:
    engine = await world.engine("e-1")
    client = await world.gateway()

    seeds = [(await client.generate()).started[0].seed for _ in range(2)]

    assert seeds == [submit.sampling.seed for submit in engine.submits]
    assert seeds[0] != seeds[1]


async def test_max_tokens_ends_an_answer_with_length(world: Any) -> None:
    await world.engine("e-1")
    client = await world.gateway()

    heard = await client.generate(max_tokens=4)

    assert (heard.text, heard.reason) == (SAID[:4], "LENGTH")
    assert heard.finished[0].usage.completion_tokens == 4


async def test_the_answer_is_cut_to_what_the_context_still_allows(world: Any) -> None:
    engine = await world.engine("e-1")
    client = await world.gateway()

    await client.generate("x" * 32576, max_tokens=5000)

    assert engine.submits[0].sampling.max_tokens == 192


async def test_a_stop_text_across_tokens_ends_the_answer_before_it_and_cancels_at_the_engine(
    world: Any, eventually: Any
) -> None:
    async def endless(engine: Any, stream: Any, submit: Any) -> None:
        for token in b"one two STOP three" * 100:
            if engine.cancels:
                return
            stream.step({submit.slot: token})
            await asyncio.sleep(0.001)

    engine = await world.engine("e-1", endless)
    client = await world.gateway()

    heard = await client.generate(stop=["STOP"])

    assert (heard.text, heard.reason) == ("one two ", "STOP")
    assert heard.finished[0].usage.completion_tokens == len("one two STOP")
    assert heard.finished[0].timings.prefill_ms == 7.0  # from the engine's confirmation
    assert engine.cancels == [engine.submits[0].slot]
    await eventually(lambda: world.app._pool.open_slots == 0)


async def test_a_held_back_beginning_of_a_stop_text_is_shown_when_the_answer_ends_without_it(world: Any) -> None:
    await world.engine("e-1", said="so far ST")
    client = await world.gateway()

    heard = await client.generate(stop=["STOP"])

    assert (heard.text, heard.reason) == ("so far ST", "STOP")


async def test_half_characters_are_never_sent(world: Any) -> None:
    await world.engine("e-1", said="가🙂é")
    client = await world.gateway()

    heard = await client.generate()

    assert heard.text == "가🙂é"
    assert not any("\ufffd" in delta.text for delta in heard.deltas)


async def test_a_conversation_is_rendered_with_the_models_template(world: Any) -> None:
    engine = await world.engine("e-1")
    client = await world.gateway()

    message = pb.ChatMessage(role="user", content="Hi<|end|>")
    heard = await client.hear(client.open(client.stub.Chat, pb.ChatRequest(model=MODEL, messages=[message])))

    assert heard.text == SAID
    # <|user|> is 257 and <|assistant|> 258; the special token in the content stayed text.
    assert list(engine.submits[0].token_ids) == [257, *b"Hi<|end|>", 256, 258]


async def test_token_ids_are_taken_as_they_are(world: Any) -> None:
    engine = await world.engine("e-1")
    client = await world.gateway()

    request = pb.GenerateRequest(model=MODEL, token_ids=pb.TokenIds(ids=[5, 256, 299]))
    heard = await client.hear(client.open(client.stub.Generate, request))

    assert heard.text == SAID
    assert list(engine.submits[0].token_ids) == [5, 256, 299]


async def test_tokens_are_counted_for_prompts_and_conversations(world: Any) -> None:
    client = await world.gateway()
    talk = pb.Conversation(messages=[pb.ChatMessage(role="user", content="Hi")])

    text = await client.unary(client.stub.CountTokens, pb.CountTokensRequest(model=MODEL, text="abc"))
    chat = await client.unary(client.stub.CountTokens, pb.CountTokensRequest(model=MODEL, conversation=talk))

    assert (text.tokens, text.max_model_len) == (3, 32768)
    assert chat.tokens == 5


async def test_32_concurrent_streams_share_one_attach_stream_and_leave_nothing_behind(
    world: Any, eventually: Any, gauges: Any
) -> None:
    engine = await world.engine("e-1")
    client = await world.gateway()

    answers = await asyncio.gather(*(client.generate(f"request {n}") for n in range(32)))

    assert {heard.text for heard in answers} == {SAID}
    assert engine.attached == 1
    await eventually(lambda: gauges() == {"in_flight": 0, "open_slots": 0, "connections": 1})
    await eventually(lambda: len(world.router.released) == 32)


async def test_what_a_slow_client_has_not_read_is_merged(world: Any, eventually: Any) -> None:
    """The transport takes some 8,000 small messages before it pushes back, so the answer is longer than that."""
    total = 24000

    async def fast(engine: Any, stream: Any, submit: Any) -> None:
        for n in range(total - 1):
            stream.step({submit.slot: 97 + n % 26})
            if n % 50 == 0:
                await asyncio.sleep(0)
        stream.step({submit.slot: 33}, stream.finish(submit.slot, "LENGTH"))

    await world.engine("e-1", fast)
    client = await world.gateway()

    messages = []
    async with client.stream(max_tokens=total, ignore_eos=True) as events:
        messages.append(await anext(events))
        await eventually(lambda: world.app._pool.open_slots == 0)  # the engine was never held up
        async for event in events:
            messages.append(event)

    tokens = sum(len(m.delta.token_ids) for m in messages if m.HasField("delta"))
    assert tokens == total
    assert len(messages) < total / 2
    assert messages[-1].finished.usage.completion_tokens == total
