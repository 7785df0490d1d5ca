"""Tools through OpenAI's client, with a model whose template and calls are Qwen's."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from headrace.api.control.v1.intent_pb2 import Bundle, Deployment
from headrace.base.tokenizer_digest import tokenizer_digest
from headrace.bundle import intent, keys
from headrace.bundle.bundle import digest

KEY = "hr_" + "k" * 43
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
ASKED: list[Any] = [{"role": "user", "content": "How is the weather?"}]
SCHEMA = {"type": "object", "properties": {"city": {"$ref": "#/$defs/city"}}, "$defs": {"city": {"type": "string"}}}
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "description": "says", "parameters": SCHEMA}}]
# Qwen 2.5's own template, shortened where it is prose.
TEMPLATE = """{%- if tools %}<|system|># Tools
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
Answer with <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|end|>
{%- endif %}
{%- for message in messages %}
{%- if message.role == "assistant" and message.tool_calls %}<|assistant|>{{ message.content }}
{%- for tool_call in message.tool_calls %}{%- set tool_call = tool_call.function %}
<tool_call>
{"name": "{{ tool_call.name }}", "arguments": {{ tool_call.arguments | tojson }}}
</tool_call>
{%- endfor %}<|end|>
{%- elif message.role == "tool" %}<|user|><tool_response>{{ message.content }}</tool_response><|end|>
{%- else %}<|{{ message.role }}|>{{ message.content }}<|end|>
{%- endif %}
{%- endfor %}<|assistant|>"""


@pytest.fixture
async def client(world: Any, bundle: Bundle, tokenizer_folder: Path, tmp_path: Path) -> AsyncIterator[AsyncOpenAI]:
    """A client of a gateway that serves a second model, which can call tools."""
    folder = tmp_path / "caller"
    shutil.copytree(tokenizer_folder, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATE}))
    caller = Bundle()
    caller.CopyFrom(bundle)
    caller.model_path, caller.tokenizer_digest = str(folder), tokenizer_digest(folder)
    world.bundle_digest = digest(caller)
    await world.etcd.put(keys.bundle_key(world.bundle_digest), intent.encode(caller))
    served = Deployment(name="caller", bundle_digest=world.bundle_digest, replicas=1, backend="simulated")
    await world.etcd.put(keys.deployment_key("caller"), intent.encode(served))
    await world.gateway(http_address="127.0.0.1:0")
    try:
        async with AsyncOpenAI(
            base_url=f"http://{world.app.http_address}/v1", api_key=KEY, max_retries=0, timeout=20
        ) as made:
            yield made
    finally:
        await world.etcd.delete(keys.deployment_key("caller"))


async def test_a_call_comes_as_a_call_whole_and_streamed(world: Any, client: AsyncOpenAI) -> None:
    await world.engine("e-1", said=f"Let me look.\n{CALL}\n{CALL}")

    whole = await client.chat.completions.create(model="caller", messages=ASKED, tools=TOOLS)
    async with client.chat.completions.stream(model="caller", messages=ASKED, tools=TOOLS) as stream:
        streamed = await stream.get_final_completion()

    for answer in (whole.choices[0], streamed.choices[0]):
        assert answer.message.content == "Let me look."
        assert answer.finish_reason == "tool_calls"
        assert answer.message.tool_calls is not None
        called = [(call.function.name, json.loads(call.function.arguments)) for call in answer.message.tool_calls]
        assert called == [("weather", {"city": "Köln"})] * 2
        assert len({call.id for call in answer.message.tool_calls}) == 2


async def test_the_conversation_with_calls_and_results_is_rendered_as_the_template_has_it(
    world: Any, client: AsyncOpenAI
) -> None:
    engine = await world.engine("e-1", said=CALL)
    first = await client.chat.completions.create(model="caller", messages=ASKED, tools=TOOLS)
    earlier = first.choices[0].message
    assert earlier.tool_calls is not None
    result = {"role": "tool", "tool_call_id": earlier.tool_calls[0].id, "content": "mild <|end|>"}

    await client.chat.completions.create(model="caller", messages=[*ASKED, earlier.model_dump(), result], tools=TOOLS)

    ids = list(engine.submits[1].token_ids)
    text = bytes(t for t in ids if t < 256).decode()
    assert json.dumps(TOOLS[0], ensure_ascii=False) in text
    assert CALL in text
    assert "<tool_response>mild <|end|></tool_response>" in text, "a special token in a result stays text"
    assert ids.count(256) == 4


async def test_a_forced_call_is_a_shape_and_comes_as_a_call(world: Any, client: AsyncOpenAI) -> None:
    engine = await world.engine("e-1", said='{"name":"weather","arguments":{"city":"Köln"}}')
    named: Any = {"type": "function", "function": {"name": "weather"}}

    for choice in ("required", named):
        answer = await client.chat.completions.create(model="caller", messages=ASKED, tools=TOOLS, tool_choice=choice)
        calls = answer.choices[0].message.tool_calls
        assert calls is not None
        assert json.loads(calls[0].function.arguments) == {"city": "Köln"}
        assert answer.choices[0].message.content is None

    schema = json.loads(engine.submits[0].sampling.constraint.json_schema)
    assert schema["anyOf"][0]["properties"]["name"] == {"const": "weather"}
    assert schema["$defs"] == SCHEMA["$defs"], "references in the tool's schema still find what they name"


async def test_an_answer_that_may_not_call_is_text(world: Any, client: AsyncOpenAI) -> None:
    engine = await world.engine("e-1", said=CALL)

    answer = await client.chat.completions.create(model="caller", messages=ASKED, tools=TOOLS, tool_choice="none")

    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (CALL, "stop")
    assert b"# Tools" not in bytes(t for t in engine.submits[0].token_ids if t < 256)
