"""Prefix identity: one chain of hashes, computed the same way by whoever asks what an engine has cached.

The root names everything that the keys and values of a prefix depend on besides its tokens, and who may see them; each
full block of tokens then extends the chain, so equal hashes mean equal prefixes. BLAKE2b with a secret key and 128
bits: nobody without the key can construct two prefixes with one hash, nor tell from a hash what it stands for.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Sequence
from hashlib import blake2b

HASH_BYTES = 16
_KEY_BYTES = 32
# BLAKE2b's own way to keep two uses of one key apart: no block of tokens can pass for a root.
_ROOT = b"headrace-root"
_BLOCK = b"headrace-block"


class PrefixKey:
    """The secret key of the chains. Its repr does not show it."""

    __slots__ = ("_key",)

    def __init__(self, key: bytes) -> None:
        if not 16 <= len(key) <= 64:
            raise ValueError("a prefix key has 16 to 64 bytes")
        self._key = key

    @classmethod
    def random(cls) -> PrefixKey:
        """A key that nobody else has."""
        return cls(secrets.token_bytes(_KEY_BYTES))

    @classmethod
    def parse(cls, text: str) -> PrefixKey:
        """From hexadecimal digits; the ValueError does not repeat them."""
        try:
            return cls(bytes.fromhex(text))
        except ValueError:
            raise ValueError("a prefix key is written as 32 to 128 hexadecimal digits") from None

    def root(self, *, bundle_digest: str, adapter_digest: str, isolation_domain: str) -> bytes:
        """Where the chains of one bundle (its weights and tokenizer), adapter content and isolation domain begin."""
        state = blake2b(digest_size=HASH_BYTES, key=self._key, person=_ROOT)
        for part in (bundle_digest, adapter_digest, isolation_domain):
            raw = part.encode()
            # With its length before each part no two triples read the same.
            state.update(struct.pack("<I", len(raw)) + raw)
        return state.digest()

    def extend(self, parent: bytes, token_ids: Sequence[int]) -> bytes:
        """The hash of the block of `token_ids` that follows the prefix with hash `parent`."""
        tokens = struct.pack(f"<{len(token_ids)}I", *token_ids)
        return blake2b(parent + tokens, digest_size=HASH_BYTES, key=self._key, person=_BLOCK).digest()

    def chain(self, root: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
        """The hashes of all full blocks of `token_ids`, in order."""
        hashes: list[bytes] = []
        parent = root
        for end in range(block_size, len(token_ids) + 1, block_size):
            parent = self.extend(parent, token_ids[end - block_size : end])
            hashes.append(parent)
        return hashes
