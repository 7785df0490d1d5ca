"""Prefix identity: equal only for the same key, bundle, adapter, domain and tokens."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest

from headrace.base.prefix import HASH_BYTES, PrefixKey

KEY = PrefixKey(bytes(range(32)))
TOKENS = list(range(100, 150))
PINNED = [
    "4638d77588ebc6e46abd4eda74668b56",
    "1dc42876b66d4bd81f3859146b65ec75",
    "b17e3388584f3cd3fbccec601f5ea213",
]


def root(key: PrefixKey = KEY, bundle: str = "b", adapter: str = "", domain: str = "t") -> bytes:
    return key.root(bundle_digest=bundle, adapter_digest=adapter, isolation_domain=domain)


def test_gateway_and_engine_compute_the_same_chain() -> None:
    """Pinned: a change of the construction would silently cost every hit between processes of two versions."""
    chain = PrefixKey.parse(bytes(range(32)).hex()).chain(root(), TOKENS, 16)
    assert [block_hash.hex() for block_hash in chain] == PINNED


def test_only_full_blocks_are_in_the_chain() -> None:
    assert [len(KEY.chain(root(), TOKENS[:n], 16)) for n in (0, 15, 16, 31, 32, 50)] == [0, 0, 1, 1, 2, 3]
    assert {len(block_hash) for block_hash in KEY.chain(root(), TOKENS, 16)} == {HASH_BYTES}


def test_a_longer_prompt_continues_the_chain_of_a_shorter_one() -> None:
    short, long = KEY.chain(root(), TOKENS[:32], 16), KEY.chain(root(), TOKENS, 16)
    assert long[:2] == short
    assert KEY.extend(short[-1], TOKENS[32:48]) == long[2]


def test_one_other_token_changes_every_hash_from_its_block_on() -> None:
    other = [*TOKENS[:20], 7, *TOKENS[21:]]
    same = [a == b for a, b in zip(KEY.chain(root(), TOKENS, 16), KEY.chain(root(), other, 16), strict=True)]
    assert same == [True, False, False]


def test_key_bundle_adapter_and_domain_each_make_another_chain() -> None:
    roots = [
        root(),
        root(PrefixKey(bytes(32))),
        root(bundle="b2"),
        root(adapter="a"),
        root(domain="u"),
    ]
    chains = [tuple(PrefixKey(bytes(range(32))).chain(r, TOKENS, 16)) for r in roots]
    assert len(set(chains)) == len(chains)


def test_parts_cannot_be_shifted_into_one_another() -> None:
    """An adapter whose digest ends in a domain's name is not that domain (vllm#44701)."""
    parts = ["", "a", "b", "ab", "ba", "a\0b"]
    roots = {root(bundle=b, adapter=a, domain=d) for b, a, d in itertools.product(parts, repeat=3)}
    assert len(roots) == len(parts) ** 3


def test_a_block_of_tokens_is_never_a_root() -> None:
    assert KEY.extend(b"", []) != root(bundle="", domain="")


def test_two_processes_have_different_chains_unless_told_otherwise() -> None:
    """A predictable seed would let a client construct prompts that collide (vllm#12621)."""
    code = (
        "from headrace.base.prefix import PrefixKey as P; k = P.random();"
        "print(k.chain(k.root(bundle_digest='b', adapter_digest='', isolation_domain='t'), range(16), 16)[0].hex())"
    )
    said = {
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=20).stdout
        for _ in range(2)
    }
    assert len(said) == 2


@pytest.mark.parametrize("text", ["", "abc", "zz" * 16, "00" * 15, "00" * 65])
def test_a_key_that_cannot_be_is_refused_without_repeating_it(text: str) -> None:
    with pytest.raises(ValueError, match="32 to 128 hexadecimal digits") as refused:
        PrefixKey.parse(text)
    assert not text or text not in str(refused.value)


def test_a_key_does_not_show_in_its_repr() -> None:
    secret = "5ec7e7" * 8
    assert secret not in repr(PrefixKey.parse(secret))
