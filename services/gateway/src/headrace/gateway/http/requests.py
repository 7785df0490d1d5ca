"""The two ways to ask, from JSON to the gateway's own words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from headrace.base.errors import InvalidRequest
from headrace.gateway.core.ask import Ask, ChatPrompt, Message, Prompt, TextPrompt, TokenPrompt
from headrace.gateway.http.fields import UNSUPPORTED, Fields, as_ids, kind_of
from headrace.gateway.http.sampling_fields import DEFAULTS, take_sampling
from headrace.gateway.http.tools import Tools, take_calls, take_tools

# Documented by OpenAI as labels, or as advice to its own caches and prices: an answer is the same without them.
_LABELS = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """One request: what to answer, and how to tell it. `names` says what it calls the inner protocol's fields."""

    ask: Ask
    stream: bool
    include_usage: bool
    logprobs: bool
    names: Mapping[str, str]
    tools: Tools = field(default_factory=Tools)


def chat_request(body: bytes) -> Parsed:
    """What `/v1/chat/completions` is asked for."""
    fields = Fields.of_body(body)
    tools = take_tools(fields)
    _refuse_chat_extras(fields)
    model = fields.text("model") or ""
    messages = _messages(fields)
    names: dict[str, str] = {}
    wanted, top = fields.flag("logprobs"), fields.integer("top_logprobs")
    if top is not None and not wanted:
        raise InvalidRequest("top_logprobs", "needs logprobs to be true")
    names["sampling.logprobs"] = "top_logprobs"
    sampling = take_sampling(fields, names, logprobs=(top or 0) if wanted else None)
    if tools.constraint is not None:
        if sampling.constraint is not None:
            raise InvalidRequest("tool_choice", "cannot force a call beside another shape of the answer")
        names["sampling.constraint.json_schema"] = "tools"
        sampling = replace(sampling, constraint=tools.constraint)
    stream, include_usage = _stream(fields)
    fields.ignore(*_LABELS)
    fields.done()
    prompt = ChatPrompt(messages=messages, tools=tools.offered)
    ask = Ask(model=model, prompt=prompt, sampling=sampling, fallback=DEFAULTS)
    return Parsed(ask=ask, stream=stream, include_usage=include_usage, logprobs=wanted, names=names, tools=tools)


def completion_request(body: bytes) -> Parsed:
    """What `/v1/completions` is asked for."""
    fields = Fields.of_body(body)
    model = fields.text("model") or ""
    prompt = _prompt(fields)
    names: dict[str, str] = {}
    logprobs = fields.integer("logprobs")
    if fields.flag("echo"):
        raise InvalidRequest("echo", "is not supported: put the prompt before the answer yourself", reason=UNSUPPORTED)
    if fields.text("suffix"):
        raise InvalidRequest("suffix", "is not supported: the model continues texts, it does not fill gaps")
    best_of = fields.integer("best_of")
    sampling = take_sampling(fields, names, logprobs=logprobs)
    if best_of is not None and best_of != (sampling.n or 1):
        raise InvalidRequest("best_of", "is not supported beyond n: every answer made is sent", reason=UNSUPPORTED)
    stream, include_usage = _stream(fields)
    fields.ignore(*_LABELS)
    fields.done()
    ask = Ask(model=model, prompt=prompt, sampling=sampling, fallback=DEFAULTS)
    return Parsed(ask=ask, stream=stream, include_usage=include_usage, logprobs=logprobs is not None, names=names)


def _stream(fields: Fields) -> tuple[bool, bool]:
    """Whether to stream, and whether usage comes as the stream's last chunk."""
    stream = fields.flag("stream")
    if not stream:
        fields.refuse("stream_options", "is only for requests with stream: true", reason="INVALID_FIELD")
    options = fields.inner("stream_options")
    if options is None:
        return stream, False
    include_usage = options.flag("include_usage")
    if options.flag("include_obfuscation"):
        raise InvalidRequest("stream_options.include_obfuscation", "is not supported", reason=UNSUPPORTED)
    options.done()
    return stream, include_usage


def _refuse_chat_extras(fields: Fields) -> None:
    """What OpenAI's own models take besides: refused by name, with the reason."""
    modalities = fields.texts("modalities")
    if any(one != "text" for one in modalities):
        raise InvalidRequest("modalities", 'must be ["text"]: answers are text', reason=UNSUPPORTED)
    for name in ("audio", "prediction", "web_search_options", "reasoning_effort", "verbosity"):
        fields.refuse(name, "is not supported by this server; leave it out")


def _prompt(fields: Fields) -> Prompt:
    """A string, a list of one string, token ids, or a list of one list of token ids."""
    given = fields.take("prompt")
    if isinstance(given, list) and len(given) == 1 and isinstance(given[0], str | list):
        given = given[0]
    if isinstance(given, str):
        return TextPrompt(text=given)
    if not isinstance(given, list):
        raise InvalidRequest("prompt", f"must be a string or a list of token ids, not {kind_of(given)}")
    if any(isinstance(one, str | list) for one in given):
        raise InvalidRequest(
            "prompt",
            f"holds {len(given)} prompts; send one per request, they are batched all the same",
            reason=UNSUPPORTED,
        )
    return TokenPrompt(ids=as_ids(given, "prompt"))


def _messages(fields: Fields) -> tuple[Message, ...]:
    entries = fields.objects("messages")
    if entries is None:
        raise InvalidRequest("messages", "must be given")
    return tuple(_message(entry) for entry in entries)


def _message(fields: Fields) -> Message:
    role = fields.text("role") or ""
    calls = take_calls(fields)
    fields.ignore("tool_call_id")  # the template tells calls and their results apart by their order
    content = "" if calls and not fields.has("content") else _content(fields)
    # What an answer of ours, or of others, carries besides when a client sends it back as part of the conversation.
    fields.ignore("refusal", "annotations", "reasoning_content")
    fields.refuse("name", "is not supported: the model's template tells speakers apart by role only")
    fields.done()
    return Message(role="system" if role == "developer" else role, content=content, tool_calls=calls)


def _content(fields: Fields) -> str:
    path, given = fields.path("content"), fields.take("content")
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise InvalidRequest(path, f"must be a string or a list of text parts, not {kind_of(given)}")
    return "".join(_part(part, f"{path}[{index}]") for index, part in enumerate(given))


def _part(part: object, path: str) -> str:
    if not isinstance(part, dict):
        raise InvalidRequest(path, f"must be an object with type and text, not {kind_of(part)}")
    if part.get("type") not in ("text", "refusal"):
        raise InvalidRequest(
            f"{path}.type", f"is {part.get('type')!r}; this model reads text parts only", reason=UNSUPPORTED
        )
    text = part.get(part["type"])
    if not isinstance(text, str):
        raise InvalidRequest(f"{path}.{part['type']}", f"must be a string, not {kind_of(text)}")
    return text
