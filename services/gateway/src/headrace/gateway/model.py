"""A deployment ready to be asked: its tokenizer, its limits and its sampling defaults."""

from __future__ import annotations

from dataclasses import dataclass, replace

from headrace.api.control.v1 import intent_pb2
from headrace.base.errors import StartError
from headrace.bundle.intent import default_sampling
from headrace.gateway.core.ask import ChatPrompt, Prompt, Sampling, TextPrompt, TokenPrompt
from headrace.gateway.core.sampling_check import Limits, check_sampling
from headrace.gateway.parse import sampling_of
from headrace.text.tokenizer import Tokenizer, load_tokenizer

DEFAULT_BLOCK_SIZE = 16
"""The engine's own default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """One bundle's text side; `limits` are narrower where a deployment narrows them.

    `block_size` is that of its engines' KV blocks. With `shared_prefixes` its tenants meet each other's cached ones.
    """

    bundle_digest: str
    tokenizer: Tokenizer
    limits: Limits
    defaults: Sampling
    block_size: int = DEFAULT_BLOCK_SIZE
    shared_prefixes: bool = False

    def narrowed(self, deployment: intent_pb2.Deployment) -> Model:
        """This model as `deployment` serves it: its engines may be told to take less context, or other blocks."""
        asked = _number(deployment, "max_model_len") or self.limits.max_model_len
        return replace(
            self,
            limits=replace(self.limits, max_model_len=min(asked, self.limits.max_model_len)),
            block_size=_number(deployment, "block_size") or DEFAULT_BLOCK_SIZE,
            shared_prefixes=deployment.shared_prefixes,
        )

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """The prompt's token ids; blocks, so call it in a thread."""
        match prompt:
            case TextPrompt():
                return tuple(self.tokenizer.encode(prompt.text))
            case TokenPrompt():
                return prompt.ids
            case ChatPrompt():
                return tuple(self.tokenizer.encode_chat(prompt.messages, prompt.tools or ()))


def _number(deployment: intent_pb2.Deployment, setting: str) -> int:
    given = deployment.engine_settings.get(setting, "")
    return int(given) if given.isdecimal() else 0


def load_model(bundle_digest: str, bundle: intent_pb2.Bundle) -> Model:
    """Read a bundle's tokenizer; blocks. StartError when it is missing or another, InvalidRequest for bad defaults."""
    tokenizer = load_tokenizer(bundle.model_path)
    if tokenizer.digest != bundle.tokenizer_digest:
        raise StartError(f"the tokenizer at {bundle.model_path} is not the one that bundle {bundle_digest} names")
    limits = Limits(vocab_size=tokenizer.vocab_size, max_model_len=bundle.max_model_len)
    defaults = sampling_of(default_sampling(bundle))
    check_sampling(defaults, limits, field="sampling_defaults")
    return Model(bundle_digest=bundle_digest, tokenizer=tokenizer, limits=limits, defaults=defaults)
