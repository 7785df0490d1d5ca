"""OpenAI's own client, unmodified, against a real gateway with scripted engines behind it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from pydantic import BaseModel

from headrace.api.common.v1.answer_pb2 import TokenLogprob, TokenLogprobs
from headrace.api.engine.v1 import engine_service_pb2 as engine_pb2
from headrace.base.errors import Exhausted
from headrace.gateway import metrics

KEY = "hr_" + "k" * 43
ONLY_OTHER_KEY = "hr_" + "o" * 43
SAID = "The headrace brings steady water to the mill; the wheel turns evenly."
ASKED: list[Any] = [{"role": "user", "content": "Say it."}]
PEOPLE = "水輪が回る 👩‍👩‍👧‍👦 물레방아 🌊"


@pytest.fixture
async def connect(world: Any) -> AsyncIterator[Callable[..., Any]]:
    """A gateway that speaks HTTP, and clients of it."""
    opened: list[AsyncOpenAI] = []

    async def connected(**options: Any) -> AsyncOpenAI:
        if world.app is None:
            await world.gateway(http_address="127.0.0.1:0")
        given = {"api_key": KEY, "max_retries": 0, "timeout": 20.0} | options
        client = AsyncOpenAI(base_url=f"http://{world.app.http_address}/v1", **given)
        opened.append(client)
        return client

    yield connected
    for client in opened:
        await client.close()


async def test_a_chat_is_answered_whole(world: Any, connect: Any) -> None:
    engine = await world.engine("e-1")
    client = await connect()

    answer = await client.chat.completions.create(model="bytes", messages=ASKED)

    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", SAID, "stop")
    assert answer.usage.completion_tokens == len(SAID) + 1
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.id == f"chatcmpl-{answer._request_id}" == f"chatcmpl-{engine.submits[0].request_id}"
    assert (answer.object, answer.model) == ("chat.completion", "bytes")


async def test_a_streamed_chat_says_the_same_in_chunks(world: Any, connect: Any) -> None:
    await world.engine("e-1")
    client = await connect()

    chunks = [c async for c in await client.chat.completions.create(model="bytes", messages=ASKED, stream=True)]

    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == SAID
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["stop"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks), "nobody asked for usage, so there is no chunk of it"


async def test_usage_comes_last_when_it_is_asked_for(world: Any, connect: Any) -> None:
    await world.engine("e-1")
    client = await connect()

    options: Any = {"include_usage": True}
    stream = await client.chat.completions.create(model="bytes", messages=ASKED, stream=True, stream_options=options)
    chunks = [chunk async for chunk in stream]

    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == len(SAID) + 1
    assert all(chunk.usage is None for chunk in chunks[:-1])


async def test_the_clients_stream_helper_gathers_the_answer(world: Any, connect: Any) -> None:
    await world.engine("e-1")
    client = await connect()

    async with client.chat.completions.stream(model="bytes", messages=ASKED) as stream:
        kinds = {event.type async for event in stream}
        final = await stream.get_final_completion()

    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert final.choices[0].message.content == SAID


class Person(BaseModel):
    name: str
    age: int


async def test_a_schema_goes_to_the_engine_and_its_answer_comes_back_parsed(world: Any, connect: Any) -> None:
    engine = await world.engine("e-1", said='{"name":"Ada","age":36}')
    client = await connect()

    answer = await client.chat.completions.parse(model="bytes", messages=ASKED, response_format=Person)
    async with client.chat.completions.stream(model="bytes", messages=ASKED, response_format=Person) as stream:
        streamed = await stream.get_final_completion()

    assert answer.choices[0].message.parsed == Person(name="Ada", age=36) == streamed.choices[0].message.parsed
    schema = json.loads(engine.submits[0].sampling.constraint.json_schema)
    assert set(schema["properties"]) == {"name", "age"}
    assert schema == json.loads(engine.submits[1].sampling.constraint.json_schema)


async def test_completions_continue_texts_and_token_ids(world: Any, connect: Any) -> None:
    engine = await world.engine("e-1")
    client = await connect()

    whole = await client.completions.create(model="bytes", prompt="Once", max_tokens=3)
    stream = await client.completions.create(model="bytes", prompt=[1, 2, 3], stream=True)
    text = "".join([chunk.choices[0].text async for chunk in stream])

    assert (whole.object, whole.choices[0].text, whole.choices[0].finish_reason) == ("text_completion", "The", "length")
    assert text == SAID
    assert list(engine.submits[1].token_ids) == [1, 2, 3]


async def test_every_parameter_reaches_the_engine(world: Any, connect: Any) -> None:
    engine = await world.engine("e-1")
    client = await connect()
    extra = {"top_k": 7, "min_p": 0.25, "repetition_penalty": 1.5, "min_tokens": 2, "ignore_eos": True}

    await client.chat.completions.create(
        model="bytes",
        messages=ASKED,
        max_completion_tokens=5,
        temperature=0.5,
        top_p=0.75,
        seed=-1,
        stop=["ZZZ"],
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={"65": -100},
        user="somebody",
        metadata={"a": "b"},
        extra_body=extra | {"stop_token_ids": [9], "guided_regex": "[a-z]+"},
    )

    sampling = engine.submits[0].sampling
    given = {
        name: getattr(sampling, name)
        for name in ("max_tokens", "temperature", "top_p", "presence_penalty", "frequency_penalty", *extra)
    }
    assert given == extra | {
        "max_tokens": 5,
        "temperature": 0.5,
        "top_p": 0.75,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
    }
    assert engine.submits[0].sampling.seed == (1 << 64) - 1
    assert list(sampling.stop_token_ids) == [9]
    assert [(entry.token_id, entry.bias) for entry in sampling.logit_bias] == [(65, -100.0)]
    assert sampling.constraint.regex == "[a-z]+"


async def test_the_temperature_is_openais_unless_somebody_says_otherwise(world: Any, connect: Any) -> None:
    engine = await world.engine("e-1")
    client = await connect()

    await client.chat.completions.create(model="bytes", messages=ASKED)
    await client.chat.completions.create(model="bytes", messages=ASKED, temperature=0)

    assert [submit.sampling.temperature for submit in engine.submits] == [1.0, 0.0]


async def test_roles_and_text_parts_are_rendered_with_the_models_template(world: Any, connect: Any) -> None:
    engine = await world.engine("e-1")
    client = await connect()
    parts = [{"type": "text", "text": "Say "}, {"type": "text", "text": "it."}]
    earlier = {"role": "assistant", "content": "No.", "refusal": None, "tool_calls": None, "annotations": []}

    await client.chat.completions.create(
        model="bytes",
        messages=[{"role": "developer", "content": "Obey."}, earlier, {"role": "user", "content": parts}],
    )

    spelled = bytes(t for t in engine.submits[0].token_ids if t < 256).decode()
    assert spelled == "Obey.No.Say it."


async def test_several_answers_stream_side_by_side(world: Any, connect: Any) -> None:
    async def play(engine: Any, stream: Any, submit: Any) -> None:
        for slot in range(submit.slot, submit.slot + 2):
            stream.step({slot: 97 + slot - submit.slot})
            stream.step({slot: 33}, stream.finish(slot, "LENGTH"))

    await world.engine("e-1", play)
    client = await connect()

    whole = await client.chat.completions.create(model="bytes", messages=ASKED, n=2, max_tokens=2)
    texts = {0: "", 1: ""}
    async for chunk in await client.chat.completions.create(
        model="bytes", messages=ASKED, n=2, max_tokens=2, stream=True
    ):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""

    assert [(c.index, c.message.content, c.finish_reason) for c in whole.choices] == [
        (0, "a!", "length"),
        (1, "b!", "length"),
    ]
    assert whole.usage.completion_tokens == 4
    assert texts == {0: "a!", 1: "b!"}


async def with_logprobs(engine: Any, stream: Any, submit: Any) -> None:
    """ "é" over two tokens, then the end token, each with itself and the end token as the likeliest."""
    tokens = [*"é".encode(), 256]
    for n, token in enumerate(tokens):
        both = [TokenLogprob(token_id=token, logprob=-0.5, rank=1), TokenLogprob(token_id=256, logprob=-1.5, rank=2)]
        entry = engine_pb2.SlotLogprobs(slot=submit.slot, logprobs=TokenLogprobs(token=both[0], top=both))
        finish = [stream.finish(submit.slot, "STOP")] if n == 2 else []
        stream.step({submit.slot: token}, *finish, logprobs=[entry])


async def test_log_probabilities_have_the_official_shape(world: Any, connect: Any) -> None:
    await world.engine("e-1", with_logprobs)
    client = await connect()

    chat = await client.chat.completions.create(model="bytes", messages=ASKED, logprobs=True, top_logprobs=2)
    stream = await client.chat.completions.create(
        model="bytes", messages=ASKED, logprobs=True, top_logprobs=2, stream=True
    )
    streamed = [entry async for c in stream if c.choices[0].logprobs for entry in c.choices[0].logprobs.content]
    plain = await client.completions.create(model="bytes", prompt="x", logprobs=2)

    first, second = chat.choices[0].logprobs.content
    assert (first.bytes, second.bytes, first.logprob) == ([0xC3], [0xA9], -0.5)
    assert bytes(first.bytes + second.bytes).decode() == chat.choices[0].message.content == "é"
    assert [(top.token, top.bytes) for top in first.top_logprobs][1] == ("<|end|>", list(b"<|end|>"))
    assert streamed == [first, second]
    found = plain.choices[0].logprobs
    assert found.tokens == ["bytes:\\xc3", "bytes:\\xa9"]
    assert found.token_logprobs == [-0.5, -0.5]
    assert found.top_logprobs[0] == {"bytes:\\xc3": -0.5, "<|end|>": -1.5}
    assert found.text_offset == [0, 0]


async def test_a_stop_text_is_not_shown_however_it_is_cut(world: Any, connect: Any) -> None:
    await world.engine("e-1", said="before<|im_end|>after")
    client = await connect()

    whole = await client.chat.completions.create(model="bytes", messages=ASKED, stop="<|im_end|>")
    stream = await client.chat.completions.create(model="bytes", messages=ASKED, stop=["<|im_end|>"], stream=True)
    texts = [chunk.choices[0].delta.content or "" async for chunk in stream]

    assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == ("before", "stop")
    assert "".join(texts) == "before"


async def test_no_chunk_breaks_a_character(world: Any, connect: Any) -> None:
    await world.engine("e-1", said=PEOPLE)
    client = await connect()

    whole = await client.chat.completions.create(model="bytes", messages=ASKED)
    stream = await client.chat.completions.create(model="bytes", messages=ASKED, stream=True)
    pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]

    assert "".join(pieces) == whole.choices[0].message.content == PEOPLE
    assert len(pieces) > 10
    assert "\ufffd" not in "".join(pieces)


async def test_32_clients_at_once_all_get_their_answers(world: Any, connect: Any, eventually: Any, gauges: Any) -> None:
    await world.engine("e-1")
    client = await connect()

    async def one(n: int) -> str:
        messages: Any = [{"role": "user", "content": f"request {n}"}]
        stream = await client.chat.completions.create(model="bytes", messages=messages, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert set(await asyncio.gather(*(one(n) for n in range(32)))) == {SAID}
    await eventually(lambda: gauges() == {"in_flight": 0, "open_slots": 0, "connections": 1})


async def test_models_are_those_of_the_key(world: Any, connect: Any) -> None:
    client, other = await connect(), await connect(api_key=ONLY_OTHER_KEY)

    assert [model.id async for model in client.models.list()] == ["bytes"]
    assert [model.id async for model in other.models.list()] == []
    assert (await client.models.retrieve("bytes")).id == "bytes"
    with pytest.raises(openai.NotFoundError):
        await other.models.retrieve("bytes")


async def test_refusals_are_the_clients_own_exceptions(world: Any, connect: Any) -> None:
    await world.engine("e-1")
    client = await connect()
    create = client.chat.completions.create

    with pytest.raises(openai.AuthenticationError) as unknown:
        await (await connect(api_key="hr_" + "x" * 43)).chat.completions.create(model="bytes", messages=ASKED)
    assert unknown.value.code == "invalid_api_key"
    with pytest.raises(openai.PermissionDeniedError):
        await (await connect(api_key=ONLY_OTHER_KEY)).chat.completions.create(model="bytes", messages=ASKED)
    with pytest.raises(openai.NotFoundError) as nowhere:
        await create(model="nothing", messages=ASKED)
    assert nowhere.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as range_:
        await create(model="bytes", messages=ASKED, top_p=1.5)
    assert (range_.value.param, range_.value.type) == ("top_p", "invalid_request_error")
    with pytest.raises(openai.BadRequestError) as unknown_field:
        await create(model="bytes", messages=ASKED, extra_body={"temprature": 1})
    assert (unknown_field.value.param, unknown_field.value.code) == ("temprature", "unknown_parameter")
    with pytest.raises(openai.BadRequestError) as template:
        await create(model="bytes", messages=[{"role": "user", "content": "refuse"}])
    assert template.value.param == "messages"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_that_is_too_long_is_refused_before_any_event(world: Any, connect: Any, stream: bool) -> None:
    await world.engine("e-1")
    client = await connect()

    with pytest.raises(openai.BadRequestError) as refused:
        await client.completions.create(model="bytes", prompt="a" * 40000, stream=stream)

    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "prompt")


async def test_an_engines_refusal_names_the_clients_own_field(world: Any, connect: Any) -> None:
    async def refuse(engine: Any, stream: Any, submit: Any) -> None:
        why = "sampling.constraint.json_schema has no meaning"
        field = "sampling.constraint.json_schema"
        stream.step(
            {},
            stream.finish(submit.slot, "ERROR", error_reason="INVALID_FIELD", error_field=field, error_message=why),
        )

    await world.engine("e-1", refuse)
    client = await connect()
    shape: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no such type"}}}

    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(model="bytes", messages=ASKED, response_format=shape, stream=True)

    assert refused.value.param == "response_format.json_schema.schema"
    assert refused.value.body == {
        "message": "response_format.json_schema.schema: has no meaning",
        "type": "invalid_request_error",
        "param": "response_format.json_schema.schema",
        "code": "invalid_value",
    }


async def test_tools_are_refused_by_name(world: Any, connect: Any) -> None:
    client = await connect()
    tools: Any = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]

    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(model="bytes", messages=ASKED, tools=tools)

    assert (refused.value.code, refused.value.param) == ("tools_not_supported", "tools")


async def test_an_answer_that_breaks_off_ends_in_an_error_not_in_silence(world: Any, connect: Any) -> None:
    async def die(engine: Any, stream: Any, submit: Any) -> None:
        for token in b"ten tokens":
            stream.step({submit.slot: token})
        stream.break_off()

    await world.engine("e-1", die)
    client = await connect()
    stream = await client.chat.completions.create(model="bytes", messages=ASKED, stream=True, timeout=20)

    texts: list[str] = []
    with pytest.raises(openai.APIError) as broken:
        async for chunk in stream:
            texts.append(chunk.choices[0].delta.content or "")

    assert "".join(texts) == "ten tokens"
    assert broken.value.code == "stream_broken"


async def test_a_full_suite_says_when_to_come_back(world: Any, connect: Any) -> None:
    client = await connect()
    world.router.refusals = [Exhausted("too much is waiting", reason="QUEUE_FULL", retry_after_s=2.5)]

    with pytest.raises(openai.RateLimitError) as full:
        await client.chat.completions.create(model="bytes", messages=ASKED)

    assert full.value.code == "queue_full"
    assert (full.value.response.headers["retry-after"], full.value.response.headers["retry-after-ms"]) == ("3", "2500")


async def test_a_deadline_is_a_status_and_is_not_tried_again(world: Any, connect: Any) -> None:
    async def silent(engine: Any, stream: Any, submit: Any) -> None:
        return

    engine = await world.engine("e-1", silent)
    client = await connect(max_retries=2)

    with pytest.raises(openai.InternalServerError) as late:
        await client.chat.completions.create(
            model="bytes", messages=ASKED, stream=True, extra_headers={"x-request-timeout": "0.3"}
        )

    assert (late.value.status_code, late.value.code) == (504, "deadline_exceeded")
    assert len(engine.submits) == 1


async def test_a_client_that_leaves_frees_the_engine_at_once(
    world: Any, connect: Any, eventually: Any, gauges: Any
) -> None:
    async def endless(engine: Any, stream: Any, submit: Any) -> None:
        while submit.slot not in engine.cancels:
            stream.step({submit.slot: 97})
            await asyncio.sleep(0.002)

    engine = await world.engine("e-1", endless)
    client = await connect()
    options: Any = {"model": "bytes", "messages": ASKED, "max_tokens": 20000}
    left = metrics.HTTP_RESPONSES.labels("/v1/chat/completions", "499")
    before = left._value.get()

    stream = await client.chat.completions.create(stream=True, **options)
    for _ in range(5):
        await anext(stream)
    await stream.close()
    await eventually(lambda: len(engine.cancels) == 1, within_s=0.2)

    whole = asyncio.create_task(client.chat.completions.create(**options))
    await eventually(lambda: len(engine.submits) == 2)
    whole.cancel()
    await asyncio.wait({whole})
    await eventually(lambda: len(engine.cancels) == 2, within_s=0.2)
    await eventually(lambda: left._value.get() == before + 2)
    await eventually(lambda: gauges() == {"in_flight": 0, "open_slots": 0, "connections": 1})


async def test_raw_responses_carry_the_request_id_given(world: Any, connect: Any) -> None:
    engine = await world.engine("e-1")
    client = await connect()

    raw = await client.chat.completions.with_raw_response.create(
        model="bytes", messages=ASKED, extra_headers={"x-request-id": "mine.1"}
    )
    odd = await client.chat.completions.with_raw_response.create(
        model="bytes", messages=ASKED, extra_headers={"x-request-id": "no spaces, please"}
    )

    assert raw.headers["x-request-id"] == "mine.1" == engine.submits[0].request_id
    assert raw.parse().choices[0].message.content == SAID
    assert odd.headers["x-request-id"] not in ("", "no spaces, please")
