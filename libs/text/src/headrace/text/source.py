"""What a model's files say about its text side."""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Tokenizer as Backend


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerSource:
    """Read from a GGUF file or a Hugging Face folder; `Tokenizer` is made from it.

    `vocab_size` is the number of rows of the model's embedding: each id below it is valid.
    """

    backend: Backend
    vocab_size: int
    bos_id: int | None
    eos_ids: frozenset[int]
    adds_bos: bool
    chat_template: str | None
    template_tokens: dict[str, str]  # e.g. {"bos_token": "<s>"}, for templates that name them
    max_model_len: int | None
    digest: str
