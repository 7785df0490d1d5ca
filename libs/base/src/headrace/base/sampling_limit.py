"""How much of everything one request may ask for: checked at the gateway's edge and again by the engine.

The numbers are part of the contract: `protos/headrace/api/common/v1/sampling.proto` states each at its field.
"""

from __future__ import annotations

MAX_STOP_TOKEN_IDS = 64
MAX_LISTED_TOKENS = 65_536
"""Allowed, and likewise banned, token ids."""
MAX_BIASES = 1024
MAX_BIAS = 100.0
MAX_ANSWERS = 16
MAX_LOGPROBS = 20
MAX_CHOICES = 256
MAX_JSON_SCHEMA_BYTES = 64 << 10
MAX_REGEX_BYTES = 8 << 10
MAX_CHOICE_BYTES = 64 << 10
"""All texts together."""
