"""The tokenizer of one model: text and conversations to token ids, and back."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer as Backend

from headrace.base.errors import InvalidRequest, StartError
from headrace.text.chat_template import ChatTemplate
from headrace.text.folder_source import read_folder_source
from headrace.text.gguf_source import read_gguf_source
from headrace.text.prompt import Shield, Special, Specials
from headrace.text.source import TokenizerSource
from headrace.text.token_bytes import TokenBytes, layout_of
from headrace.text.tool_calls import OPENING, ToolCall

_ROLES = ("system", "user", "assistant")
_TOOL = "tool"
TOOLS_NOT_SUPPORTED = "TOOLS_NOT_SUPPORTED"


class ChatMessage(Protocol):
    """One turn of a conversation; the protobuf messages of the API fit as they are."""

    @property
    def role(self) -> str: ...
    @property
    def content(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Message:
    """A turn outside protobuf."""

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()


def load_tokenizer(path: str | Path) -> Tokenizer:
    """From a GGUF file or a Hugging Face folder; StartError in one line when that cannot be.

    Takes 0.2 s for the shipped model in a fresh process, imports included: call it once, at the start.
    """
    path = Path(path)
    if not path.exists():
        raise StartError(f"there is no model at {path}")
    return Tokenizer(read_folder_source(path) if path.is_dir() else read_gguf_source(path))


class Tokenizer:
    """Safe to share between threads. Special tokens come from a chat template or by id, never from a user's text."""

    def __init__(self, source: TokenizerSource) -> None:
        self.vocab_size = source.vocab_size
        self.bos_id = source.bos_id
        self.eos_ids = source.eos_ids
        self.max_model_len = source.max_model_len
        self.digest = source.digest
        self.token_bytes = TokenBytes(source.backend)
        self._leading_bos = [source.bos_id] if source.adds_bos and source.bos_id is not None else []
        self._backend = source.backend
        self._backend.encode_special_tokens = True  # they are encoded like any other text
        self._inner = _without_first_space(source.backend)
        added = source.backend.get_added_tokens_decoder()
        self._special_ids = {token.content: i for i, token in added.items() if token.special}
        self._special_texts = {i: text for text, i in self._special_ids.items()}
        self._specials = Specials(self._special_ids)
        self._strips = {t.content: (t.lstrip, t.rstrip) for t in added.values() if t.special}
        self._template = ChatTemplate(source.chat_template, source.template_tokens) if source.chat_template else None
        self._calls_tools = (
            self._template is not None and self._template.reads_tools and OPENING in (source.chat_template or "")
        )

    def encode(self, text: str) -> list[int]:
        """The ids of a prompt, after the model's begin-of-sequence id if it asks for one."""
        return self._leading_bos + _ids(self._backend, text, "prompt")

    def encode_inside(self, text: str) -> list[int]:
        """The ids of a text that goes on from another one: no begin-of-sequence id, no space put in front."""
        return _ids(self._inner, text, "text")

    def encode_chat(self, messages: Sequence[ChatMessage], tools: Sequence[str] = ()) -> list[int]:
        """The ids of a conversation, ready for the assistant's next turn. InvalidRequest names the field at fault.

        `tools` are those that the model may call, each as OpenAI's JSON. Messages may have `tool_calls`, and the role
        "tool", where the model's template knows of such things and its calls can be told from text.
        """
        if self._template is None:
            raise InvalidRequest(
                "messages", "this model has no chat template: send a prompt", reason="NO_CHAT_TEMPLATE"
            )
        if not messages:
            raise InvalidRequest("messages", "must hold at least one message")
        if tools and not self._calls_tools:
            raise _no_tools("tools")
        for n, message in enumerate(messages):
            self._check_turn(f"messages[{n}]", message)
        offered = [json.loads(tool) for tool in tools]
        calls = [[(call.name, json.loads(call.arguments)) for call in _calls(message)] for message in messages]
        contents = [m.content for m in messages]
        shield = Shield(
            self._specials, [*contents, *_texts(offered), *_texts(calls)] if offered or any(calls) else contents
        )
        turns = [_turn(message, made, shield) for message, made in zip(messages, calls, strict=True)]
        rendered = self._template.render(turns, _covered(offered, shield) or None)
        ids = list(self._encode_pieces(list(shield.pieces(rendered))))
        return ids if ids[:1] == self._leading_bos else self._leading_bos + ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`: special and unknown ids are skipped, bytes that are no UTF-8 become U+FFFD."""
        text = b"".join(map(self.token_bytes.__getitem__, ids)).decode(errors="replace")
        return text.removeprefix(" ") if self.token_bytes.drops_first_space else text

    def special_id(self, text: str) -> int | None:
        """The id of the special token spelled exactly `text`."""
        return self._special_ids.get(text)

    def special_text(self, token_id: int) -> str | None:
        """How the special token `token_id` is spelled; None for any other."""
        return self._special_texts.get(token_id)

    def _check_turn(self, field: str, message: ChatMessage) -> None:
        if not self._calls_tools and _calls(message):
            raise _no_tools(f"{field}.tool_calls")
        if message.role == _TOOL and not self._calls_tools:
            raise _no_tools(f"{field}.role")
        if message.role not in (*_ROLES, _TOOL):  # the role is rendered too: it must not carry text of the caller's
            raise InvalidRequest(f"{field}.role", f"must be one of {', '.join(_ROLES)}")

    def _encode_pieces(self, pieces: Sequence[Special | str]) -> Iterator[int]:
        for n, piece in enumerate(pieces):
            if isinstance(piece, Special):
                yield self._special_ids[piece.text]
                continue
            before, after = pieces[n - 1 : n], pieces[n + 1 : n + 2]
            if before and isinstance(before[0], Special) and self._strips[before[0].text][1]:
                piece = piece.lstrip()
            if after and isinstance(after[0], Special) and self._strips[after[0].text][0]:
                piece = piece.rstrip()
            yield from _ids(self._inner if n else self._backend, piece, "messages")


def _calls(message: ChatMessage) -> Sequence[ToolCall]:
    """A message's calls; those of the API have none."""
    calls: Sequence[ToolCall] = getattr(message, "tool_calls", ())
    return calls


def _turn(message: ChatMessage, calls: Sequence[tuple[str, Any]], shield: Shield) -> dict[str, Any]:
    """A message as templates know it."""
    turn: dict[str, Any] = {"role": message.role, "content": shield.cover(message.content)}
    if calls:
        functions = ({"name": shield.cover(name), "arguments": _covered(given, shield)} for name, given in calls)
        turn["tool_calls"] = [{"type": "function", "function": function} for function in functions]
    return turn


def _texts(value: Any) -> Iterator[str]:
    """Every text in a nest of lists and objects, names included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, member in value.items():
            yield name
            yield from _texts(member)
    elif isinstance(value, list | tuple):
        for member in value:
            yield from _texts(member)


def _covered(value: Any, shield: Shield) -> Any:
    """The same nest with every text covered."""
    if isinstance(value, str):
        return shield.cover(value)
    if isinstance(value, Mapping):
        return {shield.cover(name): _covered(member, shield) for name, member in value.items()}
    if isinstance(value, list):
        return [_covered(member, shield) for member in value]
    return value


def _no_tools(field: str) -> InvalidRequest:
    why = "this model's chat template knows of no tools, or its calls have no format that is known here"
    return InvalidRequest(field, why, reason=TOOLS_NOT_SUPPORTED)


def _ids(backend: Backend, text: str, field: str) -> list[int]:
    """Through a batch of one: `encode` keeps the interpreter's lock (3.1 s for 2 MB of text), a batch releases it."""
    try:
        return list(backend.encode_batch_fast([text], add_special_tokens=False)[0].ids)
    except (TypeError, UnicodeError) as error:  # a lone surrogate, which JSON can carry
        raise InvalidRequest(field, "must be valid Unicode text") from error


def _without_first_space(backend: Backend) -> Backend:
    """The same tokenizer for a piece inside a prompt.

    SentencePiece-like ones put a space before the *first* piece only (`prepend_scheme: first`); others are unchanged.
    """
    steps = layout_of(backend.pre_tokenizer) or {}
    first = [s for s in steps.get("pretokenizers", [steps]) if s.get("prepend_scheme") == "first"]
    if not first:
        return backend
    for step in first:
        step["prepend_scheme"] = "never"
    inner = Backend.from_str(json.dumps(json.loads(backend.to_str()) | {"pre_tokenizer": steps}))
    inner.encode_special_tokens = True
    return inner
