"""The hashes by which routers know which engine has a prompt's beginning cached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.base.prefix import PrefixKey

SHARED_DOMAIN = "*"
"""Isolation domain of a deployment whose tenants share prefixes; no tenant can have this name."""

MOST_HASHES = 4096
"""Enough for 65,536 tokens; the beginning decides, and a placement must not grow without bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefixes:
    """Computes the chain as the engines do; without their key it has none, and routers count no reuse."""

    key: PrefixKey | None

    def hashes(self, token_ids: Sequence[int], *, bundle_digest: str, domain: str, block_size: int) -> bytes:
        """The hashes of the full blocks of `token_ids`, 16 bytes each, one after the other; about 1 µs each."""
        if self.key is None:
            return b""
        root = self.key.root(bundle_digest=bundle_digest, adapter_digest="", isolation_domain=domain)
        return b"".join(self.key.chain(root, token_ids[: MOST_HASHES * block_size], block_size))
